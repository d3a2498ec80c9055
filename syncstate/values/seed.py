"""A random seed that all ranks know, or one for each rank that all of them could derive."""

import operator
import random
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from syncstate.context import Context
from syncstate.digest import digest_text
from syncstate.errors import ConfigError

__all__ = ["SEEDERS", "Seed", "checked_generators", "for_rank", "undo_rank"]

# NumPy's legacy generator takes 32 bits; python and torch take more. One width that is valid for all of them.
_MASK = 0xFFFFFFFF
# The fractional part of the golden ratio in 32 bits (Knuth, TAOCP 3, 6.4): odd, so that no two of 2**32 ranks meet.
_STRIDE = 0x9E3779B9


class Seed:
    """A random seed: a whole number from 0 to 2**32 - 1, valid for python, numpy and torch.

    Every refresh derives a new one from the base, the step, the epoch and `ctx.rng` (which knows the engine's seed, the
    name of the value and the version). The same base gives the same seeds, also in a resumed run. Two refreshes
    draw the same number with a chance of one in 2**32.

    Args:
        base: A whole number from 0 to 2**64 - 1. None: drawn from the system's entropy on the main process, once,
            and kept in checkpoints.
        per_rank: True: each rank holds a seed of its own, derived from the one that was sent. No two ranks are equal.
        apply: The global generators to seed when a value comes into force, with the seed that the rank holds: any of
            `"python"` (`random`), `"numpy"` (the legacy global one), `"torch"` (`torch.manual_seed`, which seeds the
            accelerators too) and `"cuda"` (all CUDA devices of the process).

    Workers of data loaders get seeds of their own from `syncstate.values.worker_seeds.WorkerSeeds`.

    Raises:
        ConfigError: A base out of range or a generator that is not in the list.

    Example::

        state.add("seed", Seed(base=1234, per_rank=True, apply=["torch"]), every=Every(epochs=1))
    """

    def __init__(self, base: int | None = None, *, per_rank: bool = False, apply: Iterable[str] = ()) -> None:
        self._given = base is not None
        self._base = _checked_base(base)
        if not isinstance(per_rank, bool):
            raise ConfigError(f"Seed: per_rank must be true or false, got {per_rank!r}")
        self.per_rank = per_rank
        self.generators = checked_generators("Seed", "apply", apply)

    def compute(self, ctx: Context) -> int:
        """A new seed from 0 to 2**32 - 1."""
        if self._base is None:
            self._base = secrets.randbits(64)
        # Raw bits, because what `Generator` makes of them may change with NumPy's version.
        draw = ctx.rng.bit_generator.random_raw()
        return int.from_bytes(digest_text(f"{self._base}/{ctx.step}/{ctx.epoch}/{draw}")[:4], "little")

    # Both are None where there is nothing to do, so that the engine spends nothing on it.
    @property
    def derive(self) -> Callable[[int, Context], int] | None:
        """What a rank holds, made from what main sent; None unless `per_rank`."""
        return _of_rank if self.per_rank else None

    @property
    def apply(self) -> Callable[[int, Context], None] | None:
        """Seeds the global generators; None if there are none to seed."""
        return self._seed_generators if self.generators else None

    def _seed_generators(self, value: int, ctx: Context) -> None:
        for generator in self.generators:
            SEEDERS[generator](value)

    def state_dict(self) -> dict[str, int]:
        """The base that was drawn; empty if it was given, or not drawn yet."""
        return {} if self._given or self._base is None else {"base": self._base}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a base that was drawn. A base that was given stays: the user may have changed it on purpose."""
        if not self._given and "base" in state:
            self._base = _checked_base(state["base"])


def _of_rank(value: int, ctx: Context) -> int:
    return for_rank(value, ctx.rank)


def for_rank(value: int, rank: int) -> int:
    """A seed for one rank: a bijection of 32 bits, so that ranks differ for certain instead of probably."""
    return _mix((value + rank * _STRIDE) & _MASK)


def _mix(x: int) -> int:
    """Scatter 32 bits so that neighbours do not look alike: the finalizer of MurmurHash3 (Appleby), one to one."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


# The inverses of the odd factors of `_mix` modulo 2**32.
_UNDO_FIRST, _UNDO_SECOND = pow(0x85EBCA6B, -1, 1 << 32), pow(0xC2B2AE35, -1, 1 << 32)


def undo_rank(seed: int) -> int:
    """The inverse of `for_rank` for rank 0. A shift by 13 needs a second one to undo it, for the lowest 6 bits."""
    x = ((seed ^ (seed >> 16)) * _UNDO_SECOND) & _MASK
    x = ((x ^ (x >> 13) ^ (x >> 26)) * _UNDO_FIRST) & _MASK
    return x ^ (x >> 16)


def _seed_torch(value: int) -> None:
    torch.manual_seed(value)


SEEDERS: dict[str, Callable[[int], None]] = {
    "python": random.seed,
    "numpy": np.random.seed,
    "torch": _seed_torch,
    "cuda": torch.cuda.manual_seed_all,
}


def _checked_base(base: Any) -> int | None:
    if base is None:
        return None
    try:
        number = -1 if isinstance(base, bool) else operator.index(base)
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 64:
        raise ConfigError(f"Seed: base must be a whole number from 0 to 2**64 - 1, or None to draw one, got {base!r}")
    return number


def checked_generators(owner: str, key: str, names: Any) -> tuple[str, ...]:
    """Names of global generators, each once; `owner` and `key` are named in the error."""
    known = ", ".join(SEEDERS)
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ConfigError(f"{owner}: {key} must be a list with any of {known}, got {names!r}")
    chosen = tuple(dict.fromkeys(names))
    for name in chosen:
        if name not in SEEDERS:
            raise ConfigError(f"{owner}: {key} can seed any of {known}, got {name!r}")
    return chosen
