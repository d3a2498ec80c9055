"""Checkpoints of the Lightning callback: a resumed run reads at each step what the unbroken one read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning_run import Draw, Model, Saver, drawing, evaluate, fit, make_trainer

from syncstate import Every, Once, SharedState
from syncstate.lightning import SyncStateCallback

EPOCHS = {"max_epochs": 3}
STEPS = {"max_epochs": -1, "max_steps": 11}


def values() -> tuple[SharedState, dict[str, Draw]]:
    state, draws = drawing(draw=Every(steps=2), order=Every(epochs=1))
    state.add("once", Draw(), every=Once())
    return state, draws


class LateStrategy(SingleDeviceStrategy):
    """Restores after `on_fit_start`, as strategies do that shard the model."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True


def resumed_from(checkpoint: Path, workers: int = 0, **options: Any) -> list[Any]:
    return fit(make_trainer(SyncStateCallback(values()[0]), **options), Model(workers=workers), checkpoint).read


@pytest.mark.parametrize(
    ("when", "options", "workers", "steps"),
    [
        # Within an epoch, after its last batch, and once more after each of its last batches has been trained on.
        ({"every_n_train_steps": 1}, EPOCHS, 0, range(1, 12)),
        ({"every_n_train_steps": 1}, STEPS, 0, range(1, 11)),
        # With a worker the loader's iterator is made, and the order drawn, before training begins.
        ({"every_n_train_steps": 1}, EPOCHS, 1, [4, 5]),
        ({"every_n_train_steps": 1}, STEPS, 1, [4]),
        # At the end of an epoch.
        ({}, EPOCHS, 0, [4, 8]),
        ({}, EPOCHS, 1, [4]),
        ({"save_on_train_epoch_end": True}, {**STEPS, "limit_val_batches": 1}, 0, [4, 8]),
        # After the validation at the end of an epoch.
        ({"save_on_train_epoch_end": False}, {**EPOCHS, "limit_val_batches": 1}, 0, [4, 8]),
        ({"save_on_train_epoch_end": False}, {**STEPS, "limit_val_batches": 1}, 1, [4]),
        # Between the steps of an accumulation nothing is saved; afterwards it is.
        ({"every_n_train_steps": 1}, {**EPOCHS, "accumulate_grad_batches": 3}, 0, range(1, 6)),
    ],
)
def test_resumed_equals_unbroken(
    when: dict[str, Any], options: dict[str, Any], workers: int, steps: list[int], tmp_path: Path
) -> None:
    saver = Saver(tmp_path, **when)
    unbroken = fit(make_trainer(SyncStateCallback(values()[0]), saver, **options), Model(workers=workers)).read
    for step in steps:
        resumed = resumed_from(tmp_path / f"{step}.ckpt", workers, **options)
        assert resumed == [reading for reading in unbroken if reading[0] >= step], f"from step {step}"


@pytest.mark.parametrize("when", [{"every_n_train_steps": 3}, {}])
def test_resumed_equals_unbroken_where_the_strategy_restores_late(when: dict[str, Any], tmp_path: Path) -> None:
    unbroken = fit(make_trainer(SyncStateCallback(values()[0]), Saver(tmp_path, **when))).read
    step = 3 if when else 4
    resumed = resumed_from(tmp_path / f"{step}.ckpt", strategy=LateStrategy(torch.device("cpu")))
    assert resumed == [reading for reading in unbroken if reading[0] >= step]


def test_a_resumed_run_computes_nothing_again(tmp_path: Path) -> None:
    fit(make_trainer(SyncStateCallback(values()[0]), Saver(tmp_path)))
    state, draws = values()
    fit(make_trainer(SyncStateCallback(state)), ckpt_path=tmp_path / "4.ckpt")
    assert {name: draw.points for name, draw in draws.items()} == {"draw": [(6, 1), (8, 1)], "order": [(4, 1)]}


def test_a_checkpoint_without_the_callback_gives_values_of_the_step_it_was_saved_at(tmp_path: Path) -> None:
    fit(make_trainer(Saver(tmp_path, every_n_train_steps=3)), Silent())
    state, draws = values()
    model = fit(make_trainer(SyncStateCallback(state)), ckpt_path=tmp_path / "3.ckpt")
    assert {name: draw.points for name, draw in draws.items()} == {
        "draw": [(3, 0), (4, 0), (6, 1), (8, 1)],
        "order": [(3, 0), (4, 1)],
    }
    assert [step for step, _, _ in model.read] == [3, 4, 5, 6, 7]


class Silent(Model):
    """Reads no values."""

    def values(self) -> dict[str, Any]:
        return {}


def test_a_schedule_may_change_on_resume(tmp_path: Path) -> None:
    fit(make_trainer(SyncStateCallback(drawing(draw=Every(steps=2))[0]), Saver(tmp_path, every_n_train_steps=3)))
    state, draws = drawing(draw=Every(steps=5))
    fit(make_trainer(SyncStateCallback(state)), ckpt_path=tmp_path / "3.ckpt")
    assert draws["draw"].points == [(5, 1)]
    assert state["draw"][2] == 3  # the source's own count: two before, one since


def test_resuming_goes_back_in_a_process_that_had_gone_further(tmp_path: Path) -> None:
    callback = SyncStateCallback(values()[0])
    unbroken = fit(make_trainer(callback, Saver(tmp_path, every_n_train_steps=3))).read
    assert fit(make_trainer(callback), ckpt_path=tmp_path / "3.ckpt").read == unbroken[3:]


@pytest.mark.parametrize("how", ["validate", "test", "predict"])
def test_an_evaluation_uses_the_values_of_its_checkpoint(how: str, tmp_path: Path) -> None:
    callback = SyncStateCallback(values()[0])
    fit(make_trainer(callback, Saver(tmp_path), max_epochs=1))
    saved = dict(callback.state)
    state, draws = values()
    trainer = make_trainer(SyncStateCallback(state), limit_val_batches=1)
    evaluated = evaluate(trainer, how, ckpt_path=tmp_path / "4.ckpt").elsewhere
    assert evaluated == dict.fromkeys(evaluated, saved)
    assert "val_dataloader" in evaluated
    # Before Lightning hands the checkpoint over, values of step 0 are in force. Nothing else is computed.
    assert {name: draw.points for name, draw in draws.items()} == {"draw": [(0, 0)], "order": [(0, 0)]}


def test_a_state_can_be_loaded_before_the_trainer_runs() -> None:
    first = SyncStateCallback(values()[0])
    fit(make_trainer(first))
    second = SyncStateCallback(values()[0])
    second.load_state_dict(first.state_dict())
    assert evaluate(make_trainer(second), "test").elsewhere["test"] == dict(first.state)
