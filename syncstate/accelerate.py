"""Hugging Face Accelerate as a host: the hook that tells the engine where a training loop is. Needs accelerate."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from os import PathLike
from types import TracebackType
from typing import Any

import torch
from accelerate import Accelerator

from syncstate.engine import SyncEngine
from syncstate.errors import ConfigError, SyncStateError
from syncstate.hosts.attachment import Attachment, unwrapped
from syncstate.hosts.main_rank import check_saved_by_rank_0
from syncstate.schedule import Every, Schedule
from syncstate.state import SharedState

__all__ = ["SyncStateHook"]

_VERSION = 1


class SyncStateHook:
    """Keeps the values of a `SharedState` equal on all processes of an `Accelerator`.

    Make it on every process and before `accelerator.load_state`: it registers itself for checkpointing, so `save_state`
    and `load_state` carry the values, the states of their sources and the number of optimizer steps. Accelerate tells
    registered objects apart by their order, so keep that from run to run.

    Making the hook and entering its `with` block compute nothing. The engine starts, and the values become readable,
    with the first call of `start`, `set_epoch` or `step`, or at the first training forward after `attach`.

    Optimizer steps are counted, also those that a gradient scaler skips: by `step()` after each `optimizer.step()`, or
    hands-free by `attach(model)`, not by both. Leaving the `with` block with an exception tells the other processes,
    which raise `PeerError`; without such a block, call `close` at the end.

    Args:
        accelerator: The `Accelerator` of the training script.
        state: The values.
        every, seed, group, main, scope, async_op, lag, timeout, frame_bytes, max_bytes, on_error, config, resync,
            verify_values, events: The engine's options, explained in `SyncEngine`.

    Attributes:
        accelerator, state: As given.
        engine: The `SyncEngine` behind the hook; `engine.sync(name)` refreshes a value at once.

    Raises:
        ConfigError: An impossible setting.

    Example::

        hook = SyncStateHook(accelerator, state, every=Every(steps=100))
        if resume_from:
            accelerator.load_state(resume_from)
        with hook:
            for epoch in range(first_epoch, epochs):
                hook.set_epoch(epoch)                     # before the loader is iterated
                for batch in loader:
                    with accelerator.accumulate(model):
                        ...                               # forward, accelerator.backward(loss)
                        optimizer.step()
                        optimizer.zero_grad()
                        hook.step()
    """

    def __init__(
        self,
        accelerator: Accelerator,
        state: SharedState,
        *,
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
        if not isinstance(accelerator, Accelerator):
            raise ConfigError(f"SyncStateHook: accelerator must be an accelerate.Accelerator, got {accelerator!r}")
        self.accelerator = accelerator
        self.engine = SyncEngine(
            state, every=every, seed=seed, group=group, main=main, scope=scope, async_op=async_op, lag=lag,
            timeout=timeout, frame_bytes=frame_bytes, max_bytes=max_bytes, on_error=on_error, config=config,
            resync=resync, verify_values=verify_values, events=events,
        )  # fmt: skip
        self.engine.host = accelerator
        self.state = self.engine.state
        self._place = group, main
        self._steps = 0
        self._attachment: Attachment | None = None
        self._started = self._closed = False
        self._stepping = False  # what the fast path of `step` asks: started, and driven by `step`
        accelerator.register_for_checkpointing(self)

    @classmethod
    def from_config(cls, accelerator: Accelerator, config: Any) -> "SyncStateHook":
        """Make the state and the hook from the `syncstate` node of a composed Hydra config.

        Args:
            accelerator: As for the class.
            config: What `syncstate.config.build` takes.
        """
        from syncstate.config import build  # here, because nothing else needs Hydra

        state, options = build(config)
        return cls(accelerator, state, **options)

    # The clock

    def start(self, step: int | None = None, epoch: int | None = None) -> tuple[str, ...]:
        """Begin, or begin again, so that the values become readable. Collective; done when first needed if not called.

        Args:
            step: Optimizer steps finished so far; None: those counted so far, or those of the loaded checkpoint.
            epoch: Epochs begun so far, the first is 0; None: that of the last call, or of the loaded checkpoint.

        Returns:
            The names of the values that came into force by being computed.

        Raises:
            ConfigError: A source has a state, and it computes elsewhere than on rank 0, whose state accelerate saves.
            SyncStateError: What `SyncEngine.start` raises.
        """
        at = self._steps if step is None else step
        check_saved_by_rank_0("accelerate", self.state, *self._place, self.accelerator.num_processes)
        models = self.accelerator._models
        if self._attachment is None and len(models) == 1:
            self.engine.model = unwrapped(self.accelerator, models[0])
        names = self.engine.start(at, max(0, self.engine.seen[1]) if epoch is None else epoch)
        self._steps = at
        self._started, self._closed = True, False
        return names

    def step(self, step: int | None = None, epoch: int | None = None) -> tuple[str, ...]:
        """Tell the engine that an optimizer step is done; refreshes what is due. Every process calls it alike.

        Call it right after `optimizer.step()`, in every iteration: like the optimizer itself it counts only while
        `accelerator.sync_gradients` is true, so the calls inside an accumulation do nothing. A loop that accumulates
        without `accelerator.accumulate` calls it only where the optimizer really steps, one with several optimizers
        once for all of them. Your own count goes into `step`, and then nothing is counted here.

        If the engine has not started, the first call also does, late, what was due before this step. Values that the
        first forward needs take an `initial`, or `start()` or `set_epoch(0)` before the loop.

        Args:
            step: Optimizer steps finished so far; None: count this call.
            epoch: Epochs begun so far; None keeps the last one.

        Returns:
            The names of the values that came into force, usually none.

        Raises:
            ConfigError: A model is attached, a step that goes back, or a hook that is closed.
            SyncStateError: What `SyncEngine.step` raises.
        """
        if not self._stepping:
            return self._first_step(step, epoch)
        if step is None:
            if self.accelerator.sync_gradients:
                self._steps += 1
            return self.engine.step(self._steps, epoch)
        if isinstance(step, int) and step > self._steps:
            self._steps = step
        return self.engine.step(step, epoch)

    def set_epoch(self, epoch: int) -> tuple[str, ...]:
        """Tell the engine that an epoch begins. Collective; call it before the loader is iterated, also when attached.

        Args:
            epoch: Epochs begun so far; the first is 0.

        Returns:
            The names of the values that came into force.

        Raises:
            ConfigError: An epoch that goes back (call `start` to begin again), or a hook that is closed.
            SyncStateError: What `SyncEngine.step` raises.
        """
        self._check_open()
        if not self._started:
            return self.start(epoch=epoch)
        return self.engine.step(self._steps, epoch)

    def _first_step(self, step: int | None, epoch: int | None) -> tuple[str, ...]:
        if self._attachment is not None:
            raise ConfigError(
                "step: a model is attached, and its optimizer's steps are counted already; leave step() out, or call "
                "detach() first"
            )
        self._check_open()
        try:
            names = () if self._started else self.start(step, epoch)
        except SyncStateError:
            if step is None and self.accelerator.sync_gradients:
                self._steps += 1  # the optimizer has stepped, whatever a source does
            raise
        self._stepping = True
        return tuple(dict.fromkeys(names + self.step(step, epoch)))

    # Hands-free

    def attach(self, model: torch.nn.Module, optimizer: Any = None) -> None:
        """Follow a model and an optimizer, without any call of `step`.

        The calls of the optimizer's step are counted while `accelerator.sync_gradients` is true. What is due is
        refreshed before the model's next forward in training mode with gradients enabled: once per optimizer step,
        however many forwards there are, and never by evaluation. If no such forward comes, the next optimizer step does
        it first. A checkpoint saved between an optimizer step and the next forward holds the values of before.

        Args:
            model: The model whose forward the training loop calls, as `accelerator.prepare` returned it. A hook that it
                has already stays in place.
            optimizer: The optimizer whose steps count, prepared or not; None takes the first prepared one.

        Raises:
            ConfigError: `step` is in use, a model is attached already, or there is no optimizer.
        """
        if self._stepping:
            raise ConfigError("attach: step() is in use, and both would count each step; use one of the two")
        if self._attachment is not None:
            raise ConfigError("attach: a model is attached already; call detach() first")
        self._attachment = Attachment(self.accelerator, model, optimizer, counted=self._count, tell=self._tell)
        self.engine.model = self._attachment.model

    def detach(self) -> None:
        """Undo `attach`: model and optimizer are as they were. Does nothing if no model is attached."""
        if self._attachment is not None:
            self._attachment.remove()
            self._attachment = self.engine.model = None

    def _count(self) -> None:
        self._steps += 1

    def _tell(self) -> None:
        self._check_open()
        if self._started:
            self.engine.step(self._steps)
        else:
            self.start()

    # The end

    def close(self) -> None:
        """Leave in good order, and detach. Local; does nothing the second time."""
        self.__exit__(None, None, None)

    def _check_open(self) -> None:
        # A stray call must not start the engine again by itself, and wait for processes that make no such call.
        if self._closed:
            raise ConfigError("the hook is closed; call start() or enter its `with` block to begin again")

    def __enter__(self) -> "SyncStateHook":
        self._closed = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.detach()
        self._started, self._stepping, self._closed = False, False, True
        self.engine.__exit__(kind, error, traceback)

    # Checkpoints: accelerate calls these

    def state_dict(self) -> dict[str, Any]:
        """The engine's state and the number of optimizer steps. Local: never communicates."""
        return {"hook": _VERSION, "steps": self._steps, "engine": self.engine.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state of an earlier run; it comes into force when the hook starts. Local: never communicates.

        Args:
            state: What `state_dict` returned.

        Raises:
            ConfigError: The hook has started, or this is not the state of one.
        """
        if self._started:
            raise ConfigError(
                "load_state: the hook has started already; call accelerator.load_state before the first start, "
                "set_epoch, step or attached forward; or close() the hook, load, and start() it again"
            )
        if not isinstance(state, Mapping) or state.keys() != {"hook", "steps", "engine"} or state["hook"] != _VERSION:
            raise ConfigError(
                f"load_state: this is no state of a SyncStateHook, version {_VERSION}; accelerate knows objects by the "
                "order in which they were registered, so keep that of the run that saved"
            )
        self.engine.load_state_dict(state["engine"])
        self._steps = int(state["steps"])
