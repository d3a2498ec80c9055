"""Seeds for the workers of data loaders: another one for each worker of each rank."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch.distributed as dist

from syncstate.errors import ConfigError, NotReady
from syncstate.schedule import whole
from syncstate.values.seed import SEEDERS, checked_generators, for_rank, undo_rank

__all__ = ["WorkerSeeds", "worker_seed"]

# Ranks and workers share 32 bits: so many ranks, and 4095 workers on each.
_RANKS = 1 << 20
_WORKERS = (1 << 12) - 1


def worker_seed(seed: int, worker_id: int, rank: int = 0) -> int:
    """The seed of one worker: from 0 to 2**32 - 1, valid for python, numpy and torch.

    For certain, no two workers of all ranks get the same, and none gets that of a rank: the place of a worker among all
    is added to the seed before the bits are mixed, one to one.

    Args:
        seed: What the rank holds of a `Seed`.
        worker_id: The worker's number in its loader, below 4095.
        rank: With a seed that all ranks share: this rank, below 2**20. With `Seed(per_rank=True)` leave it out, because
            the ranks' seeds differ already.

    Raises:
        ConfigError: A number out of range.
    """
    seed = whole("worker_seed", "seed", seed, 0)
    worker_id, rank = whole("worker_seed", "worker_id", worker_id, 0), whole("worker_seed", "rank", rank, 0)
    for key, given, limit in (("seed", seed, 1 << 32), ("worker_id", worker_id, _WORKERS), ("rank", rank, _RANKS)):
        if given >= limit:
            raise ConfigError(f"worker_seed: {key} must be below {limit}, got {given}")
    return for_rank(undo_rank(seed), rank + (worker_id + 1) * _RANKS)


class WorkerSeeds:
    """Seeds the global generators of each worker of a loader: its `worker_init_fn`.

    Workers draw crops and noise from global generators, which PyTorch seeds from the main process's; where that was
    seeded alike on all ranks, the ranks' workers draw alike. With this each draws its own, known from the shared seed.
    The seed is the one in force when the loader's iterator is made; workers that persist keep theirs over epochs.

    Args:
        seed: The handle that `state.add` returned for a `Seed`, or a function that returns the number.
        rank: This rank, with a seed that all ranks share. None: of the default process group, 0 without one.
        generators: Which to seed: any of `"python"`, `"numpy"`, `"torch"`.

    Raises:
        ConfigError: No such handle, or an unknown generator.

    Example::

        seed = state.add("seed", Seed(base=0), every=Every(epochs=1))
        loader = DataLoader(dataset, num_workers=4, worker_init_fn=WorkerSeeds(seed))
    """

    def __init__(
        self,
        seed: Any,
        *,
        rank: int | None = None,
        generators: Iterable[str] = ("python", "numpy", "torch"),
    ) -> None:
        if not callable(seed) and not hasattr(seed, "value"):
            raise ConfigError(f"WorkerSeeds: seed must be the handle of a Seed or a function, got {seed!r}")
        self._seed = seed
        self._rank = rank
        self.generators = checked_generators("WorkerSeeds", "generators", generators)

    def __call__(self, worker_id: int) -> None:
        """Seed the worker that this runs in."""
        seed, rank = self._now()
        for generator in self.generators:
            SEEDERS[generator](worker_seed(seed, worker_id, rank))

    def _now(self) -> tuple[int, int]:
        rank = self._rank
        if rank is None:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        return self._seed.value if hasattr(self._seed, "value") else self._seed(), rank

    def __getstate__(self) -> dict[str, Any]:
        # A loader pickles this when it spawns its workers: there and then the seed is read, and no state travels along.
        try:
            seed, rank = self._now()
        except NotReady:  # pickled before training, with the loader
            return dict(self.__dict__)
        return {**self.__dict__, "_seed": _Known(seed), "_rank": rank}


class _Known(NamedTuple):
    value: int
