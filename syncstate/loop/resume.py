"""Going on from a checkpoint: the ranks agree on one, and what it holds comes into force."""

import logging
from collections.abc import Sequence
from typing import Any

from syncstate.loop.checkpoint import Restored, parse, read_flight, restore
from syncstate.loop.entry import Entry
from syncstate.loop.flight import Flight
from syncstate.loop.opening import Opened
from syncstate.loop.refresh import Refresh
from syncstate.state import SharedState

__all__ = ["resume"]

_log = logging.getLogger("syncstate")


def resume(
    opened: Opened, entries: Sequence[Entry], state: SharedState, refresh: Refresh, loaded: Restored | None
) -> tuple[int, int] | None:
    """Put a loaded checkpoint into force, and forget what is computed at every start. Collective.

    Args:
        opened: What the ranks talk through.
        entries: The plan's.
        state: The values.
        refresh: Brings them into force.
        loaded: What this rank loaded.

    Returns:
        The step and epoch that the checkpoint has seen; None without one.
    """
    restored = _shared(opened, loaded)
    for entry in entries:
        entry.again = entry.schedule.unit == "once" and not entry.checkpoint
        if entry.rhythm is not None and entry.record.announced is not None:
            entry.rhythm.restore(*entry.record.announced)
    if restored is None:
        refresh.flights.recount()
        return None
    found = restore(restored, entries, state, is_main=opened.topology.is_main)
    refresh.flights.restore(_shared_flights(opened, restored, entries, state))
    found = _delivered(opened, entries, state, found)
    if found:
        step, epoch = restored.seen
        refresh.take(found, {"step": step, "epoch": epoch})
    return restored.seen


def _shared(opened: Opened, loaded: Restored | None) -> Restored | None:
    """Agree on a checkpoint: where ranks loaded none or another, all take that of the lowest that loaded any."""
    if opened.meeting is None:
        return loaded
    groups = opened.meeting.compare("start: comparing checkpoints", loaded.record if loaded else "none")
    if len(groups) == 1:
        return loaded
    holders = {record: ranks for record, (ranks, _) in groups.items() if record != "none"}
    record, ranks = min(holders.items(), key=lambda item: item[1])
    content: Any = loaded.content if loaded and loaded.record == record else None
    exchange = opened.sides["world"].exchange
    content = exchange.hand_round(content, ranks[0], opened.wait("start: sharing a checkpoint"))
    told = "; ".join(f"{'none' if r == 'none' else r[:8]} on ranks {who}" for r, (who, _) in groups.items())
    _log.warning("start: the ranks loaded different checkpoints (%s); all take that of rank %d", told, ranks[0])
    return parse(content)


def _shared_flights(opened: Opened, restored: Restored, entries: Sequence[Entry], state: SharedState) -> list[Flight]:
    """What was on its way, as main knows it: other ranks may have saved before they could know."""
    content: Any = restored.content.get("flights", [])
    world = opened.sides["world"]
    scattered = {entry.name for entry in entries if entry.definition.scattered and entry.lag}
    if opened.meeting is not None:
        groups = opened.meeting.compare("start: comparing what was on its way", restored.flights)
        if len(groups) > 1 or scattered:
            wait = opened.wait("start: sharing what was on its way")
            content = world.exchange.hand_round(content, opened.topology.main, wait)
    flights = [read_flight(flight, world.place, state.allow_pickle) for flight in content]
    for flight in flights:
        for name in scattered.intersection(flight.pending):
            items = (flight.values or {})[name]
            if len(items) != opened.topology.world_size:  # forgotten, as in `_delivered`
                flight.drop([name])
            elif flight.values is not None and not opened.topology.is_main:
                flight.values[name] = items[opened.topology.rank]
    return flights


def _delivered(opened: Opened, entries: Sequence[Entry], state: SharedState, found: list[Entry]) -> list[Entry]:
    """Deliver scattered values again, of which main alone has all items; returns what is restored then.

    A value for another number of ranks is forgotten everywhere, and so computed anew.
    """
    for scope, side in opened.sides.items():
        ours = [e for e in entries if e.definition.scattered and e.checkpoint and e.scope == scope]
        if not ours:
            continue
        kept = {e.name: [e.record.sent, list(e.record.steps), e.record.version] for e in ours if e in found}
        wait = opened.wait("start: delivering restored values")
        kept = side.exchange.hand_round(kept, side.topology.main, wait)
        for entry in ours:
            if entry in found:
                found.remove(entry)
            items, steps, version = kept.get(entry.name, ([], [None, None], 0))
            if len(items) != side.topology.world_size:
                state._forget(entry.name)
                continue
            sent = items if side.topology.is_main else items[side.topology.rank]
            entry.record.put(sent, (steps[0], steps[1]), version)
            found.append(entry)
    return found
