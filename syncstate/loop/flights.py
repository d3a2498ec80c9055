"""What is on its way: launched, waited for, and brought into force at the step that was declared."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from syncstate.loop.batch import Batch
from syncstate.loop.entry import Entry
from syncstate.loop.exchange import MOST_IN_FLIGHT, concluded
from syncstate.loop.flight import Flight, Sync
from syncstate.loop.passage import Passage
from syncstate.loop.payload import Contents
from syncstate.loop.side import Side
from syncstate.loop.sources import Failure
from syncstate.loop.stats import Stats
from syncstate.state import SharedState

__all__ = ["Flights"]


class Flights:
    """The flights of a run, oldest first.

    Args:
        state: The values.
        entries: Those of the plan.
        sides: Scope -> the group that shares its values.
        flights: What is on its way since an earlier run of the same engine; goes on in this one.
        stats: Where syncs are counted.
    """

    def __init__(
        self,
        state: SharedState,
        entries: Iterable[Entry],
        sides: Mapping[str, Side],
        flights: list[Flight],
        stats: Stats,
    ) -> None:
        self._state = state
        self._entries = {entry.name: entry for entry in entries}
        self._sides = sides
        self._stats = stats
        self._flights = flights
        self._flying: list[Flight] = []  # those on the wire
        self.recount()

    def __bool__(self) -> bool:
        return bool(self._flights)

    def recount(self) -> None:
        """What was computed and is not in force yet, and which next points are not known, from what is on its way."""
        for name in self._state.names:
            self._state.record(name).ahead.clear()
        for flight in self._flights:
            for name in list(flight.pending):
                entry = self._entries.get(name)
                if entry is None:
                    flight.drop([name])
                elif flight.values is not None:
                    if self._sides[entry.scope].topology.is_main:
                        entry.record.ahead.append(flight.values[name])
                    if entry.rhythm is not None and name in flight.intervals:
                        entry.rhythm.wait()
        # What never arrived is of a run whose end was interrupted, and whose groups are gone.
        self._flights[:] = [flight for flight in self._flights if flight.pending and flight.arrived]

    def next_step(self, seen: int) -> float:
        """The step before which nothing that is on its way needs a call."""
        # What is behind a frame can be posted when the frame has come, and what was collected leaves in the next step.
        if self._flying and any(flight.passage is None or not flight.passage.posted for flight in self._flying):
            return seen + 1
        return min(flight.apply_at for flight in self._flights) if self._flights else math.inf

    def hold_back(self, fields: dict[str, Any], values: Mapping[str, Any]) -> None:
        """Values that are here, and come into force when their lag is over.

        Args:
            fields: What their contexts have in common.
            values: By name.
        """
        entries = [self._entries[name] for name in values]
        flight = Flight(fields, {entry.name: fields["step"] + entry.lag for entry in entries})
        flight.values = dict(values)
        self._flights.append(flight)
        if fields["is_main"]:
            for entry in entries:
                entry.record.ahead.append(values[entry.name])

    # Launches

    def collect(self, side: Side, entries: Sequence[Entry], fields: dict[str, Any]) -> None:
        """Post what this rank collects; main computes with it in the first call of a later step."""
        flight, sync = self._flight(side, entries, fields)
        flight.collection = side.exchange.collect(side.exchange.asynchronous, *sync, fields)

    def launch(self, side: Side, entries: Sequence[Entry], fields: dict[str, Any]) -> None:
        """Compute on main and post it; post its receipt elsewhere."""
        self._depart(side, self._flight(side, entries, fields)[0])

    def _flight(self, side: Side, entries: Sequence[Entry], fields: dict[str, Any]) -> tuple[Flight, Sync]:
        while len(self._flying) >= MOST_IN_FLIGHT:
            self._await(self._flying[0])
        batch = side.batch(entries)
        flight = Flight(fields, {entry.name: fields["step"] + entry.lag for entry in entries})
        flight.sync = sync = Sync(batch, side.exchange.asynchronous.stamp(batch, fields))
        for rhythm in batch.rhythms:
            rhythm.wait()
        self._flights.append(flight)
        self._flying.append(flight)
        return flight, sync

    def _depart(self, side: Side, flight: Flight) -> Passage:
        begun, (batch, stamp) = time.monotonic(), flight.on_the_wire
        collected = flight.collection.finish() if flight.collection is not None else None
        line = side.exchange.asynchronous
        passage = flight.passage = side.exchange.depart(line, batch, stamp, flight.fields, collected)
        result = passage.result
        if isinstance(result, Contents) and flight.fields["is_main"]:
            self._note(flight, batch, result)
            for record, value in zip(batch.records, result.values, strict=True):
                record.ahead.append(value)
        for rhythm in batch.rhythms:
            rhythm.spend(time.monotonic() - begun)
        return passage

    # Arrivals

    def arrive(self, place: Mapping[str, Any]) -> tuple[tuple[str, ...], Failure | None]:
        """Let what was collected go on its way, and bring into force what is due now.

        Args:
            place: `step`, `model` and `host` of this call.

        Returns:
            The names that came into force, and why others did not.
        """
        step: int = place["step"]
        self._depart_collected(before=step)
        self._advance()
        names: tuple[str, ...] = ()
        failure: Failure | None = None
        for flight in list(self._flights):
            mine = flight.due(step)
            if not mine:
                continue
            self._await(flight)
            if flight.sync is not None:  # here and not when it came, which is another call on each rank
                batch, flight.sync = flight.sync.batch, None
                batch.largest = max(batch.largest, flight.room)
            if flight.failure is not None:
                failure = flight.failure.joined(failure)
                self._announce(flight, flight.pending)
                flight.pending.clear()
            else:
                self._bring(flight, mine, place, step)
                names += tuple(mine)
        self._flights[:] = [flight for flight in self._flights if flight.pending]
        return names, failure

    def _depart_collected(self, before: float = float("inf")) -> None:
        """Let what was collected before a step go on its way; every rank does it in the same call."""
        for flight in self._flying:
            if flight.passage is None and flight.step < before:
                self._depart(self._side(flight), flight)

    def _advance(self) -> None:
        """Post what is behind frames that have come, in the order of the frames."""
        for flight in self._flying:
            if flight.passage is None:
                return
            flight.passage.advance()
            if not flight.passage.posted:
                return

    def _await(self, flight: Flight) -> None:
        """Wait until a flight has arrived, and all before it: bodies are posted in the order of their frames."""
        while flight in self._flying:
            self._land(self._flying[0])

    def _land(self, flight: Flight) -> None:
        begun, (batch, _) = time.monotonic(), flight.on_the_wire
        passage = flight.passage or self._depart(self._side(flight), flight)
        result = passage.finish()
        if flight.collection is not None:
            result = concluded(result, flight.collection)
        self._flying.remove(flight)
        flight.room = passage.room
        if isinstance(result, Failure):
            flight.failure = result
        else:
            self._note(flight, batch, result)
        flight.passage = flight.collection = None
        seconds = time.monotonic() - begun
        for rhythm in batch.rhythms:
            rhythm.spend(seconds)
        failed = (result.names or batch.names) if isinstance(result, Failure) else ()
        self._stats.count(batch.names, failed, seconds)

    @staticmethod
    def _note(flight: Flight, batch: Batch, contents: Contents) -> None:
        flight.values = dict(zip(batch.names, contents.values, strict=True))
        flight.intervals = batch.intervals(contents.intervals)

    def _bring(self, flight: Flight, names: list[str], place: Mapping[str, Any], step: int) -> None:
        """Values that have arrived come into force."""
        side = self._side(flight)
        entries = [self._entries[name] for name in names]
        values = flight.values or {}
        fields = {**flight.fields, "model": place["model"], "host": place["host"]}
        self._announce(flight, names)
        side.holder.put(side.batch(entries), [values[name] for name in names], fields, step, urgent=False)
        flight.drop(names)

    def _announce(self, flight: Flight, names: Iterable[str]) -> None:
        """The next points of these values are known now."""
        for name in names:
            self._entries[name].announce(flight.step, flight.intervals.get(name))

    def drain(self) -> None:
        """Wait until everything that is on its way is here. Nothing comes into force early. Collective."""
        self._depart_collected()
        while self._flying:
            self._land(self._flying[0])

    def bring_home(self) -> None:
        """Before a checkpoint: learn what is on its way, as far as that needs no call of the others.

        Main computes with what the ranks have collected, and does not wait until its values have gone: the others may
        be waiting for it elsewhere, to save together.
        """
        for flight in list(self._flying):
            if flight.fields["is_main"]:
                if flight.passage is None:
                    self._depart(self._side(flight), flight)
            elif flight.passage is not None:
                self._await(flight)
            else:
                return

    def supersede(self, names: Iterable[str]) -> None:
        """Values that were computed anew: what has arrived of them counts as having been in force."""
        wanted = set(names)
        for flight in self._flights:
            mine = [name for name in flight.pending if name in wanted and flight.values is not None]
            for name in mine:
                self._entries[name].record.version += 1
                self._entries[name].record.ahead.clear()
            self._announce(flight, mine)
            flight.drop(mine)
        self._flights[:] = [flight for flight in self._flights if flight.pending]

    def failures(self) -> Failure | None:
        """Failures that have arrived, and whose step has not; they leave with this."""
        failure: Failure | None = None
        for flight in self._flights:
            failure = flight.failure.joined(failure) if flight.failure is not None else failure
        self._flights[:] = [flight for flight in self._flights if flight.failure is None]
        return failure

    def restore(self, flights: Iterable[Flight]) -> None:
        """Go on with what was on its way when a checkpoint was written."""
        self._flights[:] = flights
        self.recount()

    def abandon(self) -> None:
        """The run has ended in a failure: nothing that is on its way comes into force."""
        self._flights.clear()
        self._flying.clear()
        self.recount()

    def _side(self, flight: Flight) -> Side:
        return self._sides[self._entries[next(iter(flight.pending))].scope]
