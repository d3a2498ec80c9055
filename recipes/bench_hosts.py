"""A step with nothing due in a host's hook: called as the host calls it, on a real Trainer and a real Accelerator."""

import logging
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from bench_lab import Lab

from syncstate import SharedState

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["accelerate_hook", "lightning_callback"]


def lightning_callback(lab: Lab, state: SharedState, target: Mapping[int, float]) -> None:
    """`on_train_batch_end` of the callback, in the middle of a fit; and of Lightning's Timer, if peers are measured.

    Args:
        lab: Takes the readings.
        state: The callback's values.
        target: World size -> microseconds.
    """
    try:
        from lightning.pytorch import Callback, Trainer
        from lightning.pytorch.callbacks import Timer
        from lightning.pytorch.demos.boring_classes import BoringModel
    except ModuleNotFoundError as error:
        if lab.is_main:
            print(f"  Lightning is left out: {error}", flush=True)
        return
    from syncstate.lightning import SyncStateCallback

    callback, timer = SyncStateCallback(state), Timer(duration={"hours": 1}, interval="step")

    class Stopwatch(Callback):
        def on_train_batch_end(self, trainer: "Trainer", pl_module: "LightningModule", *_: Any) -> None:
            for name, hook, limit in (
                ("syncstate, Lightning callback", callback.on_train_batch_end, target),
                ("Lightning's Timer", timer.on_train_batch_end, None),
            ):
                if limit is None and not lab.settings.peers:
                    continue

                def block(calls: int, hook: Any = hook) -> None:
                    for index in range(calls):
                        hook(trainer, pl_module, None, None, index)

                lab.microseconds(name, block, target=limit, together=limit is None)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Trainer(
            accelerator="cpu",
            strategy="ddp",
            devices=lab.ranks,
            max_steps=1,
            callbacks=[callback, timer, Stopwatch()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            limit_val_batches=0,
        ).fit(BoringModel())


def accelerate_hook(lab: Lab, state: SharedState, target: Mapping[int, float]) -> None:
    """`hook.step()` after an optimizer step.

    Args:
        lab: Takes the readings.
        state: The hook's values.
        target: World size -> microseconds.
    """
    try:
        from accelerate import Accelerator
    except ModuleNotFoundError as error:
        if lab.is_main:
            print(f"  Accelerate is left out: {error}", flush=True)
        return
    from syncstate.accelerate import SyncStateHook

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1))
    with SyncStateHook(accelerator, state) as hook:
        hook.start()

        def block(calls: int) -> None:
            for _ in range(calls):
                hook.step()

        lab.microseconds("syncstate, Accelerate hook", block, target=target)
