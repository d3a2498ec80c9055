"""One engine between its start and its end: the ranks have met, agree on the plan, and have a channel."""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from syncstate.errors import ConfigError, PeerError, SyncStateError
from syncstate.events import open_sink
from syncstate.loop.agenda import Agenda
from syncstate.loop.checkpoint import Restored
from syncstate.loop.chore import Chore, bind_all
from syncstate.loop.compare import table, verify
from syncstate.loop.entry import Entry
from syncstate.loop.flight import Flight
from syncstate.loop.flights import Flights
from syncstate.loop.opening import open_sides, tell
from syncstate.loop.options import Options
from syncstate.loop.plan import Plan
from syncstate.loop.refresh import Refresh, Result
from syncstate.loop.resume import resume
from syncstate.loop.stats import Stats
from syncstate.state import SharedState
from syncstate.topology import find_topology
from syncstate.wire.meeting import store_lost
from syncstate.wire.notes import describe_error
from syncstate.wire.rendezvous import decline

__all__ = ["Run"]

_log = logging.getLogger("syncstate")


class Run:
    """What exists only while an engine is open. Making one is collective.

    Args:
        state: The values; nobody else can use them until the run has ended.
        options: The engine's.
        flights: What is on its way since an earlier run of the engine.
        stats: Where syncs are counted.

    Raises:
        MismatchError: The ranks have different plans; names the first keys that differ.
        SyncTimeout: A rank did not come.
        ConfigError: The group or the main process is impossible, or another engine has the state.

    Attributes:
        topology, plan, agenda: As their classes say.
        thread: The thread that made the run, the only one that may call the engine.
        synced: Whether any value was refreshed.
        busy: Whether a collective part is running.
        ended: Why the run is over; None while it is not.
    """

    def __init__(self, state: SharedState, options: Options, flights: list[Flight], stats: Stats) -> None:
        try:
            self.topology = find_topology(options.group, options.main)
        except ConfigError as error:
            decline(options.group, error)
            raise
        self.thread, self.pid = threading.get_ident(), os.getpid()
        self.busy = self.synced = False
        self.ended: Exception | None = None
        self._state = state
        self._verifies = options.verify_values
        main = self.topology.global_ranks[self.topology.main]
        try:
            self._sink = open_sink(options.events, self.topology.is_main)
            self.plan = Plan(state, options, {"main": main, "allow_pickle": state.allow_pickle})
            state._claim(self)
        except Exception as error:
            decline(options.group, error)
            raise
        try:
            self._opened = open_sides(state, self.plan, self.topology, options)
            part = partial(_part_of, weakref.ref(self))  # a resync must not keep alive a run that nobody closed
            chores = bind_all(options.resync, self._opened, options.group, part)
        except BaseException:
            state._release(self)
            raise
        self.agenda = Agenda([*self.plan.entries, *chores])
        self._channel = self._opened.channels[0]
        self._resyncs = options.resync
        on_their_way = Flights(state, self.plan.entries, self._opened.sides, flights, stats)
        self._refresh = Refresh(self.plan.entries, self._opened.sides, on_their_way, stats)
        self.event("open", world_size=self.topology.world_size)

    def prepare(self, loaded: Restored | None) -> tuple[int, int] | None:
        """Put a loaded checkpoint into force, and forget what is computed at every start. Collective.

        Args:
            loaded: What this rank loaded.

        Returns:
            The step and epoch that the checkpoint has seen; None without one.
        """
        with _Part(self, "start", 0):
            self._refresh.flights.drain()  # what an earlier try of the same start has sent
            return resume(self._opened, self.plan.entries, self._state, self._refresh, loaded)

    def step(self, call: str, due: Sequence[Entry | Chore], place: Mapping[str, Any]) -> Result:
        """Bring into force what has arrived, and refresh what is due; once a second, hear of failures on other ranks.

        Args:
            call: The engine's method, for messages.
            due: Which values and resyncs.
            place: `step`, `epoch`, `model` and `host` of the contexts.

        Returns:
            The values that came into force, and why others did not.

        Raises:
            SyncStateError: A failure that ends the engine.
            ConfigError: A call from another thread, or from inside a source.
        """
        with _Part(self, call, place["step"]):
            self._channel.glance(place["step"])
            chores: list[Chore] = []
            if self._resyncs:
                chores = [one for one in due if isinstance(one, Chore)]
                due = [one for one in due if isinstance(one, Entry)]
            values = cast(Sequence[Entry], due)
            result = self._refresh.step(values, place)
            self._check(result, bool(values), place["step"])
            reports = [chore.run(place, self._opened) for chore in chores]
        if self._sink is not None:
            self._report(result, values, place)
            for report in reports:
                drifted = [drift.name for drift in report.drifted]
                self.event("resync", step=place["step"], drifted=drifted, bytes_sent=report.bytes_sent)
        return result

    def sync(self, call: str, due: Sequence[Entry], place: Mapping[str, Any]) -> Result:
        """Refresh values at once, whatever their schedule and their lag say."""
        with _Part(self, call, place["step"]):
            self._channel.glance(place["step"])
            self._refresh.flights.drain()
            result = self._refresh.sync(due, place, prompt=True) if due else Result(())
            self._check(result, True, place["step"])
        if self._sink is not None:
            self._report(result, due, place)
        return result

    def _check(self, result: Result, synced: bool, step: int) -> None:
        self.synced |= synced
        if self._verifies and self._opened.meeting is not None and result.names:
            verify(self._state, self.plan.named(result.names), self._opened.meeting, step)

    def _report(self, result: Result, due: Sequence[Entry], place: Mapping[str, Any]) -> None:
        """Tell the user's sink."""
        step, epoch = place["step"], place["epoch"]
        if result.failure is not None:
            names = list(dict.fromkeys(result.failure.names)) or [entry.name for entry in due]
            self.event("failed", step=step, epoch=epoch, names=names)
        launched = [entry.name for entry in due if entry.name not in result.names] if result.failure is None else []
        if launched:
            self.event("launch", step=step, epoch=epoch, names=launched)
        if result.names:
            self.event("sync", step=step, epoch=epoch, names=list(result.names))

    def next_step(self, seen: int) -> float:
        """The step before which nothing that is on its way needs a call."""
        return self._refresh.flights.next_step(seen)

    def drain(self, step: int) -> None:
        with _Part(self, "drain", step):
            self._refresh.flights.drain()

    def forget_flights(self, step: int) -> Result:
        """Training begins again at an earlier step: what is on its way would come into force at a step to come.

        Returns:
            A failure that was on its way and that nobody has seen, if there is one.
        """
        with _Part(self, "start", step):
            self._refresh.flights.drain()
            failure = self._refresh.flights.failures()
            self._refresh.flights.restore([])
        return Result((), failure)

    def bring_home(self, step: int) -> None:
        with _Part(self, "state_dict", step):
            self._refresh.flights.bring_home()

    def inspect(self, step: int) -> str:
        """A table of who holds what. Collective."""
        with _Part(self, "inspect", step):
            return table(self._state, self._opened.meeting, step)

    def end(self, error: BaseException, step: int) -> SyncStateError | None:
        """Tell the other ranks, unless they know, and drop the groups.

        Returns:
            What another rank has told before, or that the store is gone and with it perhaps a rank; else None.
        """
        note = tell(self._opened, error, step)
        for resync in self._resyncs:
            resync.tell(note)
        told = describe_error(error)
        self.ended = error if isinstance(error, Exception) else PeerError(f"the engine ended at step {step}: {told}")
        self._refresh.flights.abandon()
        self.dismantle(abrupt=True)
        self.event("ended", step=step, error=told)
        if self._channel.lost is not None:
            return store_lost(f"step {step}, after {told[:200]}", self.topology.rank, self._channel.lost)
        return None if note.rank == self.topology.rank else note.error()

    def close(self, step: int) -> Result:
        """Leave in good order: everything on its way arrives, all ranks could apply what they received, sign off.

        Returns:
            A failure that was on its way and that nobody has seen, if there is one.
        """
        with _Part(self, "close", step):
            self._channel.listen(step)
            self._refresh.flights.drain()
            self._refresh.settle(step)
        for channel in self._opened.channels:
            channel.sign_off(step)
        self.ended = ConfigError("the engine is closed; call start(step, epoch) to begin again")
        self.dismantle(abrupt=False)
        self.event("close", step=step)
        return Result((), self._refresh.flights.failures())

    def dismantle(self, *, abrupt: bool = True) -> None:
        """Give back what the run has taken; what an interrupt has left undone, the next call does."""
        self._state._release(self)
        for resync in self._resyncs:
            resync.unbind(abrupt=abrupt)
        self._resyncs = ()
        self._opened.close(abrupt=abrupt)

    def going(self) -> bool:
        """Whether the run has not ended, in the process that made it; a forked child has no part in it."""
        if os.getpid() != self.pid:
            return False
        if self.ended is not None:
            self.dismantle()
        return self.ended is None

    def admit(self, call: str) -> None:
        """Refuse a call of the engine that would deadlock, and any after the end.

        Args:
            call: The engine's method, for messages.
        """
        if os.getpid() != self.pid:
            raise ConfigError(
                f"{call}: this process was forked from the one that started the engine, and has no part in it"
            )
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


def _part_of(run: Callable[[], Run | None], call: str, step: int) -> _Part:
    """A call of a resync's user as a part of the run that the resync is bound to."""
    found = run()
    if found is None:
        raise ConfigError(f"{call}: the engine that the resync was given to is gone, and was not closed")
    return _Part(found, call, step)
