"""Indices drawn at random on the main process, so that all ranks agree on them."""

from collections.abc import Sequence, Sized
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from syncstate.context import Context
from syncstate.errors import ConfigError
from syncstate.schedule import whole

__all__ = ["SampledIndices"]


class SampledIndices:
    """Indices drawn from `0 ... population - 1` with `ctx.rng`: a 1-D int64 tensor, in random order.

    Args:
        population: How many there are to draw from, or something with a length, such as a dataset. The length is taken
            once, here.
        k: How many to draw. None: as many as the population; without replacement that is a permutation.
        weights: One weight for each of the population, finite and at least 0; they need not sum to 1. None: all alike.
            What has weight 0 is never drawn.
        replacement: Whether one index may be drawn more than once.

    Raises:
        ConfigError: An empty population, a `k` that cannot be drawn, or weights that do not fit.

    Example::

        state.add("order", SampledIndices(len(dataset)), every=Every(epochs=1))
    """

    def __init__(
        self,
        population: int | Sized,
        k: int | None = None,
        *,
        weights: Sequence[float] | torch.Tensor | NDArray[Any] | None = None,
        replacement: bool = False,
    ) -> None:
        if not isinstance(replacement, bool):
            raise ConfigError(f"SampledIndices: replacement must be true or false, got {replacement!r}")
        self.population = _checked_population(population)
        self.replacement = replacement
        self.weights = None if weights is None else _checked_weights(weights, self.population)
        self.k = self.population if k is None else whole("SampledIndices", "k", k, 1)
        available = self.population if self.weights is None else int(np.count_nonzero(self.weights))
        if not replacement and self.k > available:
            of = f"a population of {self.population}"
            if available < self.population:
                of += f" with {available} weights above 0"
            raise ConfigError(
                f"SampledIndices: cannot draw {self.k} different indices from {of}; give a smaller k "
                "or replacement=True"
            )

    def compute(self, ctx: Context) -> torch.Tensor:
        """A new draw: int64, shape `[k]`."""
        return torch.from_numpy(self._draw(ctx.rng).astype(np.int64, copy=False))

    def _draw(self, rng: np.random.Generator) -> NDArray[np.int64]:
        if self.weights is None:
            if self.replacement:
                return rng.integers(self.population, size=self.k)
            if self.k == self.population:
                return rng.permutation(self.population)
            return rng.choice(self.population, size=self.k, replace=False)
        if self.replacement:
            # Divided by the largest first, so that the sum cannot overflow.
            scaled = self.weights / self.weights.max()
            return rng.choice(self.population, size=self.k, p=scaled / scaled.sum())
        # Efraimidis and Spirakis 2006, "Weighted random sampling with a reservoir": the k smallest of exponential
        # variables with the weights as rates are k successive weighted draws. As logarithms, so that none overflows.
        with np.errstate(divide="ignore"):
            keys = np.log(rng.standard_exponential(self.population)) - np.log(self.weights)
        return np.argsort(keys, kind="stable")[: self.k]


def _checked_population(population: Any) -> int:
    if isinstance(population, (str, bytes)) or not (isinstance(population, Sized) or hasattr(population, "__index__")):
        raise ConfigError(
            f"SampledIndices: population must be a whole number or something with a length, got {population!r}"
        )
    if not isinstance(population, Sized):
        return whole("SampledIndices", "population", population, 1)
    if len(population) < 1:
        raise ConfigError(f"SampledIndices: population is an empty {type(population).__name__}; nothing can be drawn")
    return len(population)


def _checked_weights(weights: Any, population: int) -> NDArray[np.float64]:
    try:
        numbers = weights.tolist() if isinstance(weights, torch.Tensor) else weights
        array: NDArray[np.float64] = np.array(numbers, dtype=np.float64)
    except (TypeError, ValueError):
        raise ConfigError(f"SampledIndices: weights must be numbers, got {type(weights).__name__}") from None
    if array.shape != (population,):
        raise ConfigError(
            f"SampledIndices: weights must be one number for each of the population, shape [{population}], "
            f"got shape {list(array.shape)}"
        )
    bad = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if bad.size:
        raise ConfigError(
            f"SampledIndices: weights must be finite and at least 0, got {array[bad[0]]} at index {bad[0]}"
        )
    if not array.any():
        raise ConfigError("SampledIndices: at least one weight must be above 0, all are 0")
    return array
