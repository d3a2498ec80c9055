"""Keeps the parameters of replicas equal: finds what has drifted apart, and repairs it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

from torch import Tensor, nn

from syncstate.errors import ConfigError, DriftError, SyncStateError
from syncstate.resync.choice import choose
from syncstate.resync.connection import Connection
from syncstate.resync.report import DriftReport
from syncstate.resync.session import Session, look, surveyor
from syncstate.schedule import Schedule, crossed, whole
from syncstate.topology import Topology, find_topology, process_group
from syncstate.transport import seconds
from syncstate.wire.channel import Channel
from syncstate.wire.meeting import Meeting
from syncstate.wire.notes import Note
from syncstate.wire.rendezvous import decline

__all__ = ["ParameterResync"]

_log = logging.getLogger("syncstate")


class ParameterResync:
    """Finds parameters and buffers that differ between replicas, and repairs them in place.

    DDP keeps replicas equal only by giving all of them the same gradients: whatever else changes a parameter on one
    rank (a bit that flipped, a kernel that is not deterministic, a step that only one rank made) stays for good.

    Each rank sends a digest of its bits, a few bytes, to the main process; equal digests mean done. Bits are compared,
    so a difference of one ulp is found, and NaN equals NaN. Frozen parameters count, and buffers, also those that are
    not saved; tied tensors once. What differs is copied into the tensors as they are: addresses, the optimizer's
    references and hooks stay.

    Every rank makes the same calls in the same order. Standing alone it connects the ranks at its first call, over a
    channel of its own; `close`, or leaving its `with` block, disconnects them. Given to an engine or a host as
    `resync=`, it runs there, over the engine's channel.

    Args:
        module: A module, or a mapping of tensors; in a host None is the host's model. Wrapped modules (DDP,
            `torch.compile`) go by the names of what they wrap. Of a `DTensor` the local shard is compared, with the
            ranks that hold the same one.
        every: When: `Every(...)`, `At(...)` or `Once()`. Seconds and overhead only inside an engine, whose main process
            measures them.
        mode: `"check"` reports. `"repair"` copies what differs from the source. `"copy"` sends everything from main,
            in buckets, without comparing first. `"average"` puts the mean over ranks into every floating-point
            tensor (accumulated in float32 at least, so that an equal one can move by its last bit) and main's into the
            others, as local SGD does.
        source: Who is right, for check and repair: `"main"`, or `"majority"`: for each tensor what most ranks hold, so
            that main can be the odd one out. Needs three ranks. Where no side is the largest, main's counts.
        include: `"parameters"`, `"buffers"` or both.
        exclude: Patterns of names, as `fnmatch` knows them, and classes of modules.
        optimizer: Its state and the plain numbers of its groups count too; one or a list. State that some ranks lack is
            added there, or taken away where the source has none; no step is made for it.
        bucket_bytes: Size of the messages in which tensors travel; two are on their way at a time.
        on_drift: What to do with a report of drift: `"warn"` logs it on main; `"raise"` raises `DriftError` on every
            rank, after a repair; a callable gets it, on every rank. An average expects drift, and ignores this.
        group: A `ProcessGroup`, a one-dimensional `DeviceMesh`, `"single"`, or None for the world.
        timeout: Seconds (or a `timedelta`) that each wait for other ranks may take. Inside an engine its own counts.

    Raises:
        ConfigError: An impossible setting.

    Example::

        with ParameterResync(model, every=Every(steps=500), mode="repair", optimizer=optimizer) as resync:
            for step, batch in enumerate(loader, 1):
                ...                              # forward, backward, optimizer.step()
                resync.step(step)                # every rank; a report when it was due
    """

    def __init__(
        self,
        module: nn.Module | Mapping[str, Tensor] | None = None,
        *,
        every: Schedule,
        mode: str = "repair",
        source: str = "main",
        include: Sequence[str] = ("parameters", "buffers"),
        exclude: Sequence[str | type[nn.Module]] = (),
        optimizer: Any = None,
        bucket_bytes: int = 25 << 20,
        on_drift: str | Callable[[DriftReport], object] = "warn",
        group: Any = None,
        timeout: float | timedelta = 300.0,
    ) -> None:
        self._choice = choose(
            module=module, every=every, mode=mode, source=source, include=include, exclude=exclude,
            optimizer=optimizer, bucket_bytes=bucket_bytes, on_drift=on_drift,
        )  # fmt: skip
        self.every = every
        self.module = module
        self._group = group
        self._timeout = seconds("resync", timeout)
        self._seen = (-1, -1)
        self._tried = self._told = False
        self._connection: Connection | None = None
        self._session: Session | None = None  # the engine's
        self._part: Callable[[str, int], AbstractContextManager[object]] | None = None
        self.host_model: Any = None
        self._on_device = False  # for tests: the path of accelerators, on the CPU

    def agreed(self) -> dict[str, Any]:
        """What must be the same on all ranks; part of an engine's plan."""
        return self._choice.plan

    def run(self, step: int) -> DriftReport:
        """Compare, and repair what the mode repairs, now. Collective.

        Args:
            step: Optimizer steps finished so far, the same on all ranks.

        Returns:
            What had drifted; the same on all ranks.

        Raises:
            DriftError: Something had, and `on_drift` is `"raise"`. It has the report as `report`.
            MismatchError: Ranks hold other tensors, or are at other steps; the same on all ranks.
            ConfigError: There is nothing to compare, or an exclusion matches nothing.
            SyncTimeout: A rank did not come in time.
            PeerError: Another rank failed, left or died.
        """
        step = whole("resync", "step", step, 0)
        if self._part is not None:
            with self._part("resync.run", step):
                return self.serve(step)
        connection = self._open()
        try:
            report = connection.session.run(self._model(), self._choice, step)
        except BaseException as error:
            if not connection.session.in_unison(error):
                connection.end(error, step)
            raise
        try:
            return self._conclude(report)
        except DriftError:  # which all ranks raise; they can go on
            raise
        except BaseException as error:
            connection.end(error, step)
            raise

    def serve(self, step: int) -> DriftReport:
        """What `run` does, for the engine that it is bound to."""
        if (session := self._session) is None:
            raise ConfigError("resync: no engine runs it")
        return self._conclude(session.run(self._model(), self._choice, step))

    def step(self, step: int, epoch: int | None = None) -> DriftReport | None:
        """Tell where training is; runs when it is due. Every rank calls it at the same steps.

        Args:
            step: Optimizer steps finished so far; not smaller than the last one.
            epoch: Epochs begun so far; None keeps the last one.

        Returns:
            The report; None where nothing was due.

        Raises:
            ConfigError: A step or an epoch smaller than the last one, or a schedule that only an engine can follow.
            SyncStateError: What `run` raises.
        """
        if self.every.unit in ("seconds", "overhead"):
            raise ConfigError(
                f"resync: {self.every} is decided by an engine's main process; give the resync to an engine or a host "
                "as resync=, or give Every(steps=...) or Every(epochs=...)"
            )
        step = whole("resync", "step", step, 0)
        now = max(self._seen[1], 0) if epoch is None else whole("resync", "epoch", epoch, 0)
        if step < self._seen[0] or now < self._seen[1]:
            raise ConfigError(
                f"resync: step({step}, {now}): has already seen step {self._seen[0]} of epoch {self._seen[1]}; steps "
                "and epochs never go back"
            )
        due = self._due(step, now)
        self._seen = (step, now)
        if due:
            return self.run(step)
        if self._connection is not None and self._connection.ended is None:
            try:
                self._connection.look(step)
            except SyncStateError as error:
                self._connection.end(error, step)
                raise
        return None

    def _due(self, step: int, epoch: int) -> bool:
        """Whether a point of the schedule lies between what was seen and now."""
        now, last = (epoch, self._seen[1]) if self.every.unit == "epochs" else (step, self._seen[0])
        return (last < 0 and self.every.unit == "once") or crossed(self.every, last, now)

    def bind(
        self,
        topology: Topology,
        channel: Channel,
        meeting: Meeting | None,
        timeout: float,
        part: Callable[[str, int], AbstractContextManager[object]],
        *,
        group: Any = None,
    ) -> None:
        """Run inside an engine from now on; for engines, which call `serve` where it is due.

        Args:
            topology, channel, meeting: The engine's. The channel stays open until `unbind`.
            timeout: Seconds that each wait may take.
            part: Makes a user's call at a step a part of the engine's run, which refuses one from inside a source.
            group: The process group over which bulk that lies on an accelerator travels; None takes it over the CPU.

        Raises:
            ConfigError: It is connected on its own, or the group is too small for a majority.
        """
        if self._connection is not None:
            raise ConfigError("resync: it has run on its own already; close it before an engine takes it over")
        self._choice.check_world(topology.world_size)
        self._part = part
        self._session = Session(topology, channel, meeting, timeout, group, on_device=self._on_device)

    def tell(self, note: Note) -> None:
        """Pass an engine's news of its end to the ranks that wait in a channel of the resync's own; before `unbind`."""
        if self._session is not None:
            self._session.tell(note)

    def unbind(self, *, abrupt: bool = False) -> None:
        """Run inside an engine no longer; the engine closes its channel afterwards.

        Args:
            abrupt: The engine ends because of a failure, with operations in flight.
        """
        session, self._session, self._part = self._session, None, None
        if session is not None:
            session.close(abrupt=abrupt, step=max(self._seen[0], 0))
        self.host_model = None

    def close(self) -> None:
        """Disconnect in good order. A later `run` by all ranks connects them again."""
        connection, self._connection = self._connection, None
        if connection is not None and connection.ended is None:
            connection.close(max(self._seen[0], 0))

    def __enter__(self) -> "ParameterResync":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # Nothing is compared or averaged here: with an exception in flight the other ranks are somewhere else.
        if error is None:
            self.close()
            return
        if not self._tried and self._session is None:
            decline(self._group, error)
        connection, self._connection = self._connection, None
        if connection is not None and connection.ended is None:
            cause = connection.end(error, max(self._seen[0], 0))
            if cause is not None and isinstance(error, Exception) and not isinstance(error, SyncStateError):
                raise cause from error

    def _open(self) -> Connection:
        if self._connection is None:
            self._tried = True
            try:
                topology = find_topology(self._group)
                self._choice.check_world(topology.world_size)
                # Before anything is connected: what is wrong on all ranks, all of them then find by themselves.
                look(self._model(), self._choice, surveyor(self._choice, topology))
            except Exception as error:
                decline(self._group, error)
                raise
            bulk = process_group(self._group, topology)
            self._connection = Connection(topology, self._choice, self._timeout, bulk, on_device=self._on_device)
        if self._connection.ended is not None:
            raise self._connection.ended
        return self._connection

    def _model(self) -> Any:
        model = self.module if self.module is not None else self.host_model
        if model is None:
            raise ConfigError("resync: no module was given, and there is no host whose model could be taken")
        return model

    def _conclude(self, report: DriftReport) -> DriftReport:
        """Do with a report of drift what the user chose."""
        if report.unreplicated and not self._told:
            self._told = True
            if self._is_main():
                _log.warning("%s", report)
        if report and self._choice.heeds(report) and self._is_main():
            _log.warning("%s", report)
        return report

    def _is_main(self) -> bool:
        session = self._session or getattr(self._connection, "session", None)
        return session is None or session.topology.is_main
