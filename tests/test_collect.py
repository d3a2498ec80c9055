"""What the ranks collect reaches the computation on the main process."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from exact import identical
from ranks import returned, run_ranks

from syncstate import Context, Every, SharedState, SyncEngine

PATIENCE = 300.0
EACH = Every(steps=1)
MODES: list[dict[str, Any]] = [{}, {"lag": 2}, {"async_op": True}, {"async_op": True, "lag": 4}]


def of_rank(rank: int) -> list[Any]:
    """What one rank contributes at each step: other types, shapes and lengths on each."""
    return [
        None if rank == 1 else rank,
        torch.arange(3 * rank),
        "text" * rank,
        [rank] * (5 * rank),
        {"a": np.arange(rank + 1), rank: None},
        torch.full((rank, 2), float(rank)),
        [],
        (rank, [None, {rank}]),
        None,
        torch.full((20_000 * (rank == 2),), rank, dtype=torch.int16),
        torch.full((20_000 * (rank != 2),), rank, dtype=torch.int16),
    ]


def shared_of_all(ctx: Context) -> list[Any]:
    return [ctx.step, ctx.is_main, ctx.collected]


def lists(rank: int, options: dict[str, Any]) -> list[Any]:
    """The steps at which what arrives is not what the ranks have contributed."""
    contributions = of_rank(rank)

    def collect(ctx: Context) -> Any:
        assert (ctx.rank, ctx.world_size, ctx.is_main) == (rank, 3, rank == 0)
        return contributions[ctx.step % len(contributions)]

    state = SharedState()
    state.add("x", shared_of_all, collect=collect, every=EACH)
    wrong = []
    with SyncEngine(state, timeout=PATIENCE, **options) as engine:
        for step in range(2 * len(contributions)):
            engine.step(step)
            at = state.info("x").computed_at
            assert at is not None
            expected = [of_rank(peer)[at % len(contributions)] for peer in range(3)]
            if not identical(state["x"], [at, True, expected]):
                wrong.append([step, at, state["x"]])
        return [wrong, *state.info("x")[:3]]


@pytest.mark.parametrize("options", MODES, ids=str)
def test_a_list_holds_what_each_rank_sent_whatever_its_type_and_size(options: dict[str, Any]) -> None:
    lag = options.get("lag", 2 if options.get("async_op") else 0)
    assert returned(run_ranks(lists, 3, options)) == [[[], 22 - lag, 21 - lag, 21]] * 3


REDUCTIONS = ("mean", "sum", "min", "max", "any", "all")


def reductions(rank: int, options: dict[str, Any]) -> Any:
    """Each reduction, over numbers, tensors, some without a result, and none at all."""
    shapes: dict[str, Any] = {
        "number": rank + 1,
        "tensor": torch.tensor([rank, -rank, 7], dtype=torch.float64),
        "truth": rank == 1,
        "some": None if rank == 0 else float(rank),
        "none": None,
        "nan": math.nan if rank == 2 else float(rank),
    }
    state = SharedState()
    for name, result in shapes.items():
        for how in REDUCTIONS:
            state.add(
                f"{name} {how}", lambda ctx: ctx.collected, collect=lambda ctx, r=result: r, reduce=how, every=EACH
            )
    with SyncEngine(state, timeout=PATIENCE, **options) as engine:
        for step in range(5):
            engine.step(step)
        return [dict(state), engine.stats.collectives]


@pytest.mark.parametrize("options", [{}, {"async_op": True}], ids=str)
def test_reductions_count_each_rank_once(options: dict[str, Any]) -> None:
    expected: dict[str, dict[str, Any]] = {
        "number": dict(zip(REDUCTIONS, (2.0, 6, 1, 3, True, True), strict=True)),
        "truth": dict(zip(REDUCTIONS, (1 / 3, 1, False, True, True, False), strict=True)),
        "some": dict(zip(REDUCTIONS, (1.5, 3.0, 1.0, 2.0, True, True), strict=True)),
        "none": dict.fromkeys(REDUCTIONS),
        "nan": dict(zip(REDUCTIONS, (math.nan, math.nan, math.nan, math.nan, True, False), strict=True)),
        "tensor": {
            "mean": torch.tensor([1.0, -1.0, 7.0], dtype=torch.float64),
            "sum": torch.tensor([3.0, -3.0, 21.0], dtype=torch.float64),
            "min": torch.tensor([0.0, -2.0, 7.0], dtype=torch.float64),
            "max": torch.tensor([2.0, -0.0, 7.0], dtype=torch.float64),
            "any": torch.tensor([True, True, True]),
            "all": torch.tensor([False, False, True]),
        },
    }
    for held, collectives in returned(run_ranks(reductions, 3, options)):
        for name, by_reduction in expected.items():
            for how, value in by_reduction.items():
                assert identical(_plain_zero(held[f"{name} {how}"]), _plain_zero(value)), (name, how)
        # What was collected at the last step is not computed yet.
        assert collectives == (9 if options else 10)


def _plain_zero(value: Any) -> Any:
    return value + 0.0 if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def alone(options: dict[str, Any]) -> list[Any]:
    state = SharedState()
    state.add("list", shared_of_all, collect=lambda ctx: ctx.step, every=EACH)
    state.add("mean", lambda ctx: ctx.collected, collect=lambda ctx: ctx.step, reduce="mean", every=EACH)
    with SyncEngine(state, **options) as engine:
        for step in range(6):
            engine.step(step)
        return [state["list"], state["mean"], engine.stats.collectives]


@pytest.mark.parametrize("options", MODES, ids=str)
def test_a_group_of_one_collects_from_itself(options: dict[str, Any]) -> None:
    at = 5 - options.get("lag", 2 if options.get("async_op") else 0)
    assert alone(options) == [[at, True, [at]], float(at), 0]


class Collecting:
    """A source with a collecting function of its own."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.seen: list[Any] = []

    def collect(self, ctx: Context) -> Any:
        self.seen.append([ctx.step, ctx.epoch, ctx.previous, ctx.collected])
        return [self.rank, float(ctx.rng.random())]

    def compute(self, ctx: Context) -> Any:
        return [ctx.step, ctx.collected, float(ctx.rng.random()), ctx.previous and ctx.previous[0]]


def own_functions(rank: int, options: dict[str, Any]) -> Any:
    source = Collecting(rank)
    state = SharedState()
    state.add("x", source, every=Every(steps=2))
    with SyncEngine(state, seed=4, timeout=PATIENCE, **options) as engine:
        for step in range(7):
            engine.step(step, step // 3)
    return [source.seen, state["x"]]


@pytest.mark.parametrize("options", [{}, {"async_op": True}], ids=str)
def test_each_rank_collects_with_the_step_of_the_sync_and_what_it_holds(options: dict[str, Any]) -> None:
    for rank, (seen, value) in enumerate(returned(run_ranks(own_functions, 2, options))):
        assert [row[:2] for row in seen] == [[0, 0], [2, 0], [4, 1], [6, 2]]
        assert [row[2] and row[2][0] for row in seen] == [None, 0, 2, 4] if not options else [None, 0, 0, 2]
        assert [row[3] for row in seen] == [None] * 4
        step, collected, drawn, previous = value
        assert (step, previous) == ((4, 2) if options else (6, 4))
        # Every rank draws the numbers that main's computation draws.
        assert [peer for peer, _ in collected] == [0, 1], rank
        if not options:
            assert [number for _, number in collected] == [drawn, drawn]


# Observed numbers


def observing(rank: int, options: dict[str, Any]) -> list[Any]:
    state = SharedState(observe_capacity=5)
    state.add("x", lambda ctx: [ctx.step, [part.tolist() for part in ctx.collected]], collect="observed",
              every=Every(steps=2))  # fmt: skip
    found = []
    with SyncEngine(state, timeout=PATIENCE, **options) as engine:
        for step in range(9):
            if engine.step(step):
                found.append(state["x"])
            if step == 4 and rank == 1:
                state.observe("x", torch.arange(20))  # only the newest stay
            elif step != 6:
                state.observe("x", 10 * step + rank)
        left = state.observed("x").tolist()
    return [found, left]


@pytest.mark.parametrize("options", [{}, {"async_op": True}], ids=str)
def test_observed_numbers_reach_main_once_and_only_the_newest(options: dict[str, Any]) -> None:
    expected = [
        [0, [[], []]],
        [2, [[0.0, 10.0], [1.0, 11.0]]],
        [4, [[20.0, 30.0], [21.0, 31.0]]],
        [6, [[40.0, 50.0], [16.0, 17.0, 18.0, 19.0, 51.0]]],
        [8, [[70.0], [71.0]]],
    ]
    for rank, (found, left) in enumerate(returned(run_ranks(observing, 2, options))):
        assert found == (expected[:-1] if options else expected)
        assert left == [80.0 + rank]


# How much travels


def counted(rank: int, options: dict[str, Any], sizes: list[int]) -> list[Any]:
    """What each sync takes, when rank 1 contributes so many numbers, and main sends so many."""
    state = SharedState()
    state.add(
        "x",
        lambda ctx: [int(sum(part.sum() for part in ctx.collected)), torch.zeros(sizes[0])],
        collect=lambda ctx: torch.full((sizes[1] if rank == 1 else 1,), 2),
        every=Every(steps=5),
    )
    found = []
    with SyncEngine(state, timeout=PATIENCE, **options) as engine:
        before = 0
        for step in range(19):
            engine.step(step)
            if engine.stats.collectives != before:
                found.append([step, engine.stats.collectives - before])
                before = engine.stats.collectives
        assert state["x"][0] == 2 * sizes[1] + 2 * (dist.get_world_size() - 1)
    return found


@pytest.mark.parametrize("sizes", [[10, 10], [10, 50_000]])
def test_a_blocking_sync_with_collect_takes_two_collectives(sizes: list[int]) -> None:
    # What does not fit into the frame of a rank follows from rank to rank, which is no collective.
    expected = [[step, 2] for step in (0, 5, 10, 15)]
    assert returned(run_ranks(counted, 3, {}, sizes)) == [expected] * 3


def test_a_value_above_the_frame_takes_one_more() -> None:
    expected = [[step, 3] for step in (0, 5, 10, 15)]
    assert returned(run_ranks(counted, 2, {}, [50_000, 50_000])) == [expected] * 2


@pytest.mark.parametrize("sizes", [[10, 10], [10, 50_000], [50_000, 10]])
def test_an_asynchronous_sync_with_collect_takes_two_collectives_in_two_steps(sizes: list[int]) -> None:
    found = returned(run_ranks(counted, 3, {"async_op": True}, sizes))
    if sizes[0] == 10:
        expected = [[0, 2], *([step + i, 1] for step in (5, 10, 15) for i in (0, 1))]
        assert found == [expected] * 3
    else:
        # The frames of asynchronous syncs grow with their values: only the first has something behind it, which a rank
        # posts when it has seen the frame.
        assert [sum(count for _, count in each) for each in found] == [3 + 2 * 3 + 1] * 3


def changed_after(rank: int, numel: int) -> list[Any]:
    """The collecting function hands out its own memory, and changes it right after the launch."""
    mine = torch.zeros(numel, dtype=torch.int64)

    def collect(ctx: Context) -> torch.Tensor:
        return mine.fill_(10 * ctx.step + rank)

    state = SharedState()
    state.add("x", lambda ctx: [[int(one.min()), int(one.max())] for one in ctx.collected], collect=collect, every=EACH)
    found = []
    with SyncEngine(state, async_op=True, timeout=PATIENCE) as engine:
        for step in range(7):
            engine.step(step)
            mine.fill_(-1)
            found.append(state["x"])
    return found


@pytest.mark.parametrize("numel", [4, 500_000])
def test_what_a_rank_collected_does_not_change_on_its_way(numel: int) -> None:
    expected = [[[10 * s + r] * 2 for r in range(3)] for s in (0, 0, 0, 1, 2, 3, 4)]
    assert returned(run_ranks(changed_after, 3, numel)) == [expected] * 3


class Model(torch.nn.Module):
    pass


def models(rank: int, options: dict[str, Any]) -> list[Any]:
    """Whether collecting, computing and applying see the model."""
    seen: list[list[bool]] = [[], [], []]

    def note(place: int, ctx: Context) -> int:
        seen[place].append(ctx.model is not None)
        return ctx.step

    state = SharedState()
    state.add("x", lambda ctx: note(0, ctx), collect=lambda ctx: note(1, ctx), apply=lambda _, ctx: note(2, ctx),
              every=EACH)  # fmt: skip
    with SyncEngine(state, timeout=PATIENCE, **options) as engine:
        engine.model = Model()
        for step in range(5):
            engine.step(step)
    return seen


def test_an_asynchronous_value_that_collects_is_computed_without_the_model() -> None:
    main, other = returned(run_ranks(models, 2, {}))
    assert main == [[True] * 5] * 3
    assert other == [[], [True] * 5, [True] * 5]
    main, other = returned(run_ranks(models, 2, {"async_op": True}))
    # The first is blocking; the model would have changed when the others are computed, one step later.
    assert main == [[True, False, False, False, False], [True, *main[1][1:]], [True] * 3]
    assert other == [[], main[1], [True] * 3]
