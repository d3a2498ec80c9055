"""The ways of training in which faults are injected: a plain loop, a Lightning Trainer, an Accelerate run.

Each has the engine that it drives, and `train`, which calls `at_step` before the sync of step `fault_step` and raises
what a user's program would see.
"""

import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from syncstate import SharedState, SyncEngine

__all__ = ["HOSTS", "Driver"]


class Driver:
    """A plain loop, and the base of the others.

    Args:
        state: The values, `x` among them, whose value is its step.
        options: The engine's.
    """

    def __init__(self, state: SharedState, options: dict[str, Any]) -> None:
        self.state = state
        self.engine = self.make(options)

    def make(self, options: dict[str, Any]) -> SyncEngine:
        return SyncEngine(self.state, **options)

    def train(self, last: int, fault_step: int, at_step: Callable[[], object], pace: float) -> None:
        with self.engine as engine:
            engine.start()
            for step in range(1, last + 1):
                self.before(step, fault_step, at_step, pace)
                engine.step(step)
                self.after(step)

    def before(self, step: int, fault_step: int, at_step: Callable[[], object], pace: float) -> None:
        if step == fault_step:
            at_step()
        time.sleep(pace if step > fault_step else 0.0)

    def after(self, step: int) -> None:
        if self.state["x"] != step:
            raise AssertionError(f"wrong value {self.state['x']!r} at step {step}")


class LightningDriver(Driver):
    """A Trainer on each rank."""

    def make(self, options: dict[str, Any]) -> SyncEngine:
        from syncstate.lightning import SyncStateCallback

        self.callback = SyncStateCallback(self.state, log=False, **options)
        return self.callback.engine

    def train(self, last: int, fault_step: int, at_step: Callable[[], object], pace: float) -> None:
        from lightning.pytorch import Callback, Trainer
        from lightning.pytorch.demos.boring_classes import BoringModel

        driver = self

        class Watch(Callback):
            def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
                driver.before(trainer.global_step + 1, fault_step, at_step, pace)

            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                driver.after(trainer.global_step)

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = Trainer(
                callbacks=[self.callback, Watch()], max_steps=last, accelerator="cpu", devices=1, logger=False,
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            trainer.fit(BoringModel(), DataLoader(TensorDataset(torch.zeros(64, 32)), batch_size=1, collate_fn=_first))


def _first(batch: list[tuple[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([row for (row,) in batch])


class AccelerateDriver(Driver):
    """A loop with an Accelerator and the hook."""

    def make(self, options: dict[str, Any]) -> SyncEngine:
        from accelerate import Accelerator

        from syncstate.accelerate import SyncStateHook

        self.accelerator = Accelerator(cpu=True)
        self.hook = SyncStateHook(self.accelerator, self.state, **options)
        return self.hook.engine

    def train(self, last: int, fault_step: int, at_step: Callable[[], object], pace: float) -> None:
        model = torch.nn.Linear(4, 1)
        optimizer = self.accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        with self.hook as hook:
            hook.start()
            for step in range(1, last + 1):
                self.before(step, fault_step, at_step, pace)
                with self.accelerator.accumulate(model):
                    self.accelerator.backward(model(torch.ones(2, 4)).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                    hook.step()
                self.after(step)


HOSTS = {"plain": Driver, "lightning": LightningDriver, "accelerate": AccelerateDriver}
