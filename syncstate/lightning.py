"""The Lightning host: a callback that tells the engine where a `Trainer` is. Needs Lightning.

Which hook does what, and why there:

    setup                 the ranks meet; in a lone evaluation values come into force too, for its loaders come next
    on_load_checkpoint    where a resumed fit goes on: its first loader's iterator is made before `on_train_start`
    on_fit_start          values come into force: after the checkpoint was loaded, before sanity validation and loaders
    on_train_start        once more, at the step and the epoch that Lightning has restored by then
    on_train_epoch_start  the epoch has turned, and the loader's iterator for it comes next
    on_train_batch_end    the optimizer may have stepped; checkpoints are saved after this
    teardown              the end
    on_exception          the other end: Lightning calls no `teardown` then
"""

from collections.abc import Callable, Mapping
from datetime import timedelta
from os import PathLike
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from syncstate.engine import SyncEngine
from syncstate.errors import ConfigError, SyncStateError
from syncstate.hosts.main_rank import check_saved_by_rank_0
from syncstate.hosts.trainer import (
    callbacks_of,
    check_keys,
    finish_exception,
    import_lightning,
    log_numbers,
    move_to_front,
    now,
    resume_point,
    trainer_of,
)
from syncstate.samplers.lengths import check_kept_length
from syncstate.schedule import Every, Schedule
from syncstate.state import SharedState

if TYPE_CHECKING:
    from typing import Self

    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
else:
    Callback = import_lightning().Callback

__all__ = ["SyncStateCallback", "shared"]

# The callbacks of each running trainer: a finder's trial run takes them off `trainer.callbacks`.
_set_up: "WeakKeyDictionary[Trainer, list[SyncStateCallback]]" = WeakKeyDictionary()


class SyncStateCallback(Callback):
    """Keeps the values of a `SharedState` equal on all ranks of a `Trainer`.

    A step is an optimizer step as `trainer.global_step` counts it, never a batch. A value that is due comes into force
    right after its step: other callbacks, validation, checkpoints and the next batch see it. For this the callback
    moves to the front of `trainer.callbacks`. Values can be read from `on_fit_start` on, so by sanity validation,
    samplers and `train_dataloader()`; in a lone `validate`, `test` or `predict` from `setup` on.

    With `ckpt_path=` a fit goes on as the unbroken one would, and an evaluation uses the values that were saved;
    without it, those that this process has, or those of step 0. The trial runs of Lightning's learning rate and batch
    size finders change nothing. With `reload_dataloaders_every_n_epochs`, `train_dataloader()` is called before the
    epoch turns and still reads the values of the one before.

    Args:
        state: The values.
        name: Of this callback in checkpoints and loggers; two callbacks of one trainer need different ones.
        log: Log each new value that is a finite number to the trainer's loggers, as `<name>/<name of the value>`.
        every, seed, group, main, scope, async_op, lag, timeout, frame_bytes, max_bytes, on_error, config, resync,
            verify_values, events: The engine's options, explained in `SyncEngine`.

    Attributes:
        state, name: As given.
        engine: The `SyncEngine` behind the callback; `engine.sync(name)` refreshes a value at once.

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
        every: Schedule = Every(steps=100),
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
        events: Callable[[Mapping[str, Any]], object] | str | PathLike[str] | None = None,
    ) -> None:
        if not isinstance(state, SharedState):
            raise ConfigError(f"SyncStateCallback: state must be a SharedState, got {state!r}")
        if not isinstance(name, str) or not name:
            raise ConfigError(f"SyncStateCallback: name must be a non-empty string, got {name!r}")
        self.engine = SyncEngine(
            state, every=every, seed=seed, group=group, main=main, scope=scope, async_op=async_op, lag=lag,
            timeout=timeout, frame_bytes=frame_bytes, max_bytes=max_bytes, on_error=on_error, config=config,
            resync=resync, verify_values=verify_values, events=events,
        )  # fmt: skip
        self.state = state
        self.name = name
        self._logs = log  # Lightning puts a method of its own at `self.log`
        self._place = group, main
        self._begun = self._loading = False
        self._resume_at: tuple[int, int] | None = None
        self._unlogged: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: Any, *, name: str = "syncstate", log: bool = True) -> "Self":
        """Make the state and the callback from the `syncstate` node of a composed Hydra config.

        Args:
            config: What `syncstate.config.build` takes.
            name: As for the class.
            log: As for the class.
        """
        from syncstate.config import build  # here, because nothing else needs Hydra

        state, options = build(config)
        return cls(state, name=name, log=log, **options)

    # From the start to the end

    def setup(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        """The ranks meet and compare their plans; a lone evaluation has its values from here on."""
        _set_up[trainer] = ours = _callbacks(trainer)
        check_keys(ours)
        move_to_front(trainer, ours)
        self.engine.close()  # still open after a finder's trial run that failed, of which no callback hears
        self.engine.host, self.engine.model = trainer, pl_module
        self._begun, self._loading, self._resume_at, self._unlogged = False, False, None, ()
        self.engine.open()
        check_saved_by_rank_0("Lightning", self.state, *self._place, trainer.world_size)
        if stage != "fit":
            seen = self.engine.seen
            self._start(now(trainer) if seen[0] < 0 else seen)

    def on_fit_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Values come into force. A resumed trainer does not know its step yet, but the checkpoint did."""
        self._start(self._resume_at or now(trainer))

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Begin where Lightning begins."""
        self._start(now(trainer))
        self._loading, self._resume_at = False, None
        names, self._unlogged = self._unlogged, ()
        self._log_values(trainer, names)

    def _start(self, point: tuple[int, int]) -> None:
        # What is new is logged later: until `on_train_start` the axis of a resumed run is not restored.
        self._unlogged += self.engine.start(*point)
        self._begun = True

    def teardown(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        """Leave in good order."""
        self.engine.close()
        self._forget(trainer)

    def on_exception(self, trainer: "Trainer", pl_module: "LightningModule", exception: BaseException) -> None:
        """Tell the other ranks.

        Raises:
            SyncStateError: Another rank had failed before, so that its cause comes first; raised from `exception`.
        """
        ours = _callbacks(trainer)
        news = [error for error in [callback._leave(trainer, exception) for callback in ours] if error is not None]
        if news:
            try:
                finish_exception(trainer, pl_module, exception, done=ours)
            finally:
                raise news[0] from exception

    def _leave(self, trainer: "Trainer", exception: BaseException) -> SyncStateError | None:
        """End the engine; returns the error of another rank that comes first."""
        try:
            self.engine.leave(exception)
        except SyncStateError as error:
            # What the engine itself has raised, every rank raises.
            return None if isinstance(exception, SyncStateError) else error
        finally:
            self._forget(trainer)
        return None

    def _forget(self, trainer: "Trainer") -> None:
        self.engine.host = self.engine.model = None
        self._begun = False
        _set_up.pop(trainer, None)

    # Steps

    def on_train_epoch_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """The epoch has turned.

        Raises:
            ConfigError: A shared list of indices has another length than the epoch that Lightning has planned.
        """
        self._log_values(trainer, self.engine.step(trainer.global_step, trainer.current_epoch))
        check_kept_length(trainer.train_dataloader, trainer.num_training_batches, trainer.limit_train_batches)

    def on_train_batch_end(
        self, trainer: "Trainer", pl_module: "LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The optimizer may have stepped; if not, the engine only listens for failures on other ranks."""
        names = self.engine.step(trainer.global_step, trainer.current_epoch)
        if names:
            self._log_values(trainer, names)

    def _log_values(self, trainer: "Trainer", names: tuple[str, ...]) -> None:
        if self._logs and trainer.is_global_zero:
            log_numbers(trainer, {f"{self.name}/{name}": self.state[name] for name in names})

    # Checkpoints

    @property
    def state_key(self) -> str:
        """The key of this callback in checkpoints: its name, not its schedule, which may change on resume."""
        return self._generate_state_key(name=self.name)

    def state_dict(self) -> dict[str, Any]:
        """The engine's state. Local, on every rank; Lightning writes that of rank 0."""
        return self.engine.state_dict()

    # Lightning refuses two callbacks with the same key, without saying what to do. It looks through wrappers and takes
    # this for its own method, which leaves the refusal to `check_keys`.
    state_dict.__wrapped__ = Callback.state_dict  # type: ignore[attr-defined]

    def on_load_checkpoint(self, trainer: "Trainer", pl_module: "LightningModule", checkpoint: dict[str, Any]) -> None:
        """Learn where a fit goes on, also from a checkpoint that lacks this callback."""
        self._loading = True
        self._resume_at = resume_point(trainer, checkpoint) if trainer.state.fn == "fit" else None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of an earlier run: from Lightning, or from the user before the trainer runs.

        Raises:
            ConfigError: The trainer runs already, or this is no state of such a callback.
        """
        again = self._begun and self._loading
        if again:
            # Values were in force already: in an evaluation, after the trial run of a finder, or with a strategy that
            # restores only a model that is set up. Every rank comes by here, so the engine can begin again.
            self.engine.close()
        self.engine.load_state_dict(state_dict)
        self._loading = False
        if again:
            self._start(self._resume_at or self.engine.seen)


def shared(owner: "LightningModule | LightningDataModule | Trainer", name: str | None = None) -> SharedState:
    """The state of a trainer's `SyncStateCallback`, for code that has only the module at hand.

    Args:
        owner: A trainer, or a module or data module that a trainer is running with.
        name: Of the callback, if the trainer has several.

    Raises:
        ConfigError: There is no trainer, no such callback, or several and no name.
    """
    ours = _callbacks(trainer_of(owner))
    found = [callback for callback in ours if name in (None, callback.name)]
    if len(found) == 1:
        return found[0].state
    there = ", ".join(repr(callback.name) for callback in ours)
    if found:
        raise ConfigError(f"shared: the trainer has several SyncStateCallbacks; give name=, one of {there}")
    wanted = "SyncStateCallback(state)" if name is None else f"SyncStateCallback(state, name={name!r})"
    hint = f" (it has {there})" if ours else ""
    raise ConfigError(f"shared: the trainer has no such callback{hint}; make it with Trainer(callbacks=[{wanted}])")


def _callbacks(trainer: "Trainer") -> list[SyncStateCallback]:
    found = [callback for callback in callbacks_of(trainer) if isinstance(callback, SyncStateCallback)]
    return found or _set_up.get(trainer, [])
