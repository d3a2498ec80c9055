"""The loop that keeps shared values equal on all ranks. The only place where when, who, what and how meet."""

import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from os import PathLike
from typing import Any

from syncstate.errors import ConfigError, PeerError, SyncStateError
from syncstate.loop.checkpoint import Restored, parse, snapshot
from syncstate.loop.flight import Flight
from syncstate.loop.options import Options
from syncstate.loop.run import Run
from syncstate.loop.stats import Stats
from syncstate.schedule import Every, Schedule, whole
from syncstate.state import SharedState
from syncstate.wire.channel import LOOK_SECONDS
from syncstate.wire.rendezvous import decline

__all__ = ["SyncEngine"]


class SyncEngine:
    """Computes shared values on the main process and broadcasts them at the steps that their schedules name.

    Every rank makes the same calls in the same order: `step` after each optimizer step, and once when an epoch turns.
    Entering the `with` block computes nothing, so that a checkpoint can be loaded first; `start`, or the first `step`,
    computes what is due. Leaving the block with an exception tells the other ranks.

    Args:
        state: The values; None for an engine without any.
        every: Schedule of the values that have none of their own; so with scope, async_op, lag and timeout.
        seed: What the random numbers of the sources are derived from.
        group: A `ProcessGroup`, a one-dimensional `DeviceMesh`, `"single"`, or None for the world.
        main: Global rank of the main process; None for the group's first.
        timeout: Seconds (or a `timedelta`) that a sync may take, unless a value says otherwise.
        frame_bytes: Size of a sync's message: a multiple of 64, at least 1024. A larger payload takes a second one.
        max_bytes: No payload is larger, and no receiver allocates more.
        on_error: `"raise"`, or `"keep"`: a source that fails is logged and counted, and the old value stays.
        config: A mapping that all ranks must share; the error of `start` names the first keys that differ.
        scope: `"world"`, or `"node"`: values are computed and shared on each node by itself.
        async_op: Let training go on while values travel. Those of epochs, and those computed once, are waited for.
        lag: Steps from the step at which a value is computed to the step at which it comes into force, on every rank.
            None is 0, and 1 for asynchronous values (2 for those that collect).
        resync: A `ParameterResync`, or a list of them, to run by their schedules after the values of a step.
        verify_values: Compare a digest of each value that comes into force across ranks; for debugging, it is slow.
        events: A callable that every rank calls with each event, or a path to which main appends JSON lines.

    Raises:
        ConfigError: An impossible setting.

    Example::

        with SyncEngine(state, every=Every(steps=100)) as engine:
            for epoch in range(epochs):
                engine.step(step, epoch)         # the epoch turns; the first call also starts the engine
                for batch in loader:
                    ...                          # forward, backward, optimizer.step()
                    step += 1
                    engine.step(step, epoch)
    """

    def __init__(
        self,
        state: SharedState | None = None,
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
        if not isinstance(state, SharedState | None):
            raise ConfigError(f"engine: state must be a SharedState, got {state!r}")
        self._options = Options(
            every=every, seed=seed, group=group, main=main, scope=scope,
            async_op=async_op, lag=lag, timeout=timeout, frame_bytes=frame_bytes, max_bytes=max_bytes,
            on_error=on_error, config=config, resync=resync, verify_values=verify_values, events=events,
        )  # fmt: skip
        self.state = state if state is not None else SharedState()
        self.stats = Stats(self.state)
        self.host: Any = None
        self.model: Any = None
        self._run: Run | None = None
        self._flights: list[Flight] = []
        self._restored: Restored | None = None
        self._started = self._tried = False
        # What the fast path of `step` compares with; no thread has the number 0.
        self._seen_step, self._seen_epoch, self._next_step = -1, -1, -1.0
        self._thread, self._look_at = 0, 0.0

    def open(self) -> None:
        """Meet the other ranks, compare plans and make the private groups; can be tried again. Collective."""
        self._tried = True
        if self._run is None or (not self._run.going() and self._run.ended is not None):
            self._run, self._started = Run(self.state, self._options, self._flights, self.stats), False

    def start(self, step: int = 0, epoch: int | None = 0) -> tuple[str, ...]:
        """Begin, or begin again, at a step: restore what was loaded and compute what is due. Collective.

        Args:
            step: Optimizer steps finished so far.
            epoch: Epochs begun so far; the first is 0. None keeps the last one, also that of a checkpoint.

        Returns:
            The values that came into force by being computed.

        Raises:
            SyncStateError: What `open` and `step` raise. After a `ComputeError` it can be called again.
        """
        step = whole("start", "step", step, 0)
        epoch = None if epoch is None else whole("start", "epoch", epoch, 0)
        self.open()
        run = self._opened("start")
        if not self._started:
            seen = run.prepare(self._restored) or (self._seen_step, self._seen_epoch)
            self._restored = None  # not before: a start that fails is tried again with the same checkpoint
            self._seen_step, self._seen_epoch = seen
        epoch = max(self._seen_epoch, 0) if epoch is None else epoch
        if step < self._seen_step:
            run.forget_flights(self._seen_step).conclude(self._options.on_error)
        due = run.agenda.due_at_start((self._seen_step, self._seen_epoch), step, epoch)
        self._thread = 0
        result = run.step("start", due, self._place(step, epoch))
        if result.failure is None or result.failure.kept(self._options.on_error):
            self._started = True
            for entry in due:
                entry.again = False
            self._see(run, step, epoch)
        return result.conclude(self._options.on_error)

    def step(self, step: int, epoch: int | None = None) -> tuple[str, ...]:
        """Tell the engine where training is; refreshes what is due. Every rank calls it at the same steps.

        Args:
            step: Optimizer steps finished so far; not smaller than the last one.
            epoch: Epochs begun so far; None keeps the last one.

        Returns:
            The names of the values that came into force, usually none.

        Raises:
            ComputeError: A source failed on the main process; the engine goes on.
            MismatchError: A value differs from its spec (the engine goes on), or ranks are at different steps.
            SyncTimeout: A rank did not come in time.
            PeerError: Another rank failed, left or died.
            ConfigError: A step or an epoch smaller than the last one, or a call from inside a source.
        """
        if (
            step.__class__ is int
            and self._seen_step <= step < self._next_step
            and (epoch is None or epoch == self._seen_epoch)
            and threading.get_ident() == self._thread
            and time.monotonic() < self._look_at
        ):
            self._seen_step = step
            return ()
        if self._run is None or (not self._started and self._run.ended is None):
            return self.start(step, epoch)
        step = whole("step", "step", step, 0)
        now = max(self._seen_epoch, 0) if epoch is None else whole("step", "epoch", epoch, 0)
        if self._started and (step < self._seen_step or now < self._seen_epoch):
            raise ConfigError(
                f"step({step}, {now}): the engine has already seen step {self._seen_step} of epoch {self._seen_epoch}; "
                "steps and epochs never go back, call start(step, epoch) to begin again"
            )
        run, self._thread = self._opened("step"), 0  # so that a call from inside a source takes the slow path, refused
        result = run.step("step", run.agenda.due(step, now), self._place(step, now))
        self._see(run, step, now)
        return result.conclude(self._options.on_error)

    def sync(self, *names: str) -> tuple[str, ...]:
        """Refresh values now, whatever their schedules say. Collective: every rank asks for the same ones.

        Args:
            names: Which values; none means all.

        Returns:
            The names of the values that came into force. Raises what `step` raises.
        """
        chosen, run = self.state.chosen("sync", names), self._opened("sync")
        if not self._started and run.ended is None:
            raise ConfigError("sync: the engine has not started; call start(step, epoch) first")
        seen, self._thread = (self._seen_step, self._seen_epoch), 0
        result = run.sync("sync", run.plan.named(chosen), self._place(*seen))
        self._see(run, *seen)
        return result.conclude(self._options.on_error)

    def _opened(self, call: str) -> Run:
        if self._run is not None:
            return self._run
        raise ConfigError(f"{call}: the engine has not started; call start(step, epoch) first")

    def _place(self, step: int, epoch: int) -> dict[str, Any]:
        return {"step": step, "epoch": epoch, "model": self.model, "host": self.host}

    def _see(self, run: Run, step: int, epoch: int) -> None:
        run.agenda.see(step, epoch)
        self._seen_step, self._seen_epoch = step, epoch
        self._next_step = min(run.agenda.next_step, run.next_step(step))
        self._thread, self._look_at = run.thread, time.monotonic() + LOOK_SECONDS

    def inspect(self) -> str:
        """A table of who holds what, equal ranks together. Collective; for debugging."""
        return self._opened("inspect").inspect(self._seen_step)

    def drain(self) -> None:
        """Wait until everything that is in flight has arrived; nothing comes into force early. Every rank calls it."""
        if self._run is not None and self._run.ended is None:
            self._run.drain(self._seen_step)

    def abort(self, reason: str) -> None:
        """End the engine on all ranks: the others raise `PeerError` with the reason at their next call."""
        run, step = self._leaving("abort")
        if run is not None:
            run.end(PeerError(f"rank {run.topology.rank} ended the engine at step {step}: {reason}"), step)

    def leave(self, error: BaseException) -> None:
        """End the engine because of an error outside of it, such as one that leaves the training loop.

        Raises:
            SyncStateError: Another rank had failed before, so that its cause comes first; raised from `error`.
        """
        if not self._tried:
            decline(self._options.group, error)
        run, step = self._leaving()
        if run is not None:
            cause = run.end(error, step)
            # What the engine itself raised, it has raised on all ranks.
            if cause is not None and isinstance(error, Exception) and not isinstance(error, SyncStateError):
                raise cause from error

    def close(self) -> None:
        """Leave in good order: what is in flight arrives, and comes into force if the engine is started again.

        Does nothing the second time, or after the engine has ended.

        Raises:
            ComputeError, MismatchError: Main could not compute a value that was in flight.
        """
        run, step = self._leaving("close")
        if run is not None:
            run.close(step).conclude(self._options.on_error)

    def _leaving(self, call: str | None = None) -> tuple[Run | None, int]:
        """The run, if it has not ended; a call from inside a source or another thread is refused."""
        run = self._run if self._run is not None and self._run.going() else None
        if run is not None and call is not None:
            run.admit(call)
        self._started, self._thread = False, 0
        return run, self._seen_step

    def __enter__(self) -> "SyncEngine":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close() if error is None else self.leave(error)

    def __getstate__(self) -> dict[str, Any]:
        if self._run is not None and self._run.ended is None:
            raise ConfigError("an engine cannot be pickled while it runs; close it first")
        return self.__dict__ | {"_run": None, "_flights": []}

    @property
    def seen(self) -> tuple[int, int]:
        """The last step and epoch, also those of a checkpoint that was loaded; (-1, -1) before any."""
        return self._restored.seen if self._restored is not None else (self._seen_step, self._seen_epoch)

    def state_dict(self) -> dict[str, Any]:
        """The values in force and those in flight, what was seen, and the sources' own states. Never communicates.

        Waits until what this rank has posted has arrived; main also computes with what the ranks have collected.
        """
        if self._restored is not None:
            return dict(self._restored.content)
        if self._run is not None and self._run.ended is None and self._flights:
            self._run.bring_home(self._seen_step)
        main = self._run is None or self._run.topology.is_main
        return snapshot(self.state, self.seen, self._flights, scope=self._options.scope, is_main=main)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` returned in an earlier run; it comes into force in `start`. Never communicates.

        Raises:
            ConfigError: The engine has synced already, or this is no state of an engine.
        """
        if self._started and self._run is not None and self._run.synced:
            raise ConfigError("load_state_dict: the engine has started; load before the first sync")
        self._restored, self._started = parse(state), False  # the next call starts from it
