"""How a threshold moves with the step: pure functions, each with the paper that it comes from."""

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

from syncstate.errors import ConfigError
from syncstate.schedule import whole

__all__ = ["SCHEDULES", "Pace", "pace", "real"]

Pace = Callable[[int], float]

SCHEDULES = ("linear", "root", "cosine", "competence", "step")
_OWNER = "CurriculumThreshold"
# Room for the rounding of a quotient such as 0.3 / 0.1, which lies just below 3.
_NEARLY = 1e-9


def pace(schedule: str, start: Any, end: Any, steps: Any, degree: Any, milestones: Any, multiple: Any) -> Pace:
    """The function from a step to the threshold; its arguments are those of `CurriculumThreshold`.

    Raises:
        ConfigError: An argument that is missing, impossible, or of another schedule.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"{_OWNER}: schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    degree = real("degree", degree, above=0.0)
    if degree != 2.0 and schedule not in ("root", "competence"):
        raise ConfigError(f"{_OWNER}: degree={degree!r} is for the schedules root and competence, not for {schedule}")
    if schedule == "step":
        found = _stairs(start, end, milestones)
    else:
        if milestones is not None:
            raise ConfigError(f"{_OWNER}: milestones={milestones!r} is for the schedule step, not for {schedule}")
        found = _curve(schedule, real("start", start), real("end", end), whole(_OWNER, "steps", steps, 1), degree)
    return found if multiple is None else _rounded(found, real("multiple", multiple, above=0.0))


def _curve(schedule: str, start: float, end: float, steps: int, degree: float) -> Pace:
    between: Callable[[float], float]  # from the share of the way, above 0 and below 1, to the threshold
    if schedule == "competence":
        between = _competence(start, end, degree)
    else:
        shape: Callable[[float], float] = {
            "linear": lambda t: t,
            # The "fixed root" pacing (Li et al. 2021, arXiv 2108.06084): new samples come quickly at first.
            "root": lambda t: t ** (1 / degree),
            # Half a period of the cosine (Loshchilov and Hutter 2017, "SGDR", arXiv 1608.03983, equation 5).
            "cosine": lambda t: 0.5 * (1 - math.cos(math.pi * t)),
        }[schedule]

        def between(t: float) -> float:
            return start + (end - start) * shape(t)

    def at(step: int) -> float:
        # Both ends outside of the formula, so that they are met exactly, without a rounding error.
        if step <= 0:
            return start
        return end if step >= steps else between(step / steps)

    return at


def _competence(start: float, end: float, degree: float) -> Callable[[float], float]:
    """Competence-based pacing (Platanios et al. 2019, arXiv 1903.09848, section 3.2), scaled so that it ends at `end`.

    With c0 = start / end it is end * (t * (1 - c0**p) + c0**p)**(1/p).
    """
    if min(start, end) < 0 or max(start, end) == 0:
        raise ConfigError(
            f"{_OWNER}: the schedule competence takes a start and an end of at least 0 and not both 0, "
            f"got start={start!r} and end={end!r}"
        )
    largest = max(start, end)  # divided by it, so that no power overflows
    low, high = (start / largest) ** degree, (end / largest) ** degree
    return lambda t: largest * (low + (high - low) * t) ** (1 / degree)


def _stairs(start: Any, end: Any, milestones: Any) -> Pace:
    first = real("start", start)
    if isinstance(milestones, Mapping) and milestones:
        if end is not None:
            raise ConfigError(
                f"{_OWNER}: milestones that name their thresholds leave no room for end={end!r}; leave end out (null)"
            )
        given = {_milestone(step): real(f"milestones[{step!r}]", height) for step, height in milestones.items()}
        stairs = sorted(given.items())
    elif isinstance(milestones, Iterable) and not isinstance(milestones, (str, bytes, Mapping)):
        last = real("end", end)
        at = sorted({_milestone(step) for step in milestones})
        stairs = [(step, first + (last - first) * n / len(at)) for n, step in enumerate(at[:-1], 1)]
        stairs += [(step, last) for step in at[-1:]]
    else:
        stairs = []
    if not stairs:
        raise ConfigError(
            f"{_OWNER}: the schedule step takes milestones, a list of steps or a mapping from steps to thresholds, "
            f"got {milestones!r}"
        )

    def at_step(step: int) -> float:
        height = first
        for milestone, threshold in stairs:
            if step < milestone:
                break
            height = threshold
        return height

    return at_step


def _milestone(step: Any) -> int:
    return whole(_OWNER, "a milestone", step, 1)


def _rounded(exact: Pace, multiple: float) -> Pace:
    return lambda step: math.floor(exact(step) / multiple + _NEARLY) * multiple


def real(key: str, given: Any, *, least: float = -math.inf, most: float = math.inf, above: float = -math.inf) -> float:
    """A finite number within bounds; anything else is a `ConfigError` that names the key."""
    # NumPy's float32 is a Real too, where it is no float.
    number = isinstance(given, Real) and not isinstance(given, bool) and math.isfinite(given)
    if not number or not least <= given <= most or given <= above:
        bounds = f" from {least:g} to {most:g}" if least > -math.inf else ""
        bounds += f" above {above:g}" if above > -math.inf else ""
        raise ConfigError(f"{_OWNER}: {key} must be a finite number{bounds}, got {given!r}")
    return float(given)
