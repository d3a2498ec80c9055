"""One engine between its start and its end: the ranks have met, agree on the plan, and have a channel."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from syncstate.errors import CodecError, ConfigError, MismatchError, PeerError, SyncStateError, SyncTimeout
from syncstate.events import open_sink
from syncstate.loop.checkpoint import Restored, parse, restore
from syncstate.loop.compare import table, verify
from syncstate.loop.difference import differences
from syncstate.loop.exchange import Exchange
from syncstate.loop.options import Options
from syncstate.loop.plan import Entry, Plan
from syncstate.loop.refresh import Refresh
from syncstate.loop.sources import Failure, describe
from syncstate.loop.stats import Stats
from syncstate.state import SharedState
from syncstate.topology import find_topology
from syncstate.wire.channel import Channel, Wait
from syncstate.wire.meeting import store_lost
from syncstate.wire.notes import Note
from syncstate.wire.rendezvous import decline, meet

__all__ = ["LOOK_SECONDS", "Run", "decline_start"]

LOOK_SECONDS = 1.0  # how often a rank that does not wait looks for news of a failure
_log = logging.getLogger("syncstate")


def decline_start(options: Options, error: BaseException) -> None:
    """Tell ranks that wait for this one to start that it does not come."""
    with suppress(ConfigError):  # without a group nobody waits
        decline(find_topology(options.group), f"{type(error).__name__}: {error}")


class Run:
    """What exists only while an engine is open. Making one is collective.

    Args:
        state: The values; nobody else can use them until the run has ended.
        options: The engine's.

    Raises:
        MismatchError: The ranks have different plans; names the first keys that differ.
        SyncTimeout: A rank did not come.
        ConfigError: The group or the main process is impossible, or another engine has the state.

    Attributes:
        topology, plan: As their classes say.
        thread: The thread that made the run, the only one that may call the engine.
        synced: Whether any value was refreshed.
        busy: Whether a collective part is running.
        ended: Why the run is over; None while it is not.
    """

    def __init__(self, state: SharedState, options: Options) -> None:
        try:
            self.topology = find_topology(options.group, options.main)
        except ConfigError as error:
            decline_start(options, error)
            raise
        self.thread = threading.get_ident()
        self.busy = self.synced = False
        self._look_at = 0.0
        self.ended: Exception | None = None
        self._state = state
        self._timeout = options.seconds
        self._verifies = options.verify_values
        main = self.topology.global_ranks[self.topology.main]
        try:
            self._sink = open_sink(options.events, self.topology.is_main)
            self.plan = Plan(state, options, {"main": main, "allow_pickle": state.allow_pickle})
            state._claim(True)
        except Exception as error:
            decline_start(options, error)
            raise
        try:
            self._connect(options)
        except BaseException:
            state._claim(False)
            raise
        self.event("open", world_size=self.topology.world_size)

    def _connect(self, options: Options) -> None:
        """Meet the other ranks, compare plans, make the private group."""
        plan, topology = self.plan, self.topology
        self._meeting = meet(topology, self._timeout) if topology.world_size > 1 else None
        if self._meeting is not None:
            groups = self._meeting.compare("start", plan.digest.hex(), plan.text)
            if len(groups) > 1:
                self._meeting.depart()
                raise MismatchError("start: the plans of the ranks differ:\n  " + differences(groups))
        self._channel = Channel(topology, self._meeting)
        try:
            self._channel.connect(self._timeout)
            self._exchange = Exchange(
                self._channel,
                plan.digest[:8],
                options.seed,
                options.frame_bytes,
                options.max_bytes,
                self._state.allow_pickle,
            )
            self._refresh = Refresh(self._state, options.seed, topology, self._channel, self._exchange)
            self._exchange.warm_up(self._wait("start"))
        except BaseException as error:
            self._tell(error, 0)
            self._channel.teardown(abrupt=True)
            raise

    def prepare(self, loaded: Restored | None) -> tuple[int, int] | None:
        """Put a loaded checkpoint into force, and forget what is computed at every start. Collective.

        Args:
            loaded: What this rank loaded.

        Returns:
            The step and epoch that the checkpoint has seen; None without one.
        """
        with _Part(self, "start", 0):
            return self._prepare(self._share(loaded))

    def _prepare(self, restored: Restored | None) -> tuple[int, int] | None:
        for entry in self.plan.entries:
            entry.again = entry.schedule.unit == "once" and not entry.definition.checkpoint
        if restored is None:
            return None
        found = restore(restored, self.plan.entries, self._state, is_main=self.topology.is_main)
        if found:
            step, epoch = restored.seen
            self._refresh.take(found, {"step": step, "epoch": epoch})
        return restored.seen

    def _share(self, loaded: Restored | None) -> Restored | None:
        """Agree on a checkpoint: where ranks loaded none or another, all take that of the lowest that loaded any."""
        if self._meeting is None:
            return loaded
        groups = self._meeting.compare("start: comparing checkpoints", loaded.record if loaded else "none")
        if len(groups) == 1:
            return loaded
        holders = {record: ranks for record, (ranks, _) in groups.items() if record != "none"}
        record, ranks = min(holders.items(), key=lambda item: item[1])
        content: Any = loaded.content if loaded and loaded.record == record else None
        content = self._exchange.hand_round(content, ranks[0], self._wait("start: sharing a checkpoint"))
        told = "; ".join(f"{'none' if r == 'none' else r[:8]} on ranks {who}" for r, (who, _) in groups.items())
        _log.warning("start: the ranks loaded different checkpoints (%s); all take that of rank %d", told, ranks[0])
        return parse(content)

    def sync(
        self, call: str, due: Sequence[Entry], place: Mapping[str, Any], stats: Stats
    ) -> tuple[str, ...] | Failure:
        """Refresh what is due, in one sync; once a second, hear of failures on other ranks.

        Args:
            call: The engine's method, for messages.
            due: Which values.
            place: `step`, `epoch`, `model` and `host` of the contexts.
            stats: Where a sync is counted.

        Returns:
            The names of the values that came into force, or why main sent none.

        Raises:
            SyncStateError: A failure that ends the engine.
            ConfigError: A call from another thread, or from inside a source.
        """
        with _Part(self, call, place["step"]):
            now = time.monotonic()
            if now >= self._look_at:
                self._look_at = now + LOOK_SECONDS
                note = self._channel.news(place["step"])
                if note is not None:
                    raise note.error()
            if not due:
                return ()
            self.synced = True
            result = self._refresh.sync(due, place, stats)
            if self._verifies and self._meeting is not None and not isinstance(result, Failure):
                verify(self._state, due, self._meeting, place["step"])
        if self._sink is not None:
            names = [entry.name for entry in due]
            what = "failed" if isinstance(result, Failure) else "sync"
            self.event(what, step=place["step"], epoch=place["epoch"], names=names)
        return result

    def inspect(self, step: int) -> str:
        """A table of who holds what. Collective."""
        with _Part(self, "inspect", step):
            return table(self._state, self._meeting, step)

    def end(self, error: BaseException, step: int) -> SyncStateError | None:
        """Tell the other ranks, unless they know, and drop the group.

        Returns:
            What another rank has told before, or that the store is gone and with it perhaps a rank; else None.
        """
        note = self._tell(error, step)
        told = describe(error)
        self.ended = error if isinstance(error, Exception) else PeerError(f"the engine ended at step {step}: {told}")
        self._state._claim(False)
        self._channel.teardown(abrupt=True)
        self.event("ended", step=step, error=told)
        if self._channel.lost is not None:
            return store_lost(f"step {step}", self.topology.rank, self._channel.lost)
        return None if note.rank == self.topology.rank else note.error()

    def close(self, step: int) -> None:
        """Leave in good order: hear that all ranks could apply what they received, sign off, and drop the group."""
        with _Part(self, "close", step):
            note = self._channel.news(step)
            if note is not None:
                raise note.error()
            self._refresh.settle(step)
        self._channel.sign_off(step)
        self.ended = ConfigError("the engine is closed; call start(step, epoch) to begin again")
        self._state._claim(False)
        self._channel.teardown(abrupt=False)
        self.event("close", step=step)

    def admit(self, call: str) -> None:
        """Refuse a call of the engine that would deadlock, and any after the end.

        Args:
            call: The engine's method, for messages.
        """
        if threading.get_ident() != self.thread:
            raise ConfigError(f"{call}: only the thread that started the engine may call it")
        if self.ended is not None:
            raise self.ended
        if self.busy:
            raise ConfigError(f"{call}: called from inside a source or apply; a sync is running already")

    def event(self, what: str, **fields: Any) -> None:
        """Tell the user's sink what happened, if there is one. One that fails is dropped: no rank may stop for it."""
        if self._sink is not None:
            try:
                self._sink({"event": what, "rank": self.topology.rank, **fields})
            except Exception:
                self._sink = None
                _log.exception("the sink for events failed on rank %d and gets no more of them", self.topology.rank)

    def _tell(self, error: BaseException, step: int) -> Note:
        if isinstance(error, SyncStateError) and not isinstance(error, ConfigError):
            kinds = {CodecError: "codec", MismatchError: "mismatch", SyncTimeout: "timeout"}
            return self._channel.tell(kinds.get(type(error), "peer"), step, str(error))
        text = f"rank {self.topology.rank} failed at step {max(step, 0)}: {describe(error)}"
        return self._channel.tell("peer", step, text)

    def _wait(self, what: str) -> Wait:
        return Wait(what, 0, self._timeout, time.monotonic())


class _Part:
    """A part of a run in which all ranks take part; whatever leaves it ends the run on all of them."""

    __slots__ = ("_call", "_run", "_step")

    def __init__(self, run: Run, call: str, step: int) -> None:
        self._run, self._call, self._step = run, call, step

    def __enter__(self) -> None:
        self._run.admit(self._call)
        self._run.busy = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        self._run.busy = False
        if error is not None:
            self._run.end(error, self._step)
