"""What all ranks must agree on, and which values are due when."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from syncstate.definition import MISSING, Definition
from syncstate.digest import digest_bytes, digest_text
from syncstate.loop.difference import plan_text
from syncstate.loop.options import Options
from syncstate.record import Record
from syncstate.schedule import Schedule
from syncstate.state import SharedState
from syncstate.wire.codec import encode

__all__ = ["Agenda", "Entry", "Plan"]

_NEVER = math.inf


class Entry:
    """One value inside an engine: what was declared, filled up with the engine's defaults.

    Attributes:
        name, definition: As declared.
        schedule, timeout: The value's own, else the engine's.
        record: What the state knows of it.
        compute: The function that computes it.
        again: Whether the start computes it whatever its schedule says.
    """

    __slots__ = ("again", "compute", "definition", "name", "record", "schedule", "timeout")

    def __init__(self, definition: Definition, record: Record, schedule: Schedule, timeout: float) -> None:
        self.name = definition.name
        self.definition = definition
        self.compute: Callable[..., Any] = definition.compute
        self.record = record
        self.schedule = definition.every if definition.every is not None else schedule
        self.again = False
        self.timeout = definition.timeout if definition.timeout is not None else timeout

    def described(self, allow_pickle: bool) -> dict[str, Any]:
        """What must be the same on all ranks."""
        definition = self.definition
        spec, initial = definition.spec, "none"
        if definition.initial is not MISSING:
            initial = digest_bytes(encode(definition.initial, allow_pickle=allow_pickle)).hex()[:12]
        return {
            "every": str(self.schedule),
            "spec": spec.__name__ if isinstance(spec, type) else str(spec),
            "initial": initial,
            "apply": definition.apply is not None,
            "derive": definition.derive is not None,
            "checkpoint": definition.checkpoint,
        }


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
            Entry(state.definition(name), state.record(name), options.every, options.seconds)
            for name in sorted(state.names)
        ]
        content: dict[str, Any] = {
            "engine": {**options.agreed(), **more},
            "values": {entry.name: entry.described(state.allow_pickle) for entry in self.entries},
            "config": options.config or {},
        }
        self.text = plan_text(content)
        self.digest = digest_text(self.text)

    def named(self, names: Iterable[str]) -> list[Entry]:
        """The entries with these names, in the plan's order."""
        wanted = set(names)
        return [entry for entry in self.entries if entry.name in wanted]


class _Group:
    """Entries with the same schedule, which are always due together."""

    __slots__ = ("entries", "epochs", "next", "schedule")

    def __init__(self, schedule: Schedule, entries: list[Entry]) -> None:
        self.schedule = schedule
        self.entries = entries
        self.epochs = schedule.unit == "epochs"
        self.next: float = _NEVER


class Agenda:
    """Which entries are due, by crossing: a point between what was seen and what is now.

    Args:
        entries: In the plan's order.

    Attributes:
        next_step: Before this step nothing is due while the epoch stays.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        by_schedule: dict[Schedule, list[Entry]] = {}
        for entry in entries:
            by_schedule.setdefault(entry.schedule, []).append(entry)
        self._groups = [_Group(schedule, group) for schedule, group in by_schedule.items()]
        self.next_step = _NEVER

    def due_at_start(self, seen: tuple[int, int], step: int, epoch: int) -> list[Entry]:
        """What a start at this point serves: points since what was seen, and values that were never computed.

        Args:
            seen: The last step and epoch; -1 and -1 before anything was seen.
            step, epoch: The start. If it lies before `seen`, training begins again, and only its own points count.
        """
        back = step < seen[0] or epoch < seen[1]
        due = []
        for entry in self._entries:
            now, last = (epoch, seen[1]) if entry.schedule.unit == "epochs" else (step, seen[0])
            if entry.again:
                hit = True
            elif not entry.record.version:
                first = entry.schedule.next_after(-1)
                hit = first is not None and first <= now
            elif back or last < 0:
                hit = entry.schedule.contains(now)
            else:
                following = entry.schedule.next_after(last)
                hit = following is not None and following <= now
            if hit:
                due.append(entry)
        return due

    def due(self, step: int, epoch: int) -> list[Entry]:
        """What a step or a turn of the epoch makes due, in the plan's order."""
        due = [group for group in self._groups if group.next <= (epoch if group.epochs else step)]
        if len(due) < 2:
            return due[0].entries if due else []
        hit = {group.schedule for group in due}
        return [entry for entry in self._entries if entry.schedule in hit]

    def see(self, step: int, epoch: int) -> None:
        """Look up the next points after this one."""
        self.next_step = _NEVER
        for group in self._groups:
            following = group.schedule.next_after(epoch if group.epochs else step)
            group.next = _NEVER if following is None else following
            if not group.epochs:
                self.next_step = min(self.next_step, group.next)
