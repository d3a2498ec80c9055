"""Values in flight and checkpoints: a run that goes on from one equals the run that was never interrupted."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exact import identical
from ranks import returned, run_ranks

from syncstate import Context, Every, SharedState, SyncEngine
from syncstate.context import generator
from syncstate.errors import ComputeError

PATIENCE = 300.0
EACH = Every(steps=1)
LAST = 17


class Walk:
    """A source with a state of its own, which lives on main."""

    def __init__(self) -> None:
        self.position = 0

    def compute(self, ctx: Context) -> int:
        self.position += ctx.step + 1
        return self.position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def drawn(ctx: Context) -> list[Any]:
    """Made from the random numbers of this computation, and from the one before."""
    return [ctx.step, ctx.epoch, float(ctx.rng.random()) + (0.5 * ctx.previous[2] if ctx.previous else 0.0)]


def running(ctx: Context) -> torch.Tensor:
    """Above the frame."""
    noise = torch.from_numpy(ctx.rng.standard_normal(3000))
    return noise if ctx.previous is None else ctx.previous / 2 + noise


def failing(ctx: Context) -> list[Any]:
    if ctx.step in (6, 7, 12):
        raise ValueError("boom")
    return drawn(ctx)


def rich_state() -> SharedState:
    """Values whose results do not depend on the number of ranks."""
    state = SharedState()
    state.add("now", drawn, every=Every(steps=2))
    state.add("held", drawn, every=Every(steps=2), lag=3)
    state.add("async", drawn, every=EACH, async_op=True, lag=4)
    state.add("running", running, every=Every(steps=3), async_op=True, lag=2)
    state.add("walk", Walk(), every=Every(steps=2), async_op=True, lag=3)
    state.add("failing", failing, every=EACH, async_op=True, lag=2)
    state.add("epoch", drawn, every=Every(epochs=1))
    # Only main's contribution counts.
    state.add("sum", lambda ctx: [*drawn(ctx), ctx.collected], collect=lambda ctx: 0 if ctx.rank else ctx.step + 1,
              reduce="sum", every=EACH, async_op=True, lag=3)  # fmt: skip
    return state


def points(first: int, last: int) -> list[tuple[int, int]]:
    """A call for each step, and one more when an epoch of five steps turns."""
    calls = [(step, max(0, step - 1) // 5) for step in range(last + 1)]
    calls += [(step, step // 5) for step in range(5, last + 1, 5)]
    return [call for call in sorted(calls) if call[0] > first]


def trace(engine: SyncEngine, calls: list[tuple[int, int]]) -> list[Any]:
    found = []
    for step, epoch in calls:
        came = engine.step(step, epoch)
        values = {name: value.tolist() if name == "running" else value for name, value in engine.state.items()}
        found.append([came, values, [engine.state.info(name)[:3] for name in engine.state.names]])
    return found


def loaded(content: dict[str, Any]) -> dict[str, Any]:
    """As it comes back from a file."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    buffer.seek(0)
    found: dict[str, Any] = torch.load(buffer, weights_only=True)
    return found


def engine_of(state: SharedState) -> SyncEngine:
    return SyncEngine(state, seed=5, on_error="keep", timeout=PATIENCE)


def from_main(content: dict[str, Any]) -> dict[str, Any]:
    """What rank 0 saved."""
    held = [content]
    dist.broadcast_object_list(held)
    return held[0]


def resumed(rank: int, by_rank: bool) -> list[int]:
    """The steps after which a run that goes on from a checkpoint differs from the unbroken one."""
    with engine_of(rich_state()) as engine:
        whole = trace(engine, points(-1, LAST))
    wrong = []
    for stop in range(LAST) if by_rank else range(2, LAST, 4):
        before, after = points(-1, stop), points(stop, LAST)
        with engine_of(rich_state()) as engine:
            trace(engine, before)
            content = loaded(engine.state_dict())
            assert identical(trace(engine, after[:2]), whole[len(before) : len(before) + 2]), (
                stop
            )  # saving changes nothing
        if not by_rank and dist.is_initialized():
            content = from_main(content)
        with engine_of(rich_state()) as engine:
            engine.load_state_dict(content)
            assert engine.start(stop, None) == ()
            if not identical(trace(engine, after), whole[len(before) :]):
                wrong.append(stop)
    return wrong


@pytest.mark.parametrize("by_rank", [False, True])
def test_a_resumed_run_equals_the_unbroken_one_whatever_was_in_flight(by_rank: bool) -> None:
    assert returned(run_ranks(resumed, 2, by_rank)) == [[]] * 2


def test_a_resumed_run_of_one_process_equals_the_unbroken_one() -> None:
    assert resumed(0, True) == []


def saved_and_traced(rank: int, stop: int) -> list[Any]:
    with engine_of(rich_state()) as engine:
        trace(engine, points(-1, stop))
        content = loaded(engine.state_dict())
        return [content if rank == 0 else None, trace(engine, points(stop, LAST))]


def going_on(rank: int, content: dict[str, Any], stop: int) -> list[Any]:
    with engine_of(rich_state()) as engine:
        engine.load_state_dict(content)
        engine.start(stop, None)
        return trace(engine, points(stop, LAST))


@pytest.mark.parametrize("sizes", [(2, 3), (3, 1), (1, 2)], ids=str)
def test_a_run_resumes_with_another_world_size(sizes: tuple[int, int]) -> None:
    stop = 8
    (content, expected), *_ = returned(run_ranks(saved_and_traced, sizes[0], stop))
    for found in returned(run_ranks(going_on, sizes[1], content, stop)):
        assert identical(found, expected)


def on_disk(rank: int, path: str) -> list[Any]:
    """Main alone saves, at a step at which the others do not even call `state_dict`; what each holds in the end."""
    with engine_of(rich_state()) as engine:
        trace(engine, points(-1, 7))
        if rank == 0:
            torch.save(engine.state_dict(), path)
        return trace(engine, points(7, LAST))


def test_saving_on_main_alone_disturbs_nobody(tmp_path: Path) -> None:
    path = str(tmp_path / "engine.pt")
    unbroken = returned(run_ranks(on_disk, 3, path))
    assert identical(unbroken[1], unbroken[0])
    content = torch.load(path, weights_only=True)
    for found in returned(run_ranks(going_on, 3, content, 7)):
        assert identical(found, unbroken[0])


# A sync by hand while a value is in flight


def syncs_by_hand(rank: int, options: dict[str, Any]) -> list[Any]:
    state = SharedState()
    collect = (lambda ctx: ctx.rank) if options.pop("collects", False) else None
    state.add("x", drawn, every=Every(steps=2), collect=collect, **options)
    state.add("y", drawn, every=Every(steps=2), **options)
    found = []
    with SyncEngine(state, seed=5, timeout=PATIENCE) as engine:
        for step in range(13):
            found.append([engine.step(step), *(info(state, name) for name in "xy")])
            if step == 5:
                found.append([engine.sync("x"), *(info(state, name) for name in "xy")])
    return found


def info(state: SharedState, name: str) -> list[Any]:
    return [*state.info(name)[:3], state[name]]


@pytest.mark.parametrize(
    "options",
    [{"lag": 4}, {"lag": 4, "async_op": True}, {"lag": 4, "async_op": True, "collects": True}],
    ids=str,
)
def test_a_sync_by_hand_overtakes_what_is_in_flight(options: dict[str, Any]) -> None:
    x: list[list[Any]] = []
    for step in (0, 2, 4, 5, 6, 8):  # computed in this order, each from the one before
        number = generator(5, "x", len(x) + 1).random() + (0.5 * x[-1][2] if x else 0.0)
        x.append([step, 0, float(number)])
    first, by_hand, sixth, eighth = [1, 0, 0, x[0]], [4, 5, 5, x[3]], [5, 6, 10, x[4]], [6, 8, 12, x[5]]
    expected = [
        *([("x", "y"), first], [(), first], [(), first], [(), first], [(), first], [(), first]),
        [("x",), by_hand],
        *([("y",), by_hand], [(), by_hand], [("y",), by_hand], [(), by_hand]),
        *([("x", "y"), sixth], [(), sixth], [("x", "y"), eighth]),
    ]
    for found in returned(run_ranks(syncs_by_hand, 2, options)):
        assert [[sorted(row[0]), row[1]] for row in found] == [[list(names), row] for names, row in expected]
        # The other value comes as if nothing had happened.
        assert [row[2][:3] for row in found if "y" in row[0]] == [
            *([1, 0, 0], [2, 2, 6], [3, 4, 8], [4, 6, 10], [5, 8, 12]),
        ]  # fmt: skip


def fails_by_hand(rank: int, async_op: bool) -> list[Any]:
    def source(ctx: Context) -> list[Any]:
        if ctx.step == 3:
            raise ValueError("boom")
        return drawn(ctx)

    state = SharedState()
    state.add("x", source, every=Every(steps=2), async_op=async_op, lag=3)
    found = []
    with SyncEngine(state, seed=5, timeout=PATIENCE) as engine:
        for step in range(8):
            engine.step(step)
            if step == 3:
                with pytest.raises(ComputeError):
                    engine.sync("x")
            found.append(info(state, "x"))
    return found


@pytest.mark.parametrize("async_op", [False, True])
def test_a_sync_by_hand_that_fails_leaves_what_is_in_force_and_what_is_in_flight(async_op: bool) -> None:
    x: list[list[Any]] = []
    for step in (0, 2, 4):
        number = generator(5, "x", len(x) + 1).random() + (0.5 * x[-1][2] if x else 0.0)
        x.append([step, 0, float(number)])
    expected = [*[[1, 0, 0, x[0]]] * 5, *[[2, 2, 5, x[1]]] * 2, [3, 4, 7, x[2]]]
    assert returned(run_ranks(fails_by_hand, 2, async_op)) == [expected] * 2


# Starting again


def goes_back(rank: int, async_op: bool, close: bool) -> list[Any]:
    state = SharedState()
    state.add("x", lambda ctx: [ctx.step, ctx.previous and ctx.previous[0]], every=Every(steps=2))
    found = []
    engine = SyncEngine(state, async_op=async_op, lag=5, timeout=PATIENCE)
    for step in range(13):
        engine.step(step)
    found.append(info(state, "x"))
    if close:
        engine.close()
    engine.start(0)
    found.append(info(state, "x"))
    for step in range(1, 11):
        engine.step(step)
        found.append(info(state, "x"))
    engine.close()
    return found


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("async_op", [False, True])
def test_a_start_that_goes_back_never_brings_an_older_value_over_a_newer_one(async_op: bool, close: bool) -> None:
    expected = [
        [4, 6, 11, [6, 4]],
        # What steps 8, 10 and 12 of the training before have launched is forgotten: their own steps may come again.
        *([4, 6, 11, [6, 4]] for _ in range(5)),
        *([5, 0, 5, [0, 6]] for _ in (5, 6)),
        *([6, 2, 7, [2, 0]] for _ in (7, 8)),
        *([7, 4, 9, [4, 2]] for _ in (9, 10)),
    ]
    assert returned(run_ranks(goes_back, 2, async_op, close)) == [expected] * 2


def goes_back_after_a_failure(rank: int) -> list[Any]:
    def source(ctx: Context) -> int:
        if ctx.step == 6:
            raise ValueError("boom")
        return ctx.step

    state = SharedState()
    state.add("x", source, every=Every(steps=2), async_op=True, lag=5)
    found: list[Any] = []
    with SyncEngine(state, timeout=PATIENCE) as engine:
        for step in range(8):
            engine.step(step)
        try:
            engine.start(1)
        except ComputeError as error:
            found.append(str(error).splitlines()[0])
        engine.start(1)
        for step in range(2, 5):
            engine.step(step)
        found.append(info(state, "x"))
    return found


def test_a_start_that_goes_back_raises_the_failures_that_nobody_has_seen() -> None:
    text = "value 'x' at step 6 on main (rank 0): ValueError: boom"
    assert returned(run_ranks(goes_back_after_a_failure, 2)) == [[text, [2, 2, 7, 2]]] * 2
