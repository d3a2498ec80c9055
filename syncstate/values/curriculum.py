"""A threshold that moves with the step: how difficult the samples may be by now."""

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

from syncstate.context import Context
from syncstate.errors import ConfigError
from syncstate.schedule import whole

__all__ = ["CurriculumThreshold"]

# From the share t of the way, between 0 and 1, to the share of the difference.
_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda t: t,
    # The "fixed root" pacing of degree 2 (Li et al. 2021, arXiv 2108.06084): new samples come quickly at first.
    "root": math.sqrt,
    # Half a period of the cosine (Loshchilov and Hutter 2017, "SGDR", arXiv 1608.03983, equation 5): flat at both ends.
    "cosine": lambda t: 0.5 * (1 - math.cos(math.pi * t)),
}


class CurriculumThreshold:
    """A threshold that goes from `start` at step 0 to `end` at step `steps` and stays there. A float.

    With t = min(1, step / steps) it is `start + (end - start) * f(t)`, where f(t) is t for `"linear"`, the square root
    of t for `"root"` and (1 - cos(pi t)) / 2 for `"cosine"`.

    Args:
        schedule: `"linear"`, `"root"` or `"cosine"`.
        start: Threshold at step 0.
        end: Threshold from step `steps` on; may be below `start`.
        steps: Optimizer steps from start to end.
        quantile, warmup, smoothing: A threshold taken from what the ranks observed; not available yet.

    Raises:
        ConfigError: An unknown schedule, a number that is missing or out of range, or a quantile.

    Example::

        state.add("difficulty", CurriculumThreshold(start=0.2, end=1.0, steps=10_000), every=Every(steps=100))
    """

    def __init__(
        self,
        schedule: str = "linear",
        *,
        start: float | None = None,
        end: float | None = None,
        steps: int | None = None,
        quantile: float | None = None,
        warmup: int | None = None,
        smoothing: float | None = None,
    ) -> None:
        for key, given in (("quantile", quantile), ("warmup", warmup), ("smoothing", smoothing)):
            if given is not None:
                raise ConfigError(
                    f"CurriculumThreshold: {key}={given!r} is not available yet, because it needs a value that "
                    "collects; give start, end and steps"
                )
        if str(schedule) not in _SHAPES:
            raise ConfigError(f"CurriculumThreshold: schedule must be one of {', '.join(_SHAPES)}, got {schedule!r}")
        self.schedule = str(schedule)
        self.start = _real("start", start)
        self.end = _real("end", end)
        self.steps = whole("CurriculumThreshold", "steps", steps, 1)

    def compute(self, ctx: Context) -> float:
        """The threshold at `ctx.step`."""
        # Outside the formula, so that the end is reached exactly, without a rounding error.
        if ctx.step >= self.steps:
            return self.end
        return self.start + (self.end - self.start) * _SHAPES[self.schedule](ctx.step / self.steps)


def _real(key: str, given: Any) -> float:
    # NumPy's float32 is a Real too, where it is no float.
    if isinstance(given, bool) or not (isinstance(given, Real) and math.isfinite(given)):
        raise ConfigError(f"CurriculumThreshold: {key} must be a finite number, got {given!r}")
    return float(given)
