"""When values are due whose schedule only the main process can follow: by the clock, or by what syncing costs.

Main turns time into a number of steps and announces it in the frame that it sends anyway, so that ranks with other
clocks, or much slower ones, sync at the same steps.
"""

import math

from syncstate.schedule import Every

__all__ = ["Rhythm"]

_NEVER = math.inf


class Rhythm:
    """The points of one `Every(seconds=...)` or `Every(overhead=...)`.

    Args:
        schedule: The schedule.
        least: Steps between two points at the least: no point can be announced before it is known.

    Attributes:
        due: The next point; infinity while it is not known yet.
        interval: Steps between the last two points.
    """

    def __init__(self, schedule: Every, least: int) -> None:
        self.schedule = schedule
        self.interval = self._least = max(1, least)
        self.due: float = schedule.start
        self._last: tuple[int, float] | None = None
        self._spent = self._mean = self._debt = 0.0

    def reset(self, step: int) -> None:
        """Training begins again at a step before the last one seen."""
        self.due = self._bounded(max(step, self.schedule.start))
        self._last = None

    def spend(self, seconds: float) -> None:
        """Main's measurement of what syncing took."""
        self._spent += seconds

    def decide(self, step: int, now: float) -> int:
        """Main's decision at a point: how many steps to the next one.

        The first is one step; then twice as many, until at least half a period was measured.

        Args:
            step: This point.
            now: Seconds on a clock that never goes back.
        """
        last, self._last = self._last, (step, now)
        if last is None or step <= last[0]:
            self._spent = 0.0
            return self.interval
        steps, seconds = step - last[0], max(now - last[1], 1e-9)
        spent, self._spent = self._spent, 0.0
        if self.schedule.seconds is not None:
            measured = 2 * seconds >= self.schedule.seconds
            wanted = round(self.schedule.seconds * steps / seconds) if measured else 2 * steps
        else:
            wanted = self._affordable(steps, seconds, spent)
        return max(self._least, min(wanted, 2 * steps if wanted > steps else wanted))

    def _affordable(self, steps: int, seconds: float, spent: float) -> int:
        """Steps until the share of the time that syncing took, the next sync included, is what is allowed."""
        share = self.schedule.overhead or 0.0
        self._mean = spent if not self._mean else 0.5 * (self._mean + spent)
        # What was spent beyond the share is made up for; what was saved is not kept for long.
        self._debt = max(self._debt + spent - share * seconds, -self._mean)
        a_step = max((seconds - spent) / steps, 1e-9)
        return math.ceil((self._debt + (1 - share) * self._mean) / (share * a_step))

    def wait(self) -> None:
        """A value is on its way, and with it the next point."""
        self.due = _NEVER

    def follow(self, step: int, interval: int | None) -> None:
        """Every rank: the next point, as main announced it; None where it could not, after a failure."""
        self.interval = self.interval if interval is None else interval
        self.due = self._bounded(step + self.interval)

    @property
    def announced(self) -> tuple[int, int] | None:
        """The next point and the interval before it, for `restore`; None while no point is known.

        After the last point it is the end of the schedule, so that a resumed run knows that there is no other.
        """
        if self.due == _NEVER:
            return None if self.schedule.stop is None else (self.schedule.stop, self.interval)
        return int(self.due), self.interval

    def restore(self, due: int, interval: int) -> None:
        """Go on with what was announced in an earlier run."""
        self.due, self.interval = self._bounded(due), max(self._least, interval)

    def _bounded(self, point: int) -> float:
        return point if self.schedule.stop is None or point < self.schedule.stop else _NEVER
