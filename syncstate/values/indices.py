"""Indices drawn at random, so that all ranks agree on them: drawn on the main process and sent, or drawn alike."""

import functools
from collections.abc import Callable, Sequence, Sized
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from syncstate.context import Context
from syncstate.digest import digest_tensor
from syncstate.errors import ConfigError
from syncstate.schedule import whole

__all__ = ["SEND_SEED_ABOVE", "SampledIndices"]

# 512 KiB of indices. Above it all ranks draw at the same time, where they would wait for main's draw and then for its
# transfer; and a checkpoint stays small. Below it sending is as quick, and spares the ranks an acknowledgement.
SEND_SEED_ABOVE = 65536
_WAYS = ("auto", "indices", "seed")


class SampledIndices:
    """Indices drawn from `0 ... population - 1`: a 1-D int64 tensor, in random order.

    Every refresh draws with a key of its own, which comes from `ctx.rng`; a resumed run draws the same. How the
    indices reach the ranks changes nothing about them, to the bit:

    - Main draws and the indices are sent, 8 bytes each.
    - Or only the key is sent, some hundred bytes, and all ranks draw at the same time; a checkpoint is as small. Each
      rank makes sure that it has main's weights and that its NumPy draws as main's does: a difference is an error, and
      not another draw.

    Args:
        population: How many there are to draw from; something with a length, such as a dataset; or a function that
            returns the number. Of the latter two main asks anew at each refresh, so that they may grow and shrink.
        k: How many to draw. None: as many as the population; without replacement that is a permutation.
        weights: One weight for each of the population, finite and at least 0; they need not sum to 1. None: all alike.
            What has weight 0 is never drawn.
        replacement: Whether one index may be drawn more than once.
        send: `"indices"`, `"seed"`, or `"auto"`: the seed if more than 65,536 indices are drawn and there are no
            weights, else the indices. It is decided here, by `k` or else by the size that the population has now (a
            function is not asked: `"auto"` then sends indices). With `"seed"` all ranks need the same weights, and a
            `spec` of the value would be that of the key: leave it out, or send the indices.

    Raises:
        ConfigError: An empty population, a `k` that cannot be drawn, weights that do not fit, or an unknown `send`.
            For a population that has changed since, the refresh raises it.

    Example::

        state.add("order", SampledIndices(len(dataset)), every=Every(epochs=1))
        state.add("replay", SampledIndices(buffer, k=32), every=Every(steps=1))  # buffer grows
    """

    def __init__(
        self,
        population: int | Sized | Callable[[], int],
        k: int | None = None,
        *,
        weights: Sequence[float] | torch.Tensor | NDArray[Any] | None = None,
        replacement: bool = False,
        send: str = "auto",
    ) -> None:
        if not isinstance(replacement, bool):
            raise ConfigError(f"SampledIndices: replacement must be true or false, got {replacement!r}")
        if send not in _WAYS:
            raise ConfigError(f"SampledIndices: send must be one of {', '.join(_WAYS)}, got {send!r}")
        self._population = _checked_kind(population)
        self.replacement = replacement
        self.k = None if k is None else whole("SampledIndices", "k", k, 1)
        self.weights = None if weights is None else _checked_weights(weights)
        now = None if _asked(self._population) else self._check(self.population)
        if send == "auto":
            count = self.k or now or 0
            send = "seed" if count > SEND_SEED_ABOVE and self.weights is None else "indices"
        self.send = send

    @property
    def population(self) -> int:
        """How many there are to draw from now, on this rank."""
        given = self._population
        if isinstance(given, int):
            return given
        if isinstance(given, Sized):
            return len(given)
        return whole("SampledIndices", "the population that the function returned", given(), 0)

    def compute(self, ctx: Context) -> Any:
        """A new draw: int64, shape `[k]`; or, with `send="seed"`, what each rank needs in order to draw it."""
        population = self._check(self.population)
        k = population if self.k is None else self.k
        # Raw bits, because what `Generator` makes of them may change with NumPy's version.
        key = int(ctx.rng.bit_generator.random_raw()) << 64 | int(ctx.rng.bit_generator.random_raw())
        if self.send == "indices":
            return _draw(key, population, k, self.replacement, self.weights)
        recipe = {"key": key, "population": population, "k": k, "replacement": self.replacement}
        return {**recipe, "weights": _digest(self.weights), "draws": _fingerprint()}

    @property
    def derive(self) -> Callable[[Any, Context], torch.Tensor] | None:
        """The draw, made on each rank from what main sent; None where main sends the indices."""
        return self._of_recipe if self.send == "seed" else None

    def _of_recipe(self, value: Any, ctx: Context) -> torch.Tensor:
        if isinstance(value, torch.Tensor):  # from a checkpoint of a run that sent the indices
            return value
        if value["weights"] != _digest(self.weights):
            raise ConfigError(
                f"SampledIndices: the weights on rank {ctx.rank} are not those of main, so that it would draw other "
                'indices; make them the same on all ranks, or give send="indices"'
            )
        if value["draws"] != _fingerprint():
            raise ConfigError(
                f"SampledIndices: NumPy {np.__version__} on rank {ctx.rank} draws otherwise than the one that main "
                'has, or had when the checkpoint was written; use the same version, or give send="indices"'
            )
        return _draw(value["key"], value["population"], value["k"], value["replacement"], self.weights)

    def _check(self, population: int) -> int:
        """Whether this can be drawn from so many; returns the number."""
        if population < 1:
            kind = f"an empty {type(self._population).__name__}" if isinstance(self._population, Sized) else "0"
            raise ConfigError(f"SampledIndices: population is {kind}; nothing can be drawn")
        if self.weights is not None and self.weights.size != population:
            raise ConfigError(
                f"SampledIndices: weights must be one number for each of the population, shape [{population}], "
                f"got shape [{self.weights.size}]"
            )
        k = population if self.k is None else self.k
        available = population if self.weights is None else int(np.count_nonzero(self.weights))
        if not self.replacement and k > available:
            of = f"a population of {population}"
            if available < population:
                of += f" with {available} weights above 0"
            raise ConfigError(
                f"SampledIndices: cannot draw {k} different indices from {of}; give a smaller k or replacement=True"
            )
        return population


def _draw(key: int, population: int, k: int, replacement: bool, weights: NDArray[np.float64] | None) -> torch.Tensor:
    rng = np.random.Generator(np.random.Philox(key=key))
    if weights is not None:
        drawn = _weighted(rng, k, replacement, weights)
    elif replacement:
        drawn = rng.integers(population, size=k)
    elif k == population:
        drawn = rng.permutation(population)
    else:
        drawn = rng.choice(population, size=k, replace=False)
    return torch.from_numpy(drawn.astype(np.int64, copy=False))


def _weighted(rng: np.random.Generator, k: int, replacement: bool, weights: NDArray[np.float64]) -> NDArray[np.int64]:
    if replacement:
        # Divided by the largest first, so that the sum cannot overflow.
        scaled = weights / weights.max()
        return rng.choice(weights.size, size=k, p=scaled / scaled.sum())
    # Efraimidis and Spirakis 2006, "Weighted random sampling with a reservoir": the k smallest of exponential
    # variables with the weights as rates are k successive weighted draws. As logarithms, so that none overflows.
    with np.errstate(divide="ignore"):
        keys = np.log(rng.standard_exponential(weights.size)) - np.log(weights)
    return np.argsort(keys, kind="stable")[:k]


@functools.cache
def _fingerprint() -> bytes:
    """A digest of small draws by every way that `_draw` has: equal where NumPy draws alike.

    NumPy keeps the bits of a bit generator from version to version, but not what its methods make of them.
    """
    weights = np.linspace(0.5, 2.0, 1000)
    # Of 20,000, because NumPy chooses in another way where k is below a fiftieth of more than 10,000.
    ways = [(1000, 1000, False), (20_000, 2000, False), (20_000, 100, False), (10**6 + 3, 1000, True)]
    draws = [_draw(1, *way, None) for way in ways] + [_draw(1, 1000, 1000, how, weights) for how in (False, True)]
    return digest_tensor(torch.cat(draws))


def _digest(weights: NDArray[np.float64] | None) -> bytes | None:
    return None if weights is None else digest_tensor(torch.from_numpy(weights))


def _asked(population: Any) -> bool:
    """Whether the population is a function, which may be known on the main process only."""
    return not isinstance(population, (int, Sized))


def _checked_kind(population: Any) -> Any:
    if isinstance(population, Sized) and not isinstance(population, (str, bytes)):
        return population
    if hasattr(population, "__index__"):
        return whole("SampledIndices", "population", population, 1)
    if isinstance(population, (str, bytes)) or not callable(population):
        raise ConfigError(
            "SampledIndices: population must be a whole number, something with a length or a function, "
            f"got {population!r}"
        )
    return population


def _checked_weights(weights: Any) -> NDArray[np.float64]:
    try:
        numbers = weights.tolist() if isinstance(weights, torch.Tensor) else weights
        array: NDArray[np.float64] = np.array(numbers, dtype=np.float64)
    except (TypeError, ValueError):
        raise ConfigError(f"SampledIndices: weights must be numbers, got {type(weights).__name__}") from None
    if array.ndim != 1:
        raise ConfigError(
            "SampledIndices: weights must be one number for each of the population, a list, "
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
