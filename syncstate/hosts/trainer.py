"""What the Lightning host reads from a `Trainer` and does to it. Needs Lightning."""

import importlib
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from syncstate.errors import ConfigError

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer

__all__ = [
    "callbacks_of",
    "check_keys",
    "finish_exception",
    "import_lightning",
    "log_numbers",
    "move_to_front",
    "now",
    "resume_point",
    "trainer_of",
]


def import_lightning() -> Any:
    """The Lightning that the program uses: the one it has imported already, else the one that is installed.

    Raises:
        ImportError: Neither `lightning` nor `pytorch_lightning` is there.
    """
    packages = {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch_lightning"}
    for module, package in sorted(packages.items(), key=lambda item: item[0] not in sys.modules):
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name not in (module, package):
                raise  # it is installed, but something that it needs is not
    raise ImportError(
        "syncstate.lightning needs Lightning, and neither lightning nor pytorch_lightning is installed: "
        "pip install 'syncstate[lightning]'"
    )


# What it says


def trainer_of(owner: Any) -> "Trainer":
    """The trainer behind a module, a data module or itself.

    Raises:
        ConfigError: There is none.
    """
    # `LightningModule.trainer` raises where there is no trainer, so ask for what it reads.
    found = owner if hasattr(owner, "callbacks") else getattr(owner, "_trainer", None)
    found = found or getattr(owner, "__dict__", {}).get("trainer")
    if found is None:
        raise ConfigError(
            f"this {type(owner).__name__} has no trainer; call shared() inside trainer.fit, validate, test or predict"
        )
    trainer: Trainer = found
    return trainer


def callbacks_of(trainer: Any) -> "Sequence[Callback]":
    """The callbacks, of which Lightning's own types say nothing."""
    callbacks: Sequence[Callback] = trainer.callbacks
    return callbacks


def check_keys(callbacks: "Sequence[Callback]") -> None:
    """Refuse two callbacks that a checkpoint could not tell apart.

    Raises:
        ConfigError: Two have one key.
    """
    keys = [callback.state_key for callback in callbacks]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(
                f"the trainer has {keys.count(key)} callbacks with the key {key}, and a checkpoint holds one of them; "
                "give each a name of its own: SyncStateCallback(state, name=...)"
            )


def now(trainer: "Trainer") -> tuple[int, int]:
    """Optimizer steps finished so far, and the epoch."""
    return trainer.global_step, trainer.current_epoch


def resume_point(trainer: "Trainer", checkpoint: Mapping[str, Any]) -> tuple[int, int]:
    """The step and the epoch at which a fit goes on from a checkpoint, before Lightning has restored them.

    Does what `FitLoop.reset` and `FitLoop.on_run_start` do to the counters: an epoch counts as completed when its last
    hook has returned, and checkpoints are saved before.
    """
    step, epoch = int(checkpoint["global_step"]), int(checkpoint["epoch"])
    loops = checkpoint.get("loops", {}).get("fit_loop", {})
    epochs, batches = loops.get("epoch_progress"), loops.get("epoch_loop.batch_progress")
    if not epochs or not batches:
        return step, epoch
    if trainer.max_steps == -1:
        epoch = epochs["current"]["processed"]
    within_epoch = epochs["total"]["ready"] == epochs["total"]["started"] == epochs["total"]["processed"] + 1
    within_batch = batches["total"]["processed"] == batches["total"]["completed"] + 1
    if within_epoch and within_batch and batches["is_last_batch"]:
        epoch += 1  # saved in `on_train_batch_end` of an epoch's last batch: the next epoch comes at once
    return step, epoch


# What is done to it


def move_to_front(trainer: Any, callbacks: "Sequence[Callback]") -> None:
    """Let callbacks come first, from the next hook on: in the present one Lightning walks through the old list."""
    trainer.callbacks = [*callbacks, *(callback for callback in trainer.callbacks if callback not in callbacks)]


def log_numbers(trainer: "Trainer", values: Mapping[str, Any]) -> None:
    """Send those values that are finite numbers to all loggers, over the axis of Lightning's own monitors."""
    numbers = {key: number for key, value in values.items() if (number := _number(value)) is not None}
    if numbers:
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=trainer.fit_loop.epoch_loop._batches_that_stepped)


def _number(value: Any) -> float | None:
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    try:
        number = float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def finish_exception(
    trainer: "Trainer", pl_module: "LightningModule", exception: BaseException, done: "Collection[Callback]"
) -> None:
    """Do what Lightning does after a callback's `on_exception`, and leaves out when that raises.

    Args:
        trainer, pl_module, exception: What the callback was given.
        done: The callbacks that have been told.
    """
    for callback in callbacks_of(trainer):
        if callback not in done:
            callback.on_exception(trainer, pl_module, exception)
    datamodule = getattr(trainer, "datamodule", None)
    if datamodule is not None:
        datamodule.on_exception(exception)
    trainer.strategy.on_exception(exception)
    for logger in trainer.loggers:
        logger.finalize("failed")
    trainer._teardown()
    trainer.state.stage = None
