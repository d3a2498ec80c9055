"""A decision stops its host on every rank at the same step, whichever rank asked."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_run import Model, Saver, fit, make_ddp_trainer, make_trainer
from ranks import returned, run_ranks

from syncstate import Every, SharedState
from syncstate.lightning import SyncStateCallback
from syncstate.values import Decision
from syncstate.values.plateau import Plateau


class Ask(Callback):
    """Requests a stop on one rank, once."""

    def __init__(self, stop: Decision, rank: int, step: int) -> None:
        self.stop, self.rank, self.step = stop, rank, step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == self.step:
            self.stop.request()


def stopping(every: int, **options: Any) -> tuple[SharedState, Decision]:
    state, stop = SharedState(), Decision(stop_host=True)
    state.add("stop", stop, every=Every(steps=every), **options)
    return state, stop


def train_until_asked(rank: int, every: int) -> tuple[int, list[int]]:
    state, stop = stopping(every)
    trainer = make_ddp_trainer(SyncStateCallback(state), Ask(stop, 1, 2), max_epochs=5)
    model = fit(trainer)
    return trainer.global_step, [step for step, _, _ in model.read]


@pytest.mark.parametrize(("every", "last"), [(1, 3), (5, 5)])
def test_lightning_stops_on_all_ranks_at_the_same_step(every: int, last: int) -> None:
    # Four batches an epoch; asked during the batch after step 2.
    assert returned(run_ranks(train_until_asked, 2, every, init=False)) == [(last, list(range(last)))] * 2


def test_a_restored_decision_stops_no_trainer(tmp_path: Path) -> None:
    state, stop = stopping(every=2)
    trainer = make_trainer(SyncStateCallback(state), Ask(stop, 0, 1), Saver(tmp_path, every_n_train_steps=1))
    fit(trainer)
    assert (trainer.global_step, state["stop"]) == (2, True)
    state, _ = stopping(every=2)
    trainer = make_trainer(SyncStateCallback(state))
    model = fit(trainer, ckpt_path=tmp_path / "2.ckpt")
    # It is still true at the first step, as it was saved, and then asked anew.
    assert [values["stop"] for _, _, values in model.read] == [True, True, False, False, False, False]
    assert trainer.global_step == 8


class Validated(Model):
    """Logs a metric that stops falling after the third epoch."""

    def on_validation_epoch_end(self) -> None:
        self.log("metric", float(max(3 - self.trainer.current_epoch, 0)), sync_dist=True)


def train_until_plateau(rank: int) -> int:
    state = SharedState()
    stop = Decision(Plateau("metric", patience=2), reduce="main", stop_host=True)
    state.add("stop", stop, every=Every(epochs=1))
    trainer = make_ddp_trainer(SyncStateCallback(state), max_epochs=20, limit_val_batches=1, num_sanity_val_steps=0)
    fit(trainer, Validated())
    return int(trainer.current_epoch)


def test_early_stopping_by_a_logged_metric_ends_all_ranks_in_the_same_epoch() -> None:
    one, two = returned(run_ranks(train_until_plateau, 2, init=False))
    assert one == two
    # 3, 2, 1, 0, 0, 0: the second that is no better is seen as the seventh epoch begins.
    assert one == 7


def accelerate_until_asked(rank: int) -> int:
    from accelerate import Accelerator

    from syncstate.accelerate import SyncStateHook

    accelerator = Accelerator(cpu=True)
    state, stop = stopping(every=1)
    with SyncStateHook(accelerator, state) as hook:
        for step in range(1, 20):
            if rank == 1 and step == 4:
                stop.request()
            hook.step()
            if accelerator.check_trigger():
                break
    return step


def test_accelerates_trigger_is_set_on_all_ranks_at_the_same_step() -> None:
    assert returned(run_ranks(accelerate_until_asked, 2)) == [4, 4]
