"""Schedules that only main can follow: it announces the next point, and every rank obeys."""

import io
import itertools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import returned, run_ranks

from syncstate import Context, Every, SharedState, SyncEngine
from syncstate.errors import ComputeError

PATIENCE = 300.0
FOREVER = Every(seconds=1e6)  # no point is ever measured: one step, then twice as many
DOUBLING = [0, 1, 3, 7, 15, 31]

Calls = list[list[Any]]


def synced(found: Calls) -> list[int]:
    """The steps at which a call brought something."""
    return [step for step, came, *_ in found if came]


def follow(rank: int, every: list[Every], paces: list[float], last: int, options: dict[str, Any]) -> Calls:
    """A run on ranks of different speeds and clocks; what each call brings."""
    state = SharedState()
    for index, schedule in enumerate(every):
        state.add(f"v{index}", lambda ctx: ctx.step, every=schedule, **options)
    found = []
    # A clock that runs at another rate and started elsewhere, on every rank but main.
    if rank:
        real = time.monotonic
        time.monotonic = lambda: 1e5 + real() * (1 + rank)
    with SyncEngine(state, timeout=PATIENCE) as engine:
        for step in range(last + 1):
            time.sleep(paces[rank])
            came = engine.step(step)
            found.append([step, came, [state.info(name)[:3] for name in state.names], engine.stats.syncs])
    return found


@pytest.mark.parametrize("options", [{}, {"async_op": True}, {"lag": 2}, {"async_op": True, "lag": 3}], ids=str)
@pytest.mark.parametrize(
    "every",
    [[Every(seconds=0.02)], [Every(overhead=0.2)], [Every(seconds=0.015), Every(overhead=0.1), Every(steps=5)]],
    ids=["seconds", "overhead", "mixed"],
)
def test_ranks_of_different_speeds_and_clocks_sync_at_the_same_steps(
    every: list[Every], options: dict[str, Any]
) -> None:
    main, *others = returned(run_ranks(follow, 3, every, [0.002, 0.0, 0.003], 60, options))
    assert others == [main] * 2
    assert len(synced(main)) >= 3
    if not options:
        # Once measured, a point comes again before long.
        assert main[-1][2][0][0] >= 4


def test_the_first_announcement_is_one_step_then_twice_as_many() -> None:
    for found in returned(run_ranks(follow, 2, [FOREVER], [0.0, 0.0], 40, {})):
        assert synced(found) == DOUBLING
        assert [info for _, _, (info,), _ in found][31] == (6, 31, 31)


@pytest.mark.parametrize(("async_op", "lag"), [(True, 1), (True, 3), (False, 3)])
def test_with_a_lag_the_points_are_as_far_apart_and_the_values_in_force_later(async_op: bool, lag: int) -> None:
    for found in returned(run_ranks(follow, 2, [FOREVER], [0.0, 0.0], 60, {"async_op": async_op, "lag": lag})):
        applied = synced(found)
        computed = [infos[0][1] for step, came, infos, _ in found if came]
        assert applied == [0, *(step + lag for step in computed[1:])]
        if async_op:
            # The next point travels with the value, so the first one is seen in the call after the arrival.
            gaps = [b - a for a, b in itertools.pairwise(computed[1:])]
            assert computed[:2] == [0, lag]
            assert all(b in (2 * a, 2 * a + 1) for a, b in itertools.pairwise(gaps))
        else:
            assert computed == [step for step in [0, 3, 9, 21, 45] if step + lag <= 60]


def test_start_and_stop_are_steps() -> None:
    every = [Every(seconds=1e6, start=5, stop=20), Every(overhead=0.5, start=7, stop=8)]
    for found in returned(run_ranks(follow, 2, every, [0.0, 0.0], 40, {})):
        first = [infos[0][1] for _, came, infos, _ in found if "v0" in came]
        second = [infos[1][1] for _, came, infos, _ in found if "v1" in came]
        assert first == [5, 6, 8, 12]
        assert second == [7]


def fast_path(rank: int) -> list[Any]:
    """What lies between two points costs no sync, and what main announces travels with the values."""
    state = SharedState()
    state.add("a", lambda ctx: ctx.step, every=FOREVER)
    state.add("b", lambda ctx: ctx.step, every=FOREVER)
    with SyncEngine(state, timeout=PATIENCE) as engine:
        for step in range(35):
            engine.step(step)
        return [engine.stats.syncs, engine.stats.collectives]


def test_an_announcement_takes_no_message_of_its_own() -> None:
    assert returned(run_ranks(fast_path, 2)) == [[6, 6]] * 2


def fails(rank: int, async_op: bool) -> list[int]:
    def source(ctx: Context) -> int:
        computed.append(ctx.step)
        if ctx.step in (3, 6):
            raise ValueError("boom")
        return ctx.step

    computed: list[int] = []
    raised = []
    state = SharedState()
    state.add("x", source, every=FOREVER, async_op=async_op, lag=0 if not async_op else 1)
    with SyncEngine(state, timeout=PATIENCE) as engine:
        for step in range(30):
            try:
                engine.step(step)
            except ComputeError:
                raised.append(step)
    return [raised, computed]  # type: ignore[list-item]


def test_after_a_failure_the_interval_repeats() -> None:
    main, other = returned(run_ranks(fails, 2, False))
    assert main[0] == other[0] == [3]
    # Two steps before the failure, and two after it; then twice as many as lie between the values that came.
    assert main[1][:4] == [0, 1, 3, 5]
    assert other[1] == []


def test_after_a_failure_in_flight_the_interval_repeats() -> None:
    main, other = returned(run_ranks(fails, 2, True))
    assert main[0] == other[0]
    assert main[0] == [step + 1 for step in main[1] if step in (3, 6)]
    assert main[1][-1] > 10


# Going on


def loaded(content: dict[str, Any]) -> dict[str, Any]:
    """As it comes back from a file."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    buffer.seek(0)
    found: dict[str, Any] = torch.load(buffer, weights_only=True)
    return found


def announced(rank: int, options: dict[str, Any], seconds: float, stop: int, how: str) -> list[Any]:
    """The points of a run, also of one that is stopped and goes on in one of several ways."""
    computed: list[int] = []

    def source(ctx: Context) -> int:
        computed.append(ctx.step)
        return ctx.step

    def engine() -> SyncEngine:
        state = SharedState()
        state.add("x", source, every=Every(seconds=seconds, stop=40), **options)
        return SyncEngine(state, timeout=PATIENCE)

    running = engine()
    for step in range(stop + 1):
        running.step(step)
    content = loaded(running.state_dict())
    if how != "unbroken":
        running.close()
    if how == "checkpoint":
        running = engine()
        running.load_state_dict(content)
    running.start(stop)
    found = []
    for step in range(stop + 1, 50):
        if running.step(step):
            found.append(step)
    found.append(running.state.info("x").version)
    running.close()
    held = [computed]
    dist.broadcast_object_list(held)
    return [held[0], found]


OPTIONS: list[dict[str, Any]] = [{}, {"lag": 2}, {"async_op": True}, {"async_op": True, "lag": 3}]


@pytest.mark.parametrize("how", ["close", "checkpoint"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_next_point_is_kept_by_a_close_and_in_checkpoints(options: dict[str, Any], how: str) -> None:
    lag = options.get("lag", 1 if options.get("async_op") else 0)
    for stop in (0, 4, 7, 45):
        first, second = returned(run_ranks(announced, 2, options, 1e6, stop, how))
        assert first == second
        computed, (*applied, version) = first
        assert computed == sorted(set(computed))  # the start computes nothing that was computed before
        # The interval is the same as before, and then twice as many: the time before the stop is no measurement.
        gaps = [b - a for a, b in itertools.pairwise(computed)]
        assert all(b in (a, a + 1, 2 * a, 2 * a + 1) for a, b in itertools.pairwise(gaps)), (stop, computed)
        assert max(computed) < 40
        assert version == len(computed)
        assert applied == [step + lag for step in computed if step + lag > stop and step > 0]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_run_that_goes_on_has_the_points_of_the_unbroken_one(options: dict[str, Any]) -> None:
    for stop in (4, 5):
        # Every point is due before it was measured, so that the intervals are the least that there are.
        unbroken, *others = (
            returned(run_ranks(announced, 2, options, 1e-9, stop, how)) for how in ("unbroken", "close", "checkpoint")
        )
        assert others == [unbroken] * 2


def goes_back(rank: int, async_op: bool) -> list[Any]:
    state = SharedState()
    state.add("x", lambda ctx: ctx.step, every=Every(seconds=1e6, stop=10), async_op=async_op)
    found = []
    with SyncEngine(state, timeout=PATIENCE) as engine:
        for step in range(20):
            engine.step(step)
        found.append(state["x"])
        engine.start(2)
        for step in range(3, 20):
            engine.step(step)
            found.append(state["x"])
    return found


@pytest.mark.parametrize("async_op", [False, True])
def test_training_that_begins_again_computes_at_its_first_step(async_op: bool) -> None:
    for found in returned(run_ranks(goes_back, 2, async_op)):
        assert found[0] in (7, 8)
        assert found[1] == 2


def dear(rank: int) -> list[Any]:
    """A sync that costs ten times a step, and may cost a fifth of the time."""
    computed = []

    def source(ctx: Context) -> int:
        computed.append(ctx.step)
        time.sleep(0.01)
        return ctx.step

    state = SharedState()
    state.add("x", source, every=Every(overhead=0.2))
    with SyncEngine(state, timeout=PATIENCE) as engine:
        for step in range(200):
            time.sleep(0.001)
            engine.step(step)
    return computed


def test_what_a_sync_costs_decides_how_often_there_is_one() -> None:
    computed, _ = returned(run_ranks(dear, 2))
    # A sync of 10 ms may come every 40 ms of steps, which last more than a millisecond here.
    gaps = [b - a for a, b in itertools.pairwise(computed)]
    assert gaps[:2] == [1, 2]
    assert max(gaps) > 4
    assert len(computed) < 80
