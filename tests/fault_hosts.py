"""The ways of training in which faults are injected: a plain loop, a Lightning Trainer, an Accelerate run.

Each has the engine that it drives, and `train`, which calls `at_step` before the sync of step `fault_step` and raises
what a user's program would see.
"""

import importlib
import logging
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from syncstate import SharedState, SyncEngine
from syncstate.errors import DriftError, PeerError, SyncTimeout

__all__ = ["HOSTS", "Driver", "preload"]


class Driver:
    """A plain loop, and the base of the others.

    Args:
        state: The values, `x` among them, whose value is its step.
        options: The engine's.
        lag: Steps from the computation of `x` to the step from which it is in force.
    """

    def __init__(self, state: SharedState, options: dict[str, Any], lag: int = 0) -> None:
        self.state = state
        self.lag = lag
        self.reached = 0  # the last step whose sync was tried
        self.engine = self.make(options)

    def make(self, options: dict[str, Any]) -> SyncEngine:
        return SyncEngine(self.state, **options)

    def train(self, last: int, fault_step: int, at_step: Callable[[], object], pace: float) -> None:
        with self.engine as engine:
            engine.start()
            for step in range(1, last + 1):
                self.before(step, fault_step, at_step, pace)
                try:
                    engine.step(step)
                except (PeerError, SyncTimeout, DriftError) as error:
                    self.has_ended(step, error)
                    raise
                self.after(step)

    def has_ended(self, step: int, error: Exception) -> None:
        try:
            self.engine.step(step + 1)
        except Exception as again:
            if again is error:
                return
            raise AssertionError(f"step {step + 1} raises {again!r} after {error!r}") from again
        raise AssertionError(f"the engine goes on after {error!r}")

    def before(self, step: int, fault_step: int, at_step: Callable[[], object], pace: float) -> None:
        self.reached = step
        if step == fault_step:
            at_step()
        time.sleep(pace if step > fault_step else 0.0)

    def after(self, step: int) -> None:
        if self.state["x"] != max(step - self.lag, 0):  # the first value, of step 0, is in force at once
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
_MODULES = {
    "lightning": ["lightning.pytorch", "syncstate.lightning"],
    "accelerate": ["accelerate", "syncstate.accelerate"],
}


def preload(hosts: Iterable[str]) -> None:
    """Load what these hosts need here, so that ranks that are forked later have it; each would take seconds for it."""
    for host in hosts:
        for module in _MODULES.get(host, ()):
            importlib.import_module(module)
