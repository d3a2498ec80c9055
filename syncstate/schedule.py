"""When: at which steps or epochs a value is refreshed. Pure functions of whole numbers, no torch.

A schedule is a set of *points* on one clock (steps or epochs). A value is due when a point lies between the last time
seen and this one; never `step % n == 0`, because steps jump, repeat and resume off a multiple.
"""

import math
import operator
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

from syncstate.errors import ConfigError

__all__ = ["At", "Every", "Once", "Schedule", "Unit", "crossed", "whole"]

_LIMIT = 1 << 63  # frames have 64 bits for a number with a sign
Unit = Literal["steps", "epochs", "seconds", "overhead", "once"]


def whole(owner: str, key: str, given: Any, least: int) -> int:
    """A whole number of at least `least` and below 2**63; anything else is a `ConfigError` that names the key."""
    try:
        number = -1 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        number = -1
    if not least <= number < _LIMIT:
        limit = " and below 2**63" if number >= _LIMIT else ""
        raise ConfigError(f"{owner}: {key} must be a whole number of at least {least}{limit}, got {given!r}")
    return number


@dataclass(frozen=True)
class Every:
    """Every so many steps, epochs or seconds, or as often as a share of the step time allows. Give exactly one unit.

    `Every(steps=100)` has its points at steps 0, 100, 200, ...

    Args:
        steps: Optimizer steps from one point to the next.
        epochs: Epochs from one point to the next.
        seconds: Seconds between refreshes, on the clock of the main process.
        overhead: Largest share of the step time that syncing may cost, between 0 and 1.
        start: First point, in the unit's own clock (steps for seconds and overhead).
        stop: No point at or after this one, as in `range`. None: no end.

    Raises:
        ConfigError: No unit, several units, or a number out of range.
    """

    steps: int | None = None
    epochs: int | None = None
    seconds: float | None = None
    overhead: float | None = None
    start: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        given = {u: v for u in ("steps", "epochs", "seconds", "overhead") if (v := getattr(self, u)) is not None}
        if len(given) != 1:
            what = ", ".join(f"{unit}={value!r}" for unit, value in given.items()) or "none"
            raise ConfigError(f"Every: give exactly one of steps, epochs, seconds, overhead; got {what}")
        ((unit, value),) = given.items()
        if unit in ("steps", "epochs"):
            object.__setattr__(self, unit, whole("Every", unit, value, 1))
        else:
            self._check_real(unit, value)
        object.__setattr__(self, "start", whole("Every", "start", self.start, 0))
        if self.stop is not None:
            object.__setattr__(self, "stop", whole("Every", "stop", self.stop, self.start + 1))

    @staticmethod
    def _check_real(unit: str, value: Any) -> None:
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value <= 0 or (unit == "overhead" and value >= 1):
            allowed = "a number between 0 and 1" if unit == "overhead" else "a finite number above 0"
            raise ConfigError(f"Every: {unit} must be {allowed}, got {value!r}")

    @property
    def unit(self) -> Unit:
        """The clock that this schedule counts on."""
        if self.steps is not None:
            return "steps"
        if self.epochs is not None:
            return "epochs"
        return "seconds" if self.seconds is not None else "overhead"

    @property
    def announced(self) -> bool:
        """Whether only the main process knows when it is due, and tells the others."""
        return self.unit in ("seconds", "overhead")

    @property
    def _period(self) -> int:
        period = self.steps if self.steps is not None else self.epochs
        if period is None:
            raise ConfigError(f"{self}: only the main process knows when it is due")
        return period

    def contains(self, t: int) -> bool:
        """Whether `t` is a point."""
        return t >= self.start and (self.stop is None or t < self.stop) and (t - self.start) % self._period == 0

    def next_after(self, t: int) -> int | None:
        """The first point after `t`, None if there is none. `next_after(-1)` is the first of all."""
        point = self.start if t < self.start else t + self._period - (t - self.start) % self._period
        return point if self.stop is None or point < self.stop else None

    def __str__(self) -> str:
        unit = self.unit
        text = f"every {getattr(self, unit)} {unit}"
        if self.start:
            text += f" from {self.start}"
        return text if self.stop is None else f"{text} until {self.stop}"


@dataclass(frozen=True)
class At:
    """At these steps and no others.

    Args:
        steps: Whole numbers from 0 up; order and repetition do not matter.

    Raises:
        ConfigError: No step, or something that is not a whole number of at least 0.
    """

    steps: Iterable[int]

    def __post_init__(self) -> None:
        given = self.steps
        if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
            raise ConfigError(f"At: steps must be a list of whole numbers, got {given!r}")
        points = tuple(sorted({whole("At", "steps", step, 0) for step in given}))
        if not points:
            raise ConfigError("At: steps must name at least one step, got none")
        object.__setattr__(self, "steps", points)

    @property
    def unit(self) -> Unit:
        """The clock that this schedule counts on."""
        return "steps"

    def contains(self, t: int) -> bool:
        """Whether `t` is a point."""
        return t in self.steps

    def next_after(self, t: int) -> int | None:
        """The first point after `t`, None if there is none."""
        points = cast(tuple[int, ...], self.steps)
        index = bisect_right(points, t)
        return points[index] if index < len(points) else None

    def __str__(self) -> str:
        return "at steps " + ", ".join(map(str, self.steps))


@dataclass(frozen=True)
class Once:
    """Once, when the engine first starts. A resumed run restores the value instead of computing it again."""

    @property
    def unit(self) -> Unit:
        """The clock that this schedule counts on: none."""
        return "once"

    def contains(self, t: int) -> bool:
        """Never: what is due only once is due because it was never computed."""
        return False

    def next_after(self, t: int) -> int | None:
        """The start, for one who has not seen it (`t` below 0); None afterwards."""
        return 0 if t < 0 else None

    def __str__(self) -> str:
        return "once"


Schedule = Every | At | Once


def crossed(schedule: Schedule, last: int, now: int) -> bool:
    """Whether a point lies between what was seen and now.

    Args:
        schedule: The schedule; not one that main announces.
        last: The last time seen; below 0 where nothing was, and then only a point at `now` counts.
        now: The time now.
    """
    if last < 0:
        return schedule.contains(now)
    following = schedule.next_after(last)
    return following is not None and following <= now
