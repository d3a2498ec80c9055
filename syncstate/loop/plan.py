"""What all ranks of an engine must agree on."""

from collections.abc import Iterable, Mapping
from typing import Any

from syncstate.digest import digest_text
from syncstate.loop.difference import plan_text
from syncstate.loop.entry import Entry
from syncstate.loop.options import Options
from syncstate.loop.rhythm import Rhythm
from syncstate.schedule import Every
from syncstate.state import SharedState

__all__ = ["Plan"]


class Plan:
    """The values of an engine in an order that all ranks share, and a digest of all that they must agree on.

    Args:
        state: The values.
        options: The engine's.
        more: What else must be the same.
    """

    def __init__(self, state: SharedState, options: Options, more: Mapping[str, Any]) -> None:
        # Sorted, so that the order of registration does not matter.
        self.entries = [
            Entry(state.definition(name), state.record(name), options.every, options.transport)
            for name in sorted(state.names)
        ]
        _share_rhythms(self.entries)
        content: dict[str, Any] = {
            "engine": {**options.agreed(), **more},
            "values": {entry.name: entry.described(state.allow_pickle) for entry in self.entries},
            "resync": {str(number): resync.agreed() for number, resync in enumerate(options.resync)},
            "config": options.config or {},
        }
        self.text = plan_text(content)
        self.digest = digest_text(self.text)

    def named(self, names: Iterable[str]) -> list[Entry]:
        """The entries with these names, in the plan's order."""
        wanted = set(names)
        return [entry for entry in self.entries if entry.name in wanted]


def _share_rhythms(entries: Iterable[Entry]) -> None:
    """Give entries that travel in one frame, by the same schedule, one rhythm."""
    rhythms: dict[Any, Rhythm] = {}
    for entry in entries:
        schedule = entry.schedule
        if isinstance(schedule, Every) and schedule.announced:
            key = (schedule, entry.async_op, entry.lag, entry.scope, entry.collects)
            entry.rhythm = rhythms.setdefault(key, Rhythm(schedule, entry.lag))
