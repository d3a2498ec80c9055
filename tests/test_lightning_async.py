"""Asynchronous values in Lightning: the same training as with values that are held back, resumed or not."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_run import Model, Saver, drawing, fit, make_ddp_trainer
from ranks import returned, run_ranks

from syncstate import Every, SharedState
from syncstate.errors import ComputeError
from syncstate.lightning import SyncStateCallback


def deciding(async_op: bool) -> SharedState:
    """One value of each kind: drawn, collected, of epochs; in force two steps after it was computed."""
    state, _ = drawing(draw=Every(steps=2), order=Every(epochs=1))
    state.add(
        "sum", lambda ctx: ctx.collected + (ctx.previous or 0), every=Every(steps=3), collect=lambda ctx: ctx.step + 1,
        reduce="sum",
    )  # fmt: skip
    state.add("large", lambda ctx: torch.full((5000,), float(ctx.step)), every=Every(steps=1))
    return state


def scaled(model: Model) -> None:
    """Training that depends on the value in force: a rank with another one would end elsewhere."""
    with torch.no_grad():
        model.weight.weight += 1e-3 * model.values()["large"][0]


def numbers(read: list[tuple[int, int, dict[str, Any]]]) -> list[Any]:
    return [
        (step, epoch, {name: value.tolist()[:2] if name == "large" else value for name, value in values.items()})
        for step, epoch, values in read
    ]


def train(rank: int, async_op: bool, delays: int | None, folder: str | None, resume: str | None = None) -> Any:
    torch.manual_seed(0)
    pauses = random.Random(f"{delays}/{rank}")

    def act(model: Model) -> None:
        scaled(model)
        if delays is not None and pauses.random() < 0.5:
            time.sleep(pauses.random() * 0.01)

    callback = SyncStateCallback(deciding(async_op), async_op=async_op, lag=2)
    saver = [Saver(Path(folder), every_n_train_steps=3)] if folder else []
    model = Model(batches=5, act=act)
    fit(make_ddp_trainer(callback, *saver, max_epochs=2), model, ckpt_path=Path(resume) if resume else None)
    left = callback.engine.state_dict()["flights"]
    return (
        numbers(model.read),
        [parameter.tolist() for parameter in model.parameters()],
        [(flight["step"], flight["apply_at"]) for flight in left],
    )


def test_asynchronous_training_is_that_with_values_held_back_bit_for_bit(tmp_path: Path) -> None:
    blocking = returned(run_ranks(train, 2, False, None, str(tmp_path / "a"), init=False))
    assert blocking[0] == blocking[1]
    # What is in flight when the fit ends stays in flight.
    assert blocking[0][2] == [(9, {"large": 11, "sum": 11}), (10, {"draw": 12, "large": 12})]
    for delays in range(3):
        assert returned(run_ranks(train, 2, True, delays, None, init=False))[0][:2] == blocking[0][:2]


def without_order(entry: Any) -> Any:
    step, epoch, values = entry
    return step, epoch, {name: value for name, value in values.items() if name != "drawn with"}


@pytest.mark.parametrize("async_op", [False, True])
def test_a_fit_resumed_with_values_in_flight_goes_on_as_the_unbroken_one(tmp_path: Path, async_op: bool) -> None:
    unbroken = returned(run_ranks(train, 2, async_op, None, str(tmp_path), init=False))
    # Saved in mid-epoch, and in the last batch of an epoch; values of steps 2 and 3 are on their way in the first.
    for step in (3, 6):
        resumed = returned(run_ranks(train, 2, async_op, None, None, str(tmp_path / f"{step}.ckpt"), init=False))
        rest = [entry for entry in unbroken[0][0] if entry[0] >= step]
        assert [without_order(entry) for entry in resumed[0][0]] == [without_order(entry) for entry in rest]
        assert resumed[0][1] == resumed[1][1] == unbroken[0][1]


def fail_in_flight(rank: int, last: int) -> Any:
    """The source fails at step 3; it is in force at step 5, or the fit ends before."""
    state = SharedState()
    state.add("x", lambda ctx: 1 // (3 - ctx.step) if ctx.step == 3 else ctx.step, every=Every(steps=1))
    callback = SyncStateCallback(state, async_op=True, lag=2, timeout=20.0)
    model = Model(batches=last)
    try:
        fit(make_ddp_trainer(callback, max_epochs=1), model)
    except ComputeError as error:
        return "step 3" in str(error), "ZeroDivisionError" in str(error), model.read[-1][0]
    return None


@pytest.mark.parametrize("last", [4, 8])
def test_a_failure_in_flight_is_raised_at_its_step_or_at_the_end_of_the_fit(last: int) -> None:
    at = min(4, last - 1)
    assert returned(run_ranks(fail_in_flight, 2, last, init=False)) == [(True, True, at)] * 2


def leave_the_loop(rank: int, how: str) -> Any:
    """All ranks leave with large values in flight."""
    state = SharedState()
    state.add("x", lambda ctx: torch.zeros(2_000_000), every=Every(steps=1))

    def act(model: Model) -> None:
        if model.trainer.global_step == 3:
            if how == "raises":
                raise ValueError("out of data")
            model.trainer.should_stop = True

    model = Model(batches=8, act=act)
    callback = SyncStateCallback(state, async_op=True, lag=3, timeout=30.0)
    try:
        fit(make_ddp_trainer(callback, max_epochs=1), model)
    except Exception as error:
        return "out of data" in str(error)
    return model.read[-1][0]


@pytest.mark.parametrize("how", ["raises", "stops"])
def test_leaving_a_fit_with_values_in_flight_ends_all_ranks(how: str) -> None:
    seen = returned(run_ranks(leave_the_loop, 2, how, init=False, timeout=25.0))
    assert seen == ([True, True] if how == "raises" else [3, 3])
