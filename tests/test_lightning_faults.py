"""Faults under Lightning on two ranks: every rank raises, with the cause, and nobody waits for a timeout."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from lightning_run import Model, drawing, fit, make_ddp_trainer
from ranks import run_ranks

from syncstate import Context, Every, SharedState
from syncstate.lightning import SyncStateCallback


def first_lines(outcomes: Any) -> list[tuple[str, str]]:
    """Class and first line of the error that each rank raised."""
    return [(outcome.error, outcome.message.partition("\n")[0]) for outcome in outcomes]


# ---------------------------------------------------------------- a source


def failing_source(rank: int, then: str) -> Any:
    state = SharedState()

    def source(ctx: Context) -> int:
        if ctx.step == 2 and not healed:
            raise ValueError("boom")
        return ctx.step

    healed: list[bool] = []
    state.add("x", source, every=Every(steps=2))
    callback = SyncStateCallback(state)
    if then == "raise":
        fit(make_ddp_trainer(callback))
    try:
        fit(make_ddp_trainer(callback))
    except Exception as error:
        told = type(error).__name__
    healed.append(True)
    return told, [values["x"] for _, _, values in fit(make_ddp_trainer(callback, max_epochs=1)).read]


def test_an_error_in_a_source_leaves_fit_on_both_ranks() -> None:
    outcomes = run_ranks(failing_source, 2, "raise", init=False)
    assert first_lines(outcomes) == [("ComputeError", "value 'x' at step 2 on main (rank 0): ValueError: boom")] * 2
    assert all('raise ValueError("boom")' in outcome.message for outcome in outcomes)


def test_the_next_fit_works_after_an_error_in_a_source() -> None:
    outcomes = run_ranks(failing_source, 2, "go on", init=False)
    assert [outcome.value for outcome in outcomes] == [("ComputeError", [0, 0, 2, 2])] * 2


# ---------------------------------------------------------------- the user's own code


class Ending(DummyLogger):
    """Writes down how Lightning closes it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def finalize(self, status: str) -> None:
        with self.file.open("a") as text:
            text.write(f"logger {status}\n")


class Last(Callback):
    """Stands behind the callback of syncstate and writes down that it is told of an error."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        with self.file.open("a") as text:
            text.write(f"callback {type(exception).__name__}\n")


def failing_model(rank: int, kind: type[BaseException], file: str) -> None:
    state, _ = drawing()

    def act(model: Model) -> None:
        if rank == 1 and model.trainer.global_step == 3:
            raise kind("mine")

    mine = Path(f"{file}.{rank}")
    try:
        fit(make_ddp_trainer(SyncStateCallback(state), Last(mine), logger=Ending(mine)), Model(act=act))
    except BaseException:
        if rank == 1:
            os._exit(1)  # as a script would, while the other rank waits for its gradients
        raise


def test_an_error_of_the_user_on_one_rank_is_named_on_the_other(tmp_path: Path) -> None:
    outcomes = run_ranks(failing_model, 2, KeyError, str(tmp_path / "told"), init=False)
    assert first_lines(outcomes[:1]) == [("PeerError", "rank 1 failed at step 3: KeyError: 'mine'")]
    assert "Connection closed by peer" in outcomes[0].traceback  # what DDP raised, as its cause
    # What Lightning does after an error is done all the same.
    assert (tmp_path / "told.0").read_text() == "callback RuntimeError\nlogger failed\n"
    assert (tmp_path / "told.1").read_text() == "callback KeyError\nlogger failed\n"


def test_ctrl_c_on_one_rank_ends_the_other(tmp_path: Path) -> None:
    outcomes = run_ranks(failing_model, 2, KeyboardInterrupt, str(tmp_path / "told"), init=False)
    assert first_lines(outcomes[:1]) == [("PeerError", "rank 1 failed at step 3: KeyboardInterrupt: mine")]


# ---------------------------------------------------------------- before training


def differing(rank: int) -> None:
    fit(make_ddp_trainer(SyncStateCallback(drawing(draw=Every(steps=2 + rank))[0])))


def test_ranks_with_other_schedules_do_not_begin() -> None:
    outcomes = run_ranks(differing, 2, init=False)
    assert [outcome.error for outcome in outcomes] == ["MismatchError"] * 2
    difference = "  values.draw.every: 'every 2 steps' on rank 0; 'every 3 steps' on rank 1"
    assert [outcome.message.splitlines()[1:] for outcome in outcomes] == [[difference]] * 2


def main_without_checkpoints(rank: int, options: dict[str, Any]) -> None:
    fit(make_ddp_trainer(SyncStateCallback(drawing()[0], **options)))


def test_a_source_whose_state_no_checkpoint_would_hold_is_refused_on_both_ranks() -> None:
    for options, where in (({"main": 1}, "rank 1"), ({"group": "single"}, "every process")):
        outcomes = run_ranks(main_without_checkpoints, 2, options, init=False)
        assert [outcome.error for outcome in outcomes] == ["ConfigError"] * 2
        for outcome in outcomes:
            assert f"the source of value 'draw' has a state, which is where it computes, on {where}" in outcome.message
            assert "checkpoint=False" in outcome.message
