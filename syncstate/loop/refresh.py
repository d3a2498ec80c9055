"""What happens at one step: what has arrived comes into force, and what is due is computed and sent.

On every rank in this order: results that were collected at an earlier step go on their way, arrivals come into force,
oldest first, then one blocking frame, then one asynchronous frame.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from syncstate.loop.batch import Batch
from syncstate.loop.entry import Entry
from syncstate.loop.flights import Flights
from syncstate.loop.payload import Contents
from syncstate.loop.side import Side
from syncstate.loop.sources import Failure
from syncstate.loop.stats import Stats

__all__ = ["Refresh", "Result"]


class Result(NamedTuple):
    """What a call brought.

    Attributes:
        names: The values that came into force, each once, in order of arrival.
        failure: Why others did not.
    """

    names: tuple[str, ...]
    failure: Failure | None = None

    def conclude(self, on_error: str) -> tuple[str, ...]:
        """Say which values came into force, or raise the failure that all ranks see."""
        if self.failure is not None:
            self.failure.conclude(on_error)
        return self.names


class Refresh:
    """Refreshes values of a state.

    Args:
        entries: The values of the plan.
        sides: Scope -> the group that shares its values.
        flights: What is on its way.
        stats: Where syncs are counted.
    """

    def __init__(self, entries: Sequence[Entry], sides: Mapping[str, Side], flights: Flights, stats: Stats) -> None:
        self._sides = sides
        alone = len(sides) == 1 and not any(entry.async_op for entry in entries)
        self._only = sides["world"] if alone else None
        self._stats = stats
        self._channels = [side.exchange.channel for side in sides.values()]
        self._posted = sum(channel.collectives for channel in self._channels)  # without what opening took
        self.flights = flights

    def step(self, due: Sequence[Entry], place: Mapping[str, Any]) -> Result:
        """All that happens at a step.

        Args:
            due: The values that are due.
            place: `step`, `epoch`, `model` and `host` of the contexts.

        Raises:
            SyncStateError: A sync failed for a reason that ends the engine.
        """
        if not self.flights:
            return self.sync(due, place) if due else Result(())
        names, failure = self.flights.arrive(place)
        result = self.sync(due, place) if due else Result(())
        self.tally()
        failure = failure.joined(result.failure) if failure else result.failure
        return Result(tuple(dict.fromkeys(names + result.names)), failure)

    def sync(self, due: Sequence[Entry], place: Mapping[str, Any], *, prompt: bool = False) -> Result:
        """Compute and send what is due.

        Args:
            due: Which values; at least one.
            place: As for `step`.
            prompt: Whether all of them come into force at once, whatever they say.
        """
        if self._only is not None:  # which spares a sync of small values a tenth of its time
            result = self._blocking(self._only, due, {**self._only.place, **place}, prompt)
            self.tally()
            return result
        names: tuple[str, ...] = ()
        failure: Failure | None = None
        for scope, side in self._sides.items():
            ours = [entry for entry in due if entry.scope == scope]
            later = [] if prompt else [entry for entry in ours if entry.async_op and entry.record.version]
            now = [entry for entry in ours if entry not in later]
            fields = {**side.place, **place}
            if now:
                result = self._blocking(side, now, fields, prompt)
                names += result.names
                failure = result.failure.joined(failure) if result.failure else failure
            sent = [entry for entry in later if not entry.collects]
            if sent:
                self.flights.launch(side, sent, fields)
            collecting = [entry for entry in later if entry.collects]
            if collecting:
                self.flights.collect(side, collecting, {**fields, "model": None})
        self.tally()
        return Result(names, failure)

    def tally(self) -> None:
        """Count the collectives since the last time."""
        posted = 0
        for channel in self._channels:
            posted += channel.collectives
        self._stats.collectives += posted - self._posted
        self._posted = posted

    # One blocking frame

    def _blocking(self, side: Side, entries: Sequence[Entry], fields: dict[str, Any], prompt: bool) -> Result:
        begun = time.monotonic()
        batch = side.batch(entries)
        if side.holder.urgent and fields["is_main"]:
            side.holder.settle(fields["step"])
        result = side.exchange.run(batch, fields)
        names: tuple[str, ...] = ()
        if isinstance(result, Failure):
            self._announce(batch, {}, fields["step"])
        else:
            if prompt:
                self.flights.supersede(batch.names)
            self._announce(batch, batch.intervals(result.intervals), fields["step"])
            names = self._received(side, batch, result, fields, prompt)
        seconds = time.monotonic() - begun
        for rhythm in batch.rhythms:
            rhythm.spend(seconds)
        failed = (result.names or batch.names) if isinstance(result, Failure) else ()
        self._stats.count(batch.names, failed, seconds)
        return Result(names, result if isinstance(result, Failure) else None)

    def _received(
        self, side: Side, batch: Batch, contents: Contents, fields: dict[str, Any], prompt: bool
    ) -> tuple[str, ...]:
        """Values of a blocking frame: in force now, or held back by their lag."""
        step = fields["step"]
        held: list[int] = []
        if batch.lagged and not prompt:
            held = [index for index, e in enumerate(batch.entries) if e.lag and e.record.version]
        if not held:
            side.holder.put(batch, contents.values, fields, step)
            return batch.names
        self.flights.hold_back(fields, {batch.names[index]: contents.values[index] for index in held})
        rest = [index for index in range(len(batch.entries)) if index not in held]
        if not rest:
            return ()
        now = side.batch([batch.entries[index] for index in rest])
        side.holder.put(now, [contents.values[index] for index in rest], fields, step)
        return now.names

    @staticmethod
    def _announce(batch: Batch, intervals: Mapping[str, int], step: int) -> None:
        for entry in batch.entries if batch.rhythms else ():
            entry.announce(step, intervals.get(entry.name))

    def settle(self, step: int) -> None:
        """Before leaving: wait until every rank has applied what it received."""
        for side in self._sides.values():
            side.holder.settle(step, leaving=True)

    def take(self, restored: Sequence[Entry], place: Mapping[str, Any]) -> None:
        """Bring values into force that a checkpoint has put into the records.

        Args:
            restored: Which values; at least one.
            place: `step` and `epoch` of the checkpoint.
        """
        for scope, side in self._sides.items():
            ours = [entry for entry in restored if entry.scope == scope]
            if ours:
                side.holder.hold(side.batch(ours), [e.record.sent for e in ours], {**side.place, **place})
