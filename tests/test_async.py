"""Asynchronous syncs: what is in force at which step, which is what a blocking sync with the same lag brings."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from ranks import returned, run_ranks

from syncstate import Context, Every, SharedState, SyncEngine
from syncstate.context import generator

SEED = 3
# Longer than any of these runs may take: whoever waits for a timeout has hung.
PATIENCE = 300.0

Source = Callable[[Context], Any]


class Plan(NamedTuple):
    """One value: its source, and every how many steps it is computed, from which step on, with which lag."""

    source: Source
    steps: int
    lag: int
    start: int = 0


def chained(ctx: Context) -> list[Any]:
    """Made from its own random numbers and from the value before."""
    before = ctx.previous[2] if ctx.previous else 0.0
    return [ctx.step, ctx.epoch, 0.5 * before + float(ctx.rng.random())]


def large(ctx: Context) -> torch.Tensor:
    """Above the frame, and made from the value before."""
    new = torch.arange(100_000) + ctx.step
    return new if ctx.previous is None else new + ctx.previous[::2].repeat_interleave(2) % 7


def growing(ctx: Context) -> list[int]:
    """Below the frame at first, then above."""
    return list(range(40 * ctx.step))


def four(ctx: Context) -> torch.Tensor:
    return torch.from_numpy(ctx.rng.standard_normal(4)) + ctx.step


PLANS = {
    "chained": Plan(chained, 1, 1),
    "every_two": Plan(chained, 2, 3),
    "four": Plan(four, 1, 2),
    "growing": Plan(growing, 3, 4),
    "large": Plan(large, 2, 5),
    "late": Plan(chained, 4, 2, start=5),
}
JUMPS = [0, 1, 2, 3, 4, 9, 10, 11, 18, 18, 19, 20, 21, 30, 31]


def short(value: Any) -> Any:
    """A value in a form that can be compared, and is small enough to be returned by a rank."""
    if isinstance(value, torch.Tensor) and value.numel() <= 4:
        return value.tolist()
    if isinstance(value, torch.Tensor):
        return [value.dtype, len(value), int(value.sum()), int((value * torch.arange(len(value))).sum() % 1_000_003)]
    return [len(value), sum(value)] if len(value) > 3 else value


def computed(plans: dict[str, Plan], calls: Sequence[int]) -> list[Any]:
    """What each call must bring, worked out in one process from what a schedule and a lag mean.

    For each call: the names that come into force, oldest first, and name -> (value, version, computed at, applied at).
    """
    held: dict[str, Any] = {}
    last: dict[str, tuple[int, Any]] = {}  # what was computed, in force or not
    waiting: list[
        tuple[int, int, str, Any]
    ] = []  # step from which it is in force, step of the computation, name, value
    found, seen = [], -1
    for step in calls:
        names = []
        for one in [one for one in waiting if one[0] <= step]:
            waiting.remove(one)
            _, at, name, value = one
            held[name] = [short(value), held[name][1] + 1, at, step]
            names.append(name)
        for name, (source, steps, lag, start) in sorted(plans.items()):
            if not any(point > seen for point in range(start, step + 1, steps)):
                continue
            version, previous = last.get(name, (0, None))
            value = source(Context(step=step, previous=previous, rng=generator(SEED, name, version + 1)))
            last[name] = (version + 1, value)
            if version == 0:
                held[name] = [short(value), 1, step, step]
                names.append(name)
            else:
                waiting.append((step + lag, step, name, value))
        seen = step
        found.append([list(dict.fromkeys(names)), {name: list(one) for name, one in sorted(held.items())}])
    return found


def state_of(plans: dict[str, Plan], **options: Any) -> SharedState:
    state = SharedState()
    for name, (source, steps, lag, start) in plans.items():
        state.add(name, source, every=Every(steps=steps, start=start), lag=lag, **options)
    return state


def seen_by(engine: SyncEngine, step: int) -> list[Any]:
    """What a call brings, in the form of `computed`."""
    names = list(engine.step(step))
    state = engine.state
    return [names, {name: [short(state[name]), *state.info(name)[:3]] for name in sorted(state)}]


def history(rank: int, names: list[str], calls: list[int], async_op: bool, delay: float, rounds: int) -> list[Any]:
    """What each call brings, on a rank that now and then is late."""
    plans = {name: PLANS[name] for name in names}
    pause = random.Random(rank)
    found: list[Any] = []
    for _ in range(rounds):
        with SyncEngine(state_of(plans), seed=SEED, async_op=async_op, timeout=PATIENCE) as engine:
            found.append([])
            for step in calls:
                if pause.random() < 0.3:
                    time.sleep(pause.random() * delay)
                found[-1].append(seen_by(engine, step))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("async_op", [True, False])
def test_what_is_in_force_follows_from_schedule_and_lag_alone_on_every_rank(world_size: int, async_op: bool) -> None:
    calls = list(range(26))
    expected = computed(PLANS, calls)
    for found in returned(run_ranks(history, world_size, list(PLANS), calls, async_op, 0.004, 1)):
        assert found == [expected]


@pytest.mark.parametrize("async_op", [True, False])
def test_a_jump_over_several_steps_brings_all_that_was_due_in_the_order_of_the_launches(async_op: bool) -> None:
    expected = computed(PLANS, JUMPS)
    assert expected[5][0] == ["every_two", "large", "four", "growing", "chained", "late"]
    for found in returned(run_ranks(history, 2, list(PLANS), JUMPS, async_op, 0.004, 1)):
        assert found == [expected]


def test_random_delays_never_change_what_is_in_force() -> None:
    calls = list(range(12))
    expected = computed(PLANS, calls)
    for found in returned(run_ranks(history, 3, list(PLANS), calls, True, 0.005, 20)):
        assert found == [expected] * 20


def slow_rank(rank: int, slow: int) -> list[Any]:
    found = []
    with SyncEngine(state_of({"x": Plan(large, 3, 2)}), seed=SEED, async_op=True, timeout=PATIENCE) as engine:
        for step in range(13):
            time.sleep(0.02 if rank == slow else 0.002)
            found.append(seen_by(engine, step))
    return found


@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_ten_times_slower_holds_each_value_from_the_same_step_on(slow: int) -> None:
    expected = computed({"x": Plan(large, 3, 2)}, range(13))
    assert [step for step, (names, _) in enumerate(expected) if names] == [0, 5, 8, 11]
    assert returned(run_ranks(slow_rank, 2, slow)) == [expected] * 2


# Many at a time


def crowded(rank: int, lag: int) -> list[Any]:
    found = []
    with SyncEngine(state_of({"x": Plan(large, 1, lag)}), seed=SEED, async_op=True, timeout=PATIENCE) as engine:
        for step in range(2 * lag + 5):
            if rank == 1 and step % 7 == 0:
                time.sleep(0.01)
            found.append([seen_by(engine, step), engine.stats.syncs])
    return found


def test_more_than_eight_launches_wait_for_the_oldest_and_all_come_into_force_at_their_steps() -> None:
    lag = 20
    calls = range(2 * lag + 5)
    expected = computed({"x": Plan(large, 1, lag)}, calls)
    for found in returned(run_ranks(crowded, 2, lag)):
        assert [seen for seen, _ in found] == expected
        # The first was blocking; those that arrived since are all but the newest eight.
        assert [arrived for _, arrived in found] == [1 + max(0, step - 8) for step in calls]


def many_frames(rank: int) -> list[Any]:
    """Values with schedules and lags of their own, so that each step launches another set of them."""
    plans = {f"v{i}": Plan(chained, 1 + i % 4, 1 + i % 5, start=i % 3) for i in range(12)}
    calls = list(range(30))
    with SyncEngine(state_of(plans), seed=SEED, async_op=True, timeout=PATIENCE) as engine:
        return [[seen_by(engine, step) for step in calls] == computed(plans, calls), engine.stats.collectives]


def test_values_of_many_schedules_and_lags_travel_in_one_frame_a_step() -> None:
    # A frame for each step, in which v0 is due at least, and one for the first values of each of the steps 0, 1 and 2.
    assert returned(run_ranks(many_frames, 2)) == [[True, 32]] * 2


def mixed(rank: int) -> list[Any]:
    """Blocking and asynchronous values, with and without a lag, due at the same steps."""
    state = SharedState()
    for name, async_op, lag in (("a", True, 2), ("b", False, None), ("c", False, 2), ("d", True, None)):
        state.add(name, lambda ctx: ctx.step, every=Every(steps=2), async_op=async_op, lag=lag)
    found = []
    with SyncEngine(state, timeout=PATIENCE) as engine:
        for step in range(7):
            found.append([step, engine.step(step), [state[name] for name in "abcd"], engine.stats.collectives])
    return found


def test_arrivals_come_first_then_one_blocking_and_one_asynchronous_frame() -> None:
    assert (
        returned(run_ranks(mixed, 2))
        == [
            [
                [0, ("a", "b", "c", "d"), [0, 0, 0, 0], 1],
                [1, (), [0, 0, 0, 0], 1],
                [2, ("b",), [0, 2, 0, 0], 3],
                [3, ("d",), [0, 2, 0, 2], 3],
                [4, ("c", "a", "b"), [2, 4, 2, 2], 5],
                [5, ("d",), [2, 4, 2, 4], 5],
                [6, ("c", "a", "b"), [4, 6, 4, 4], 7],
            ]
        ]
        * 2
    )


def epochs(rank: int) -> list[Any]:
    state = SharedState()
    state.add("step", lambda ctx: ctx.step, every=Every(steps=2))
    state.add("epoch", lambda ctx: ctx.epoch, every=Every(epochs=1))
    with SyncEngine(state, async_op=True, lag=2, timeout=PATIENCE) as engine:
        calls = [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (4, 1), (5, 1), (6, 1), (6, 2)]
        return [[call, engine.step(*call), state["step"], state["epoch"]] for call in calls]


def test_the_values_of_an_epoch_are_in_force_at_once_in_an_asynchronous_engine() -> None:
    assert (
        returned(run_ranks(epochs, 2))
        == [
            [
                [(0, 0), ("epoch", "step"), 0, 0],
                [(1, 0), (), 0, 0],
                [(2, 0), (), 0, 0],
                [(3, 0), (), 0, 0],
                [(3, 1), ("epoch",), 0, 1],
                [(4, 1), ("step",), 2, 1],
                [(5, 1), (), 2, 1],
                [(6, 1), ("step",), 4, 1],
                [(6, 2), ("epoch",), 4, 2],
            ]
        ]
        * 2
    )


# What a launch keeps


def changed_sources(rank: int, numel: int) -> list[Any]:
    """The source hands out its own memory, and changes it right after the launch."""
    held = torch.zeros(numel, dtype=torch.int64)
    nested = {"a": [1, 2]}

    def source(ctx: Context) -> torch.Tensor:
        return held.fill_(ctx.step)

    def tree(ctx: Context) -> dict[str, list[int]]:
        nested["a"][0] = ctx.step
        return nested

    state = SharedState()
    state.add("held", source, every=Every(steps=1))
    state.add("nested", tree, every=Every(steps=1))
    found = []
    with SyncEngine(state, async_op=True, lag=2, timeout=PATIENCE) as engine:
        for step in range(8):
            engine.step(step)
            held.fill_(-1)
            nested["a"][1] += 1
            found.append([int(state["held"].min()), int(state["held"].max()), state["nested"]["a"][0]])
    return found


@pytest.mark.parametrize("numel", [4, 1_000_000])
def test_a_source_that_changes_its_value_after_the_launch_changes_nothing(numel: int) -> None:
    assert returned(run_ranks(changed_sources, 2, numel)) == [[[s, s, s] for s in [0, 0, 0, 1, 2, 3, 4, 5]]] * 2


def old_versions(rank: int, numel: int) -> list[Any]:
    """All versions are kept by the training loop, and looked at only in the end."""
    state = SharedState()
    state.add("x", lambda ctx: torch.full((numel,), ctx.step), every=Every(steps=1))
    kept = []
    with SyncEngine(state, async_op=True, lag=3, timeout=PATIENCE) as engine:
        for step in range(20):
            if engine.step(step):
                kept.append(state["x"])
    return [(int(x.min()), int(x.max())) for x in kept]


@pytest.mark.parametrize("numel", [4, 1500, 3000, 300_000])
def test_an_old_value_does_not_change_under_its_holder(numel: int) -> None:
    assert returned(run_ranks(old_versions, 2, numel)) == [[(s, s) for s in range(17)]] * 2


def read_meanwhile(rank: int, numel: int) -> list[Any]:
    """A thread looks at the value all the time, and at how many calls had returned before and begun after."""
    state = SharedState()
    state.add("x", lambda ctx: torch.full((numel,), ctx.step, dtype=torch.uint8), every=Every(steps=2))
    now = [0, 0]  # the last step whose call has returned, and the last one whose call has begun
    looks: list[list[int]] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            before = now[0]
            value = state["x"]
            after = now[1]
            looks.append([before, after, int(value.min()), int(value.max())])

    with SyncEngine(state, async_op=True, lag=2, timeout=PATIENCE) as engine:
        engine.start()
        thread = threading.Thread(target=look)
        thread.start()
        for step in range(1, 11):
            time.sleep(0.01)
            now[1] = step
            engine.step(step)
            now[0] = step
        over.set()
        thread.join()
    return looks


def test_a_reader_sees_whole_values_only_and_the_new_one_from_the_declared_step_on() -> None:
    in_force = [0, 0, 0, 0, 2, 2, 4, 4, 6, 6, 8]
    for looks in returned(run_ranks(read_meanwhile, 2, 30_000_000)):
        assert len(looks) > 3
        for before, after, least, most in looks:
            assert least == most
            assert in_force[before] <= least <= in_force[after]


# Global random state


def random_states() -> list[bytes]:
    numpy: Any = np.random.get_state(legacy=False)
    return [
        repr(random.getstate()).encode(),
        repr((numpy["state"]["key"].tobytes(), numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"])).encode(),
        torch.random.get_rng_state().numpy().tobytes(),
    ]


def draws(rank: int, async_op: bool) -> list[Any]:
    """Collecting and computing draw from the global generators, and seed them anew."""

    def reseed(ctx: Context) -> float:
        found = random.random() + random.gauss(0, 1) + np.random.standard_normal() + float(torch.rand(()))
        random.seed(ctx.step)
        np.random.seed(ctx.step)
        torch.manual_seed(ctx.step)
        return found

    state = SharedState()
    state.add("both", reseed, collect=reseed, every=Every(steps=2))
    state.add("alone", reseed, every=Every(steps=1))
    random.seed(5)
    np.random.seed(6)
    torch.manual_seed(7)
    np.random.standard_normal()  # the second of a pair is kept beside the generator's words
    before = random_states()
    with SyncEngine(state, async_op=async_op, lag=2, timeout=PATIENCE) as engine:
        kept = []
        for step in range(9):
            engine.step(step)
            kept.append(random_states() == before)
            # The loop's own draws are those of a run without an engine.
            random.seed(step)
            np.random.seed(step)
            torch.manual_seed(step)
            torch.rand(step)
            before = random_states()
        engine.sync()
        kept.append(random_states() == before)
    return [kept, state.info("both").version, state.info("alone").version]


@pytest.mark.parametrize("async_op", [False, True])
def test_the_global_random_state_is_the_same_before_and_after_each_sync_on_every_rank(async_op: bool) -> None:
    assert returned(run_ranks(draws, 3, async_op)) == [[[True] * 10, 6, 10]] * 3
