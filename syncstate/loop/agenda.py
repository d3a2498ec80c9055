"""Which values are due when."""

import math
from collections.abc import Sequence

from syncstate.loop.chore import Chore
from syncstate.loop.entry import Entry
from syncstate.loop.rhythm import Rhythm
from syncstate.schedule import Schedule, crossed

__all__ = ["Agenda"]

_NEVER = math.inf


class _Group:
    """Entries that are always due together."""

    __slots__ = ("entries", "epochs", "next", "rhythm", "schedule")

    def __init__(self, entry: Entry | Chore) -> None:
        self.schedule = entry.schedule
        self.rhythm = entry.rhythm
        self.entries = [entry]
        self.epochs = entry.schedule.unit == "epochs"
        self.next: float = _NEVER

    def see(self, step: int, epoch: int) -> None:
        """Look up the next point after this one."""
        if self.rhythm is not None:
            self.next = self.rhythm.due
            return
        following = self.schedule.next_after(epoch if self.epochs else step)
        self.next = _NEVER if following is None else following


class Agenda:
    """Which entries are due, by crossing: a point between what was seen and what is now.

    Args:
        entries: In the plan's order.

    Attributes:
        next_step: Before this step nothing is due while the epoch stays.
    """

    def __init__(self, entries: Sequence[Entry | Chore]) -> None:
        self._entries = entries
        groups: dict[Schedule | Rhythm, _Group] = {}
        self._group_of: dict[str, _Group] = {}
        for entry in entries:
            key = entry.rhythm if entry.rhythm is not None else entry.schedule
            if key in groups:
                groups[key].entries.append(entry)
            else:
                groups[key] = _Group(entry)
            self._group_of[entry.name] = groups[key]
        self._groups = list(groups.values())
        self.next_step = _NEVER

    def due_at_start(self, seen: tuple[int, int], step: int, epoch: int) -> list[Entry | Chore]:
        """What a start at this point serves: points since what was seen, and values that were never computed.

        Args:
            seen: The last step and epoch; -1 and -1 before anything was seen.
            step, epoch: The start. If it lies before `seen`, training begins again, and only its own points count.
        """
        back = step < seen[0] or epoch < seen[1]
        if back:
            for group in self._groups:
                if group.rhythm is not None:
                    group.rhythm.reset(step)
        return [entry for entry in self._entries if entry.again or self._hit(entry, seen, step, epoch, back)]

    @staticmethod
    def _hit(entry: Entry | Chore, seen: tuple[int, int], step: int, epoch: int, back: bool) -> bool:
        schedule, rhythm = entry.schedule, entry.rhythm
        if rhythm is not None:
            return rhythm.due <= step or (not entry.record.version and rhythm.schedule.start <= step)
        now, last = (epoch, seen[1]) if schedule.unit == "epochs" else (step, seen[0])
        if not entry.record.version:
            first = schedule.next_after(-1)
            return first is not None and first <= now
        return crossed(schedule, -1 if back else last, now)

    def due(self, step: int, epoch: int) -> list[Entry | Chore]:
        """What a step or a turn of the epoch makes due, in the plan's order."""
        due = [group for group in self._groups if group.next <= (epoch if group.epochs else step)]
        if len(due) < 2:
            return due[0].entries if due else []
        return [entry for entry in self._entries if self._group_of[entry.name] in due]

    def see(self, step: int, epoch: int) -> None:
        """Look up the next points after this one."""
        self.next_step = _NEVER
        for group in self._groups:
            group.see(step, epoch)
            if not group.epochs:
                self.next_step = min(self.next_step, group.next)
