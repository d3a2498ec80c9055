"""Syncs of different values in turn: what one leaves behind for the next is never taken for something else."""

from typing import Any

import pytest
import torch
from ranks import returned, run_ranks

from syncstate import Every, SharedState, SyncEngine
from syncstate.errors import ConfigError


def in_turn(rank: int) -> list[Any]:
    """Tensors of equal bytes and other dtypes, alone, and beside one that does not fit into the frame."""
    state = SharedState()
    state.add("counts", lambda ctx: torch.tensor([ctx.step, 7]), every=Every(steps=2))
    weights = Every(steps=4, start=3)
    state.add("weights", lambda ctx: torch.tensor([0.5, 0.25], dtype=torch.float64), every=weights)
    state.add("table", lambda ctx: torch.full((20_000,), float(ctx.step)), every=weights)
    seen = []
    with SyncEngine(state) as engine:
        for step in range(9):
            engine.step(step)
            seen.append((state["counts"].dtype == torch.int64, state["counts"].tolist()))
    return seen


def test_a_sync_with_a_body_does_not_change_what_the_next_small_one_becomes() -> None:
    expected = [(True, [step - step % 2, 7]) for step in range(9)]
    assert returned(run_ranks(in_turn, 2)) == [expected] * 2


def above_and_below(rank: int) -> list[Any]:
    sizes = [100, 100, 9000, 9000, 100, 9000, 100, 100]
    state = SharedState({"x": lambda ctx: torch.full((sizes[ctx.step],), float(ctx.step))})
    seen = []
    with SyncEngine(state, every=Every(steps=1)) as engine:
        for step in range(len(sizes)):
            engine.step(step)
            seen.append((state["x"].numel(), float(state["x"].sum())))
    return seen


def test_a_tensor_whose_size_goes_above_and_below_the_frame_arrives_each_time() -> None:
    main, peer = returned(run_ranks(above_and_below, 2))
    assert main == peer == [(size, float(size * step)) for step, (size, _) in enumerate(main)]


def grown_on_main(rank: int) -> int:
    """A list that main alone changes in place, which nobody should, before the first asynchronous sync of it."""
    state = SharedState()
    state.add("x", lambda ctx: list(range(10)), every=Every(steps=1), async_op=True, lag=2)
    with SyncEngine(state, timeout=20.0) as engine:
        engine.start()
        if rank == 0:
            state["x"].extend(range(20_000))
        for step in range(1, 6):
            engine.step(step)
    return len(state["x"])


def test_a_value_that_was_changed_on_main_alone_changes_no_size_of_a_message() -> None:
    assert returned(run_ranks(grown_on_main, 2)) == [10, 10]


def resumed_by_the_clock(rank: int) -> Any:
    """A scattered value on a schedule that main announces; each rank loads what it has saved itself."""

    def make() -> SharedState:
        state = SharedState()
        state.add("x", lambda ctx: [ctx.step, -ctx.step], every=Every(seconds=0.001), deliver="scatter")
        return state

    with SyncEngine(make(), timeout=20.0) as engine:
        for step in range(5):
            engine.step(step)
        saved = engine.state_dict()
    state = make()
    with SyncEngine(state, timeout=20.0) as engine:
        engine.load_state_dict(saved)
        arrived = [engine.step(step) for step in range(5, 12)]
    return arrived, abs(state["x"])


def test_a_scattered_value_on_an_announced_schedule_is_resumed_at_the_same_steps() -> None:
    main, peer = returned(run_ranks(resumed_by_the_clock, 2))
    assert main == peer
    assert ("x",) in main[0]


def test_what_a_process_cannot_do_is_said_before_anything_is_sent() -> None:
    state = SharedState()
    state.add("x", lambda ctx: 1, scope="node", checkpoint=True)
    with pytest.raises(ConfigError, match="checkpoint=True with scope='node'"):
        SyncEngine(state).start()
    if not torch.cuda.is_available():
        state = SharedState()
        state.add("x", lambda ctx: 1, device="cuda")
        with pytest.raises(ConfigError, match="device='cuda' is not there in this process"):
            SyncEngine(state).start()
