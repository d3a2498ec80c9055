"""The Lightning host: a callback that calls the engine at the right moments of a `Trainer`. Needs Lightning.

Which hook does what, and why there:

    setup                 the ranks meet; for a lone evaluation the values come into force too, because its loaders are
                          made before any later hook
    on_load_checkpoint    from where a resumed fit goes on: the first loader's iterator is made before `on_train_start`
    on_fit_start          values come into force: after the checkpoint was loaded, before sanity validation and loaders
    on_train_start        again, at the step and the epoch that Lightning has restored by then
    on_train_epoch_start  the epoch turns, before the loader's iterator of this epoch is made
    on_train_batch_end    the step, when the optimizer has run; before checkpoints are saved
    teardown              the end
    on_exception          the other end: Lightning calls no `teardown` then
"""

import functools
import importlib
import logging
import math
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from syncstate.engine import SyncEngine
from syncstate.errors import ConfigError, SyncStateError
from syncstate.schedule import Schedule
from syncstate.state import SharedState
from syncstate.topology import find_topology

if TYPE_CHECKING:
    from typing import Self

    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer


def _import_lightning() -> Any:
    """The Lightning that the program uses: the one it has imported already, else the one that is installed."""
    for name in sorted(("lightning.pytorch", "pytorch_lightning"), key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in ("lightning", "lightning.pytorch", "pytorch_lightning"):
                raise  # installed, but something that it needs is not
    raise ImportError(
        "syncstate.lightning needs Lightning, and neither lightning nor pytorch_lightning is installed: "
        "pip install 'syncstate[lightning]'"
    )


if not TYPE_CHECKING:
    Callback = _import_lightning().Callback

__all__ = ["SyncStateCallback", "shared"]

_log = logging.getLogger("syncstate")
# Whose callbacks were set up for which trainer, while it runs.
_set_up: "WeakKeyDictionary[Trainer, list[SyncStateCallback]]" = WeakKeyDictionary()


class SyncStateCallback(Callback):
    """Keeps the values of a state equal on all ranks while a `Trainer` runs.

    Values are in force from `on_fit_start` on, so sanity validation, `train_dataloader()` and samplers can read them; in
    `validate`, `test` and `predict` from `setup` on. A value that is due at a step comes into force right after that
    optimizer step: other callbacks, validation, checkpoints and the next batch see it. For this the callback moves to the
    front of `trainer.callbacks`. A loader that is made anew for an epoch (`reload_dataloaders_every_n_epochs`) is made
    before the epoch turns: `train_dataloader()` still reads the values of the epoch before.

    A step is an optimizer step as `trainer.global_step` counts it, never a batch. The trial runs of the learning rate and
    batch size finders are no steps: values stay as they are. What checkpoints hold is restored by
    `trainer.fit(..., ckpt_path=...)`. Evaluation restores no callbacks: it uses the values that this process has, or
    those of step 0.

    Args:
        state: The values.
        name: Names this callback in checkpoints and loggers; two callbacks of one trainer need different names.
        log: Log each new value that is a finite number as `<name>/<value's name>` to the trainer's loggers.
        every: As for `SyncEngine`, like all that follow.
        seed: As for `SyncEngine`.
        group: As for `SyncEngine`.
        main: As for `SyncEngine`; sources with a state of their own need global rank 0, which writes the checkpoints.
        scope: As for `SyncEngine`.
        async_op: As for `SyncEngine`.
        lag: As for `SyncEngine`.
        timeout: As for `SyncEngine`.
        frame_bytes: As for `SyncEngine`.
        max_bytes: As for `SyncEngine`.
        on_error: As for `SyncEngine`.
        config: As for `SyncEngine`.
        resync: As for `SyncEngine`.
        verify_values: As for `SyncEngine`.
        events: As for `SyncEngine`.

    Attributes:
        state: The values.
        engine: The engine, whose host is the trainer and whose model is the `LightningModule`.
        name: As given.

    Raises:
        ConfigError: An impossible setting.

    Example::

        trainer = Trainer(callbacks=[SyncStateCallback(state, every=Every(steps=100))])

        class Model(LightningModule):
            def training_step(self, batch, batch_idx):
                threshold = shared(self)["threshold"]
    """

    def __init__(
        self,
        state: SharedState,
        *,
        name: str = "syncstate",
        log: bool = True,
        every: Schedule | None = None,
        seed: int = 0,
        group: Any = None,
        main: int | None = None,
        scope: str = "world",
        async_op: bool = False,
        lag: int | None = None,
        timeout: float | timedelta = 300.0,
        frame_bytes: int = 16384,
        max_bytes: int = 1 << 33,
        on_error: str = "raise",
        config: Mapping[str, Any] | None = None,
        resync: Any = None,
        verify_values: bool = False,
        events: Callable[[Mapping[str, Any]], object] | str | None = None,
    ) -> None:
        if not isinstance(state, SharedState):
            raise ConfigError(f"SyncStateCallback: state must be a SharedState, got {state!r}")
        if not isinstance(name, str) or not name:
            raise ConfigError(f"SyncStateCallback: name must be a non-empty string, got {name!r}")
        self.state = state
        self.name = name
        self.engine = SyncEngine(
            state,
            every=every,
            seed=seed,
            group=group,
            main=main,
            scope=scope,
            async_op=async_op,
            lag=lag,
            timeout=timeout,
            frame_bytes=frame_bytes,
            max_bytes=max_bytes,
            on_error=on_error,
            config=config,
            resync=resync,
            verify_values=verify_values,
            events=events,
        )
        self._group, self._main = group, main
        self._logs = log  # Lightning puts a method of its own at `self.log`
        self._unlogged: tuple[str, ...] = ()
        self._resume_at: tuple[int, int] | None = None
        self._begun = self._unrestored = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, name: str = "syncstate", log: bool = True) -> "Self":
        """Build the callback from a Hydra config.

        Args:
            config: The composed `syncstate` node, as for `syncstate.config.build`.
            name: As for the class.
            log: As for the class.

        Raises:
            ConfigError: What `syncstate.config.build` raises.
        """
        from syncstate.config import build  # needs hydra-core, which the callback itself does not

        state, options = build(config)
        return cls(state, name=name, log=log, **options)

    # From the start to the end

    def setup(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        """The ranks meet and compare their plans; a lone evaluation has its values from here on."""
        _check_names(trainer)
        self.engine.close()  # still open if a finder's trial run failed, which hides its callbacks from the trainer
        # Takes effect from the next hook on: Lightning is walking through the old list.
        trainer.callbacks = sorted(trainer.callbacks, key=lambda callback: not isinstance(callback, SyncStateCallback))
        _set_up[trainer] = _callbacks(trainer)
        self._unlogged, self._resume_at, self._begun = (), None, False
        self.engine.host, self.engine.model = trainer, pl_module
        self.engine.open()
        self._check_main(trainer)
        if stage != "fit":
            seen = self.engine.seen
            self._unrestored = seen[0] < 0
            self.engine.start(*(_now(trainer) if self._unrestored else seen))
            self._begun = True

    def on_fit_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Values come into force; a resumed trainer does not yet know its step here, the checkpoint did."""
        self._unlogged = self.engine.start(*(self._resume_at or _now(trainer)))
        self._begun = True

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Begin at the step that Lightning has restored."""
        names = self._unlogged + self.engine.start(*_now(trainer))
        self._unlogged, self._resume_at = (), None
        self._log_values(trainer, names)

    def on_train_epoch_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """The epoch turns."""
        self._step(trainer)

    def on_train_batch_end(
        self, trainer: "Trainer", pl_module: "LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """An optimizer step may be done. If it is not, the engine only looks for news of a failure."""
        self._step(trainer)

    def teardown(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        """Leave in good order."""
        self.engine.close()
        self._forget(trainer)

    def on_exception(self, trainer: "Trainer", pl_module: "LightningModule", exception: BaseException) -> None:
        """Tell the other ranks.

        Raises:
            PeerError: Another rank had failed before, so that its cause comes first; raised from `exception`.
        """
        news = [callback._leave(trainer, exception) for callback in _callbacks(trainer)]
        for error in news:
            if error is not None:
                try:
                    _finish(trainer, pl_module, exception)
                finally:
                    raise error from exception

    def _leave(self, trainer: "Trainer", exception: BaseException) -> SyncStateError | None:
        """End the engine; returns what to raise instead of the exception."""
        try:
            self.engine.leave(exception)
        except SyncStateError as error:
            # What the engine has raised is the same on every rank, and says it all.
            return None if isinstance(exception, SyncStateError) else error
        finally:
            self._forget(trainer)
        return None

    def _forget(self, trainer: "Trainer") -> None:
        self.engine.host = self.engine.model = None
        self._begun = False
        _set_up.pop(trainer, None)

    def _check_main(self, trainer: "Trainer") -> None:
        """What only the main process knows must be there where Lightning writes a checkpoint."""
        topology = find_topology(self._group, self._main)
        main = topology.global_ranks[topology.main]
        if main == 0 and topology.world_size == trainer.world_size:
            return
        for name in self.state.names:
            definition = self.state.definition(name)
            if definition.checkpoint and definition.stateful:
                raise ConfigError(
                    f"value {name!r}: its source has a state of its own, which lives on the main process (global rank "
                    f"{main}, in a group of {topology.world_size} of {trainer.world_size} ranks), but Lightning writes the "
                    "checkpoints of all ranks on rank 0; leave out main= and group=, or add the value with "
                    "checkpoint=False"
                )

    # Steps

    def _step(self, trainer: "Trainer") -> None:
        names = self.engine.step(trainer.global_step, trainer.current_epoch)
        if names:
            self._log_values(trainer, names)

    def _log_values(self, trainer: "Trainer", names: tuple[str, ...]) -> None:
        """Log new values on rank 0, over the axis of Lightning's own monitors."""
        if not self._logs or not names or not trainer.loggers or not trainer.is_global_zero:
            return
        numbers = {f"{self.name}/{name}": _number(self.state[name]) for name in names}
        metrics = {key: number for key, number in numbers.items() if number is not None}
        if metrics:
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    # Checkpoints

    @property
    def state_key(self) -> str:
        """The key of this callback in checkpoints: the name, so that a schedule can change on resume."""
        return self._generate_state_key(name=self.name)

    # Lightning looks through `wraps` and takes this for its own method. So it does not refuse two callbacks of one name
    # while the trainer is made; `_check_names` does, and says what to do.
    @functools.wraps(Callback.state_dict)
    def state_dict(self) -> dict[str, Any]:
        """The engine's state. Local, on every rank; Lightning writes that of rank 0."""
        return self.engine.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of an earlier run: from Lightning, or from the user before the trainer runs.

        Raises:
            ConfigError: The trainer runs already, or this is no state of a callback.
        """
        if not self._begun or self._resume_at is None:
            self.engine.load_state_dict(state_dict)
            return
        # Lightning restores after `on_fit_start`: a finder what there was before its trial, or a strategy that loads only
        # into a model that is set up. Every rank comes by here, so the engine begins again.
        self.engine.close()
        self.engine.load_state_dict(state_dict)
        self._unlogged += self.engine.start(*self._resume_at)

    def on_load_checkpoint(self, trainer: "Trainer", pl_module: "LightningModule", checkpoint: dict[str, Any]) -> None:
        """Learn where the fit goes on, also from a checkpoint without this callback."""
        self._resume_at = _resume_point(trainer, checkpoint)

    def on_validation_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Say if a lone evaluation does not use what its checkpoint holds."""
        if self._unrestored and trainer.ckpt_path and trainer.is_global_zero:
            _log.warning(
                "%s: Lightning restores callbacks only in fit, so this evaluation uses the values of step 0. To use those of "
                "the checkpoint, call callback.load_state_dict(checkpoint['callbacks'][callback.state_key]) before",
                self.name,
            )
        self._unrestored = False

    on_test_start = on_predict_start = on_validation_start


def shared(module_or_trainer: "LightningModule | LightningDataModule | Trainer", name: str | None = None) -> SharedState:
    """The state that a trainer's `SyncStateCallback` keeps, for code that has only the module at hand.

    Args:
        module_or_trainer: A trainer, or a module or data module that one of its methods has been given.
        name: Which callback, if the trainer has several.

    Raises:
        ConfigError: The module has no trainer, the trainer no such callback, or several and no name is given.

    Example::

        def training_step(self, batch, batch_idx):
            threshold = shared(self)["threshold"]
    """
    trainer: Any = module_or_trainer
    if not hasattr(trainer, "callbacks"):
        # LightningModule.trainer raises where there is none, and `_trainer` is what it reads.
        trainer = getattr(module_or_trainer, "_trainer", None) or getattr(module_or_trainer, "trainer", None)
    if trainer is None:
        raise ConfigError(
            f"shared: this {type(module_or_trainer).__name__} has no trainer; call shared() inside trainer.fit, validate, "
            "test or predict"
        )
    found = [callback for callback in _callbacks(trainer) if name is None or callback.name == name]
    if len(found) == 1:
        return found[0].state
    wanted = "SyncStateCallback" if name is None else f"SyncStateCallback named {name!r}"
    if found:
        raise ConfigError(f"shared: the trainer has {len(found)} callbacks; give name=, one of {_names(found)}")
    raise ConfigError(
        f"shared: the trainer has no {wanted}; add Trainer(callbacks=[SyncStateCallback(state)])"
        + (f"; there are {_names(_callbacks(trainer))}" if name is not None and _callbacks(trainer) else "")
    )


def _callbacks(trainer: "Trainer") -> list[SyncStateCallback]:
    """The trainer's callbacks of this kind, also during the trial run of a finder, which hides them."""
    found = [callback for callback in trainer.callbacks if isinstance(callback, SyncStateCallback)]
    return found or _set_up.get(trainer, [])


def _names(callbacks: list[SyncStateCallback]) -> str:
    return ", ".join(repr(callback.name) for callback in callbacks)


def _check_names(trainer: "Trainer") -> None:
    names = [callback.name for callback in _callbacks(trainer)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"the trainer has {names.count(twice[0])} SyncStateCallbacks named {twice[0]!r}, and a checkpoint holds only one "
            "of them; give each a name of its own: SyncStateCallback(state, name=...)"
        )


def _now(trainer: "Trainer") -> tuple[int, int]:
    return trainer.global_step, trainer.current_epoch


def _resume_point(trainer: "Trainer", checkpoint: Mapping[str, Any]) -> tuple[int, int]:
    """The step and the epoch at which a fit goes on, before Lightning has restored them.

    The same arithmetic as in Lightning's `FitLoop.reset` and `on_run_start`: an epoch counts as `completed` only when its
    last hook has returned, and checkpoints are saved before.
    """
    loops = checkpoint.get("loops", {}).get("fit_loop", {})
    epochs = loops.get("epoch_progress", {})
    batches = loops.get("epoch_loop.batch_progress", {})
    epoch = int(checkpoint["epoch"])
    if not epochs or not batches:
        return int(checkpoint["global_step"]), epoch
    if trainer.max_steps == -1:
        epoch = epochs["current"]["processed"]
    within_epoch = epochs["total"]["ready"] == epochs["total"]["started"] == epochs["total"]["processed"] + 1
    within_batch = batches["total"]["processed"] == batches["total"]["completed"] + 1
    if within_epoch and within_batch and batches["is_last_batch"]:
        epoch += 1  # saved in `on_train_batch_end` of the epoch's last batch: the next epoch comes at once
    return int(checkpoint["global_step"]), epoch


def _finish(trainer: "Trainer", pl_module: "LightningModule", exception: BaseException) -> None:
    """What Lightning does after `on_exception`, which it leaves out when a callback raises there."""
    for callback in trainer.callbacks:
        if not isinstance(callback, SyncStateCallback):
            callback.on_exception(trainer, pl_module, exception)
    if trainer.datamodule is not None:
        trainer.datamodule.on_exception(exception)
    trainer.strategy.on_exception(exception)
    for logger in trainer.loggers:
        logger.finalize("failed")
    trainer._teardown()
    trainer.state.stage = None


def _number(value: Any) -> float | None:
    """The value as a logger takes it, if it is a finite number."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
