"""A threshold that moves with the step or with what the ranks observe: how difficult the samples may be by now."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from syncstate.context import Context
from syncstate.errors import ConfigError
from syncstate.schedule import whole
from syncstate.values.pacing import pace, real

__all__ = ["CurriculumThreshold"]


class CurriculumThreshold:
    """A threshold as a float: one that follows a formula of the step, or a quantile of what all ranks observed.

    **By a schedule** it goes from `start` at step 0 to `end` at step `steps` and stays there. With t = step / steps:

    - `"linear"`: start + (end - start) * t.
    - `"root"`: start + (end - start) * t ** (1 / degree) (Li et al. 2021, arXiv 2108.06084).
    - `"cosine"`: start + (end - start) * (1 - cos(pi t)) / 2 (Loshchilov and Hutter 2017, arXiv 1608.03983).
    - `"competence"`: end * (t * (1 - c**p) + c**p) ** (1 / p) with c = start / end and p = degree
      (Platanios et al. 2019, arXiv 1903.09848). Neither end may be negative.
    - `"step"`: in stairs, at the `milestones`; `steps` is not used.

    These cover the pacing functions of DeepSpeed's data pipeline: `fixed_linear` and `fixed_root` are `"linear"` and
    `"root"` with `multiple=difficulty_step`, and `fixed_discrete` is `"step"` with a milestone one step after each
    `max_step`.

    **By a quantile** it is that quantile of all numbers that the ranks passed to `state.observe(name, numbers)`, under
    the name of this value, since its last sync: losses, say. They are counted together, whichever rank saw them,
    so that the same numbers on 1, 2 or 4 ranks give the same threshold to the bit. Between two numbers it is
    interpolated, as `numpy.quantile` does. NaN does not count; infinite numbers do, as the largest or smallest. Where
    nothing was observed the threshold stays as it was, and before it was ever known it is `initial`.

    Args:
        schedule: `"linear"`, `"root"`, `"cosine"`, `"competence"` or `"step"`. Leave it out with a quantile.
        start: Threshold at step 0.
        end: Threshold from step `steps` on; may be below `start`.
        steps: Optimizer steps from start to end.
        degree: For `"root"` and `"competence"`: 2 is a square root, 3 a cube root.
        milestones: For `"step"`: the steps at which the threshold changes. A list makes stairs of equal height from
            `start` to `end`; a mapping gives the threshold from each step on, and has no `end`.
        multiple: Round down to a multiple of this, for lengths; `end` is then reached only if it is one.
        quantile: From 0 to 1; 0.9 is a threshold that 90 % of the observed numbers do not exceed.
        warmup: Optimizer steps during which a quantile threshold stays as it was, because early numbers mislead.
        smoothing: Share of the last threshold in a new one, from 0 to below 1: an exponential moving average over
            refreshes. An infinite last threshold has no share.
        initial: The threshold by quantile before anything is known; None: infinity, which lets everything through.
            `initial=` of `SharedState.add` stands above it until the first sync.

    Raises:
        ConfigError: An unknown schedule, a number that is missing or out of range, or both kinds at once.

    Example::

        state.add("difficulty", CurriculumThreshold(start=0.2, end=1.0, steps=10_000), every=Every(steps=100))
        state.add("hardest", CurriculumThreshold(quantile=0.9, warmup=500), every=Every(steps=100))
        state.observe("hardest", losses)  # after each forward, on every rank
        kept = losses <= state["hardest"]
    """

    # Where there is a quantile: every rank sends what it observed, and main finds a list in rank order.
    collect: str | None = None
    reduce: str = "list"

    def __init__(
        self,
        schedule: str = "linear",
        *,
        start: float | None = None,
        end: float | None = None,
        steps: int | None = None,
        degree: float = 2.0,
        milestones: Iterable[int] | Mapping[int, float] | None = None,
        multiple: float | None = None,
        quantile: float | None = None,
        warmup: int = 0,
        smoothing: float = 0.0,
        initial: float | None = None,
    ) -> None:
        if milestones is not None and not isinstance(milestones, (str, bytes)) and isinstance(milestones, Iterable):
            milestones = dict(milestones) if isinstance(milestones, Mapping) else tuple(milestones)
        # Kept as given, because the function that is made of it does not survive pickling.
        self._plan = (str(schedule), start, end, steps, degree, milestones, multiple)
        self.quantile = None if quantile is None else real("quantile", quantile, least=0, most=1)
        self.warmup = whole("CurriculumThreshold", "warmup", warmup, 0)
        self.smoothing = real("smoothing", smoothing, least=0, most=1)
        if self.smoothing == 1:
            raise ConfigError(
                f"CurriculumThreshold: smoothing must be below 1, got {smoothing!r}; with 1 the threshold never moves"
            )
        if self.quantile is None:
            self._check_no_quantile(initial)
            self._pace = pace(*self._plan)
        else:
            self._check_no_schedule()
            self.collect = "observed"
            self.initial = math.inf if initial is None else _initial(initial)

    def compute(self, ctx: Context) -> float:
        """The threshold at `ctx.step`."""
        return self._pace(ctx.step) if self.quantile is None else self._of_observed(self.quantile, ctx)

    def _of_observed(self, quantile: float, ctx: Context) -> float:
        last = float(self.initial if ctx.previous is None else ctx.previous)
        numbers = _numbers(ctx.collected)
        if ctx.step < self.warmup or not numbers.size:
            return last
        new = _quantile(numbers, quantile)
        if not self.smoothing or not math.isfinite(last):
            return new
        return self.smoothing * last + (1 - self.smoothing) * new

    def _check_no_schedule(self) -> None:
        defaults = ("linear", None, None, None, 2.0, None, None)
        given = [
            f"{key}={value!r}"
            for key, value, default in zip(_OF_SCHEDULES, self._plan, defaults, strict=True)
            if value != default
        ]
        if given:
            raise ConfigError(
                f"CurriculumThreshold: give a quantile or a schedule, not both; got quantile={self.quantile!r} and "
                f"{', '.join(given)}. Leave these out (null) for a threshold by quantile"
            )

    def _check_no_quantile(self, initial: float | None) -> None:
        given = {"warmup": self.warmup, "smoothing": self.smoothing, "initial": initial}
        for key, value in given.items():
            if value or (value is not None and key == "initial"):
                raise ConfigError(
                    f"CurriculumThreshold: {key}={value!r} is for a threshold by quantile; give quantile=, or leave "
                    f"{key} out"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_pace"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.quantile is None:
            self._pace = pace(*self._plan)


_OF_SCHEDULES = ("schedule", "start", "end", "steps", "degree", "milestones", "multiple")


def _initial(given: Any) -> float:
    # Infinity is a threshold too, and where a config says so, the one it starts with.
    return float(given) if given in (math.inf, -math.inf) else real("initial", given)


def _numbers(collected: Any) -> NDArray[np.float64]:
    """What the ranks observed, together, without NaN."""
    parts = [
        torch.as_tensor(part).reshape(-1).to(torch.float64).numpy() for part in ([] if collected is None else collected)
    ]
    together: NDArray[np.float64] = np.concatenate(parts) if parts else np.empty(0)
    return together[~np.isnan(together)]


def _quantile(numbers: NDArray[np.float64], quantile: float) -> float:
    """By rank and linear interpolation (definition 7 of Hyndman and Fan 1996), which `numpy.quantile` uses too.

    By hand, because NumPy makes NaN of an infinite neighbour. Depends on the sorted numbers only, not on their order.
    """
    place = quantile * (numbers.size - 1)
    below, above = math.floor(place), math.ceil(place)
    numbers = np.partition(numbers, (below, above))
    low, high, share = float(numbers[below]), float(numbers[above]), place - below
    if low == high or not share:
        return low
    if math.isinf(low) or math.isinf(high):
        return low if share < 0.5 else high
    return low * (1 - share) + high * share
