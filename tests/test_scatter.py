"""An item for each rank instead of one value for all."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from exact import identical
from ranks import returned, run_ranks

from syncstate import Context, Every, SharedState, SyncEngine, TensorSpec
from syncstate.errors import SyncStateError

PATIENCE = 300.0
EACH = Every(steps=1)
MODES: list[dict[str, Any]] = [{}, {"lag": 2}, {"async_op": True}, {"async_op": True, "lag": 3}]


def item(rank: int, step: int) -> Any:
    """What a rank gets at a step: of other types and sizes on each rank, some too large for the frame."""
    kinds: list[Any] = [
        rank,
        "x" * (100 * rank),
        torch.arange(1000 * rank) + step,
        {"rank": rank, "of": [step, None]},
        torch.full((20_000 * (rank == 1),), step),
        np.arange(rank, dtype=np.float32),
        [rank] * (9000 * (rank == 2)),
        None,
    ]
    return kinds[(rank + step) % len(kinds)]


def scattered(rank: int, options: dict[str, Any]) -> list[Any]:
    seen: list[Any] = []

    def source(ctx: Context) -> Any:
        seen.append(None if ctx.previous is None else len(ctx.previous))
        return [item(peer, ctx.step) for peer in range(ctx.world_size)]

    state = SharedState()
    state.add("x", source, every=EACH, deliver="scatter", **options)
    state.add("all", lambda ctx: ctx.step, every=EACH, **options)
    wrong = []
    with SyncEngine(state, timeout=PATIENCE) as engine:
        for step in range(20):
            engine.step(step)
            at = state.info("x").computed_at
            assert at is not None
            if not identical(state["x"], item(rank, at)) or state["all"] != at:
                wrong.append([step, at, state["x"]])
        return [wrong, *state.info("x")[:3], sorted({*seen} - {None})]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("options", MODES, ids=str)
def test_each_rank_gets_its_item_whatever_its_type_and_size(options: dict[str, Any], world_size: int) -> None:
    lag = options.get("lag", 1 if options.get("async_op") else 0)
    main, *others = returned(run_ranks(scattered, world_size, options))
    # Main's previous value is the whole sequence.
    assert main == [[], 20 - lag, 19 - lag, 19, [world_size]]
    assert others == [[[], 20 - lag, 19 - lag, 19, []]] * (world_size - 1)


def counted(rank: int, numel: int, options: dict[str, Any]) -> list[Any]:
    state = SharedState()
    state.add("x", lambda ctx: [torch.full((numel,), peer) for peer in range(ctx.world_size)], every=Every(steps=4),
              deliver="scatter", **options)  # fmt: skip
    found = []
    with SyncEngine(state, timeout=PATIENCE) as engine:
        for step in range(12):
            engine.step(step)
            found.append(engine.stats.collectives)
    assert torch.equal(state["x"], torch.full((numel,), rank))
    return found


def test_a_scatter_takes_one_collective_and_one_more_where_the_items_do_not_fit_the_frame() -> None:
    assert returned(run_ranks(counted, 3, 10, {})) == [[1] * 4 + [2] * 4 + [3] * 4] * 3
    assert returned(run_ranks(counted, 3, 3000, {})) == [[2] * 4 + [4] * 4 + [6] * 4] * 3
    assert returned(run_ranks(counted, 3, 10, {"async_op": True})) == [[1] * 4 + [2] * 4 + [3] * 4] * 3


def test_an_asynchronous_scatter_takes_two_where_the_items_do_not_fit_the_frame() -> None:
    main, other = returned(run_ranks(counted, 2, 30_000, {"async_op": True}))
    assert main == [2] * 4 + [4] * 4 + [6] * 4
    # A receiver posts the receipt of its item when the frame has come, at the apply step at the latest.
    assert [other[3], other[7], other[11]] == [2, 4, 6]


def refused(rank: int, options: dict[str, Any]) -> list[Any]:
    """What a source returns that is no sequence of an item for each rank, or has items that break the spec."""
    results: list[Callable[[], Any]] = [
        lambda: [1, 2],
        lambda: [1, 2, 3, 4],
        lambda: "abc",
        lambda: 7,
        lambda: {0: 1, 1: 2, 2: 3},
        list,
        lambda: [1, 2, object()],
        lambda: [1, "2", 3],
    ]

    def source(ctx: Context) -> Any:
        if ctx.step % 2 and ctx.step < 2 * len(results):
            return results[ctx.step // 2]()
        return [ctx.step * 10 + peer for peer in range(3)]

    state = SharedState()
    state.add("x", source, every=EACH, deliver="scatter", spec=int, **options)
    found: list[Any] = []
    with SyncEngine(state, timeout=PATIENCE) as engine:
        for step in range(2 * len(results) + 2):
            try:
                engine.step(step)
            except SyncStateError as error:
                found.append([step, type(error).__name__, str(error).splitlines()[0]])
        found.append(state["x"])
    return found


@pytest.mark.parametrize("options", [{}, {"async_op": True}], ids=str)
def test_what_is_no_item_for_each_rank_is_an_error_on_every_rank(options: dict[str, Any]) -> None:
    wants = 'ValueError: deliver="scatter" takes a sequence with an item for each of 3 ranks, got '
    errors = [
        ("ComputeError", f"{wants}list of 2"),
        ("ComputeError", f"{wants}list of 4"),
        ("ComputeError", f"{wants}str of 3"),
        ("ComputeError", f"{wants}int"),
        ("ComputeError", f"{wants}dict of 3"),
        ("ComputeError", f"{wants}list"),
        ("MismatchError", "promised int, got object"),
        ("MismatchError", "promised int, got str"),
    ]
    later = 1 if options else 0
    for rank, found in enumerate(returned(run_ranks(refused, 3, options))):
        assert found[-1] == 10 * (17 - later) + rank
        assert [(step, kind) for step, kind, _ in found[:-1]] == [
            (2 * i + 1 + later, kind) for i, (kind, _) in enumerate(errors)
        ]
        for i, (_, text) in enumerate(errors):
            assert found[i][2].startswith(f"value 'x' at step {2 * i + 1} on main (rank 0): {text}")


def unsendable(rank: int, numel: int) -> list[str]:
    """One of the items cannot travel."""
    padding = torch.zeros(numel)
    state = SharedState()
    state.add("x", lambda ctx: [padding, [1, object()]] if ctx.step else [0, 1], every=EACH, deliver="scatter")
    with SyncEngine(state, timeout=PATIENCE) as engine:
        engine.start()
        try:
            engine.step(1)
        except SyncStateError as error:
            return [type(error).__name__, str(error).splitlines()[0], state["x"]]
    return ["nothing"]


@pytest.mark.parametrize("numel", [4, 100_000])
def test_an_item_that_cannot_travel_is_an_error_on_every_rank(numel: int) -> None:
    for rank, (kind, text, held) in enumerate(returned(run_ranks(unsendable, 2, numel))):
        assert (kind, held) == ("ComputeError", rank)
        assert text.startswith("value 'x' at step 1 on main (rank 0): CodecError: cannot encode [1][1] of type object")


def various(rank: int) -> list[Any]:
    """Other sequences, a spec for each item, collecting, an apply on each rank, and mixed with other values."""
    applied: list[Any] = []
    state = SharedState()
    state.add("array", lambda ctx: np.arange(ctx.world_size) * 2, every=EACH, deliver="scatter")
    state.add("tensor", lambda ctx: torch.arange(6).view(3, 2), every=EACH, deliver="scatter",
              spec=TensorSpec((2,), torch.int64))  # fmt: skip
    state.add("tuple", lambda ctx: (0, 1, 2), every=EACH, deliver="scatter",
              apply=lambda value, ctx: applied.append([value, ctx.rank]))  # fmt: skip
    state.add("turned", lambda ctx: ctx.collected[1:] + ctx.collected[:1], collect=lambda ctx: [ctx.rank, ctx.step],
              every=EACH, deliver="scatter")  # fmt: skip
    state.add("same", lambda ctx: [0, 1, 2], every=EACH)
    with SyncEngine(state, timeout=PATIENCE, verify_values=True) as engine:
        for step in range(3):
            engine.step(step)
    return [int(state["array"]), state["tensor"].tolist(), state["tuple"], state["turned"], state["same"], applied]


def test_sequences_of_all_kinds_are_scattered_beside_values_for_all() -> None:
    assert returned(run_ranks(various, 3)) == [
        [2 * r, [2 * r, 2 * r + 1], r, [(r + 1) % 3, 2], [0, 1, 2], [[r, r]] * 3] for r in range(3)
    ]


def kept(rank: int, numel: int) -> list[Any]:
    """Main's own item, and its sequence, are copies: the source changes what it returned."""
    held = [torch.zeros(numel) for _ in range(2)]

    def source(ctx: Context) -> list[torch.Tensor]:
        for peer, tensor in enumerate(held):
            tensor.fill_(10 * ctx.step + peer)
        return held

    state = SharedState()
    state.add("x", source, every=EACH, deliver="scatter")
    found = []
    with SyncEngine(state, async_op=True, lag=2, timeout=PATIENCE) as engine:
        for step in range(7):
            engine.step(step)
            for tensor in held:
                tensor.fill_(-1)
            found.append(sorted(set(state["x"].tolist())))
    return found


@pytest.mark.parametrize("numel", [4, 100_000])
def test_a_source_that_changes_its_items_after_the_launch_changes_nothing(numel: int) -> None:
    expected = [[[10 * s + r] for s in (0, 0, 0, 1, 2, 3, 4)] for r in range(2)]
    assert returned(run_ranks(kept, 2, numel)) == expected


# Checkpoints


def walk(ctx: Context) -> list[Any]:
    """An item for each rank, made from the whole sequence before."""
    before = sum(part[0] for part in ctx.previous) if ctx.previous else 0
    padding = torch.full((3000,), ctx.step)  # all items together do not fit the frame
    return [[before + peer + ctx.step, ctx.step, padding] for peer in range(ctx.world_size)]


def walking(options: dict[str, Any]) -> SyncEngine:
    state = SharedState()
    options = dict(options)
    main = options.pop("main", None)
    state.add("x", walk, every=Every(steps=2), deliver="scatter", **options)
    return SyncEngine(state, main=main, timeout=PATIENCE)


def traced(engine: SyncEngine, steps: range) -> list[Any]:
    found = []
    for step in steps:
        came = engine.step(step)
        found.append([came, engine.state["x"][:2], *engine.state.info("x")[:3]])
    return found


def first_run(rank: int, options: dict[str, Any], stop: int) -> list[Any]:
    with walking(options) as engine:
        traced(engine, range(stop + 1))
        content = engine.state_dict()
        return [content, traced(engine, range(stop + 1, 16))]


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def second_run(rank: int, contents: list[dict[str, Any]], options: dict[str, Any], stop: int) -> list[Any]:
    messages = Messages()
    logging.getLogger("syncstate").addHandler(messages)
    with walking(options) as engine:
        engine.load_state_dict(contents[rank % len(contents)])
        came = engine.start(stop)
        held = [came, engine.state["x"][:2], *engine.state.info("x")[:3]]
        return [held, traced(engine, range(stop + 1, 16)), messages.texts]


@pytest.mark.parametrize("main", [0, 1])
@pytest.mark.parametrize("options", MODES, ids=str)
def test_a_restore_delivers_the_items_again_also_those_in_flight(options: dict[str, Any], main: int) -> None:
    options = {**options, "main": main}
    for stop in (4, 7):
        first = returned(run_ranks(first_run, 2, options, stop))
        for contents in ([content for content, _ in first], [first[main][0]]):  # saved by each rank, or by main alone
            second = returned(run_ranks(second_run, 2, contents, options, stop))
            for rank in range(2):
                assert second[rank][0][0] == ()
                assert second[rank][1] == first[rank][1]
                # That only main has all items is no difference between the checkpoints of the ranks.
                assert second[rank][2] == []


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("options", MODES, ids=str)
def test_with_another_world_size_the_value_is_computed_anew(options: dict[str, Any], sizes: tuple[int, int]) -> None:
    stop = 7
    first = returned(run_ranks(first_run, sizes[0], options, stop))
    second = returned(run_ranks(second_run, sizes[1], [first[0][0]], options, stop))
    for rank, (held, after, _) in enumerate(second):
        # A value that nobody has is computed at the start, from nothing.
        assert held == [("x",), [rank + stop, stop], 1, stop, stop]
        lag = options.get("lag", 1 if options.get("async_op") else 0)
        assert after[-1][3] == max(s for s in range(8, 16, 2) if s + lag <= 15)
        total = sum(peer + stop for peer in range(sizes[1]))
        eighth = next(row for row in after if row[3] == 8)
        assert eighth[1] == [total + rank + 8, 8]
        assert eighth[2:] == [2, 8, 8 + lag]
