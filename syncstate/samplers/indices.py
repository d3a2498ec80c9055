"""A shared list of indices, dealt out to the ranks."""

import math
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from syncstate.digest import digest_tensor, digest_text
from syncstate.errors import ConfigError, NotReady
from syncstate.samplers.dealing import Pass
from syncstate.samplers.reader import find_reader
from syncstate.schedule import whole
from syncstate.spec import describe
from syncstate.state import SharedState

__all__ = ["SharedIndexSampler"]


class SharedIndexSampler(DistributedSampler[int]):
    """Deals a shared list of dataset indices out to the ranks: of every `num_replicas` in a row, rank r takes the r-th.

    The shards cover the list and are disjoint, except for padding: to make them equally long, indices from the
    beginning of the list are dealt again, as `DistributedSampler` does. The list is read when the loader is
    iterated; a refresh in mid-epoch shows in the next epoch. A `DistributedSampler`, so that Lightning leaves it alone.

    To go on in mid-epoch put `state_dict()` into the checkpoint (in Lightning in `on_save_checkpoint` of the module or
    data module) and load it before the loader is iterated (in `on_load_checkpoint`). With worker processes that needs
    the number of batches trained on, which `SharedBatchSampler` finds out, also with no `names`: save and load that
    one, it saves this sampler too.

    Args:
        state: The shared state.
        name: A value that is a 1-D integer tensor or a list of whole numbers.
        num_replicas: Number of shards; None: the world size of `torch.distributed`, or 1.
        rank: Which shard is this one; None: the rank in `torch.distributed`, or 0.
        num_samples: Indices a rank in an epoch. None: as the list in force demands. A host that asks for the length
            once and keeps it (Lightning does) needs it where the length of the list changes: a shorter list is dealt
            again from its beginning, of a longer one the rest is left out.
        shuffle: Shuffle the list first, by `seed` and the epoch, alike on all ranks.
        drop_last: Leave out the end of the list instead of padding. No index is dealt twice then.
        seed: For `shuffle`; must be equal on all ranks. The generators of torch are not touched.

    Raises:
        ConfigError: An unknown value, a number out of range; while iterating, a value that is no list of indices or
            is too short for `num_samples`.
        NotReady: The length or the list is asked for before the value's first sync.

    Example::

        state.add("order", SampledIndices(len(dataset)), every=Every(epochs=1))
        loader = DataLoader(dataset, batch_size=32, sampler=SharedIndexSampler(state, "order"))
    """

    def __init__(
        self,
        state: SharedState,
        name: str,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        num_samples: int | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        # Not the constructor of DistributedSampler: it wants a length, which is not known before the first sync.
        owner = type(self).__name__
        if name not in state.names:
            raise ConfigError(f"{owner}: no shared value {name!r}; there are {', '.join(state.names) or 'none'}")
        for key, flag in (("shuffle", shuffle), ("drop_last", drop_last)):
            if not isinstance(flag, bool):
                raise ConfigError(f"{owner}: {key} must be true or false, got {flag!r}")
        self.state = state
        self.name = name
        self.shuffle = shuffle
        self.drop_last = drop_last
        # Of any size, as a shared `Seed` is; other numbers here are counts.
        self.seed = seed if type(seed) is int and seed > 0 else whole(owner, "seed", seed, 0)
        self.epoch = 0
        self._num_replicas = None if num_replicas is None else whole(owner, "num_replicas", num_replicas, 1)
        self._rank = None if rank is None else whole(owner, "rank", rank, 0)
        if self._rank is not None and self._num_replicas is not None and self._rank >= self._num_replicas:
            raise ConfigError(f"{owner}: rank must be below num_replicas={num_replicas}, got {rank}")
        self._num_samples = None if num_samples is None else whole(owner, "num_samples", num_samples, 1)
        self._pass: Pass | None = None
        self._resume: dict[str, Any] | None = None

    @classmethod
    def unsharded(
        cls,
        state: SharedState,
        name: str,
        *,
        num_samples: int | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
    ) -> "SharedIndexSampler":
        """The whole list on every rank, for hosts that deal batches out themselves, as Accelerate does."""
        return cls(
            state,
            name,
            num_replicas=1,
            rank=0,
            num_samples=num_samples,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
        )

    # Looked up when they are needed: a sampler may be made before the process group is.
    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """Number of shards."""
        return self._place()[1]

    @property
    def rank(self) -> int:  # type: ignore[override]
        """Which shard is this one."""
        return self._place()[0]

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """Indices a rank in an epoch, with the list that is in force now."""
        return len(self)

    @property
    def fixed(self) -> bool:
        """Whether `num_samples` was given, so that the length does not change with the list."""
        return self._num_samples is not None

    @property
    def total_size(self) -> int:  # type: ignore[override]
        """Indices of all ranks in an epoch, padding included."""
        return len(self) * self.num_replicas

    def __len__(self) -> int:
        if self._num_samples is not None:
            return self._num_samples
        try:
            count = len(self._indices())
        except NotReady as error:
            raise NotReady(
                f"the length of this sampler is that of a shared value. {error}. Or give the sampler num_samples=..., "
                "the indices a rank in an epoch"
            ) from None
        return self._each(count, self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        rank, replicas = self._place()
        shards = find_reader(sys._getframe(1)).shards if replicas > 1 else 1
        if shards > 1:
            raise ConfigError(
                f"{type(self).__name__}: Accelerate deals the batches out to {shards} ranks, and this sampler deals "
                f"its list out to {replicas} already; use SharedIndexSampler.unsharded, or do not prepare the loader"
            )
        origin, indices = self._begin()
        self._pass = Pass(indices, self.state.record(self.name).version, origin, replicas)
        each = self._each(self._goal(len(indices), replicas) - origin, replicas)
        dealt = torch.arange(each) * replicas + (origin + rank)
        # The remainder deals the beginning of the list again where padding is needed.
        shard = self._order(indices)[dealt % max(1, len(indices))].tolist()
        return self._pass.hand_out(shard, self._begun)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch for `shuffle`. Another epoch than the present one begins with the whole list."""
        if epoch != self.epoch:
            self._pass = self._resume = None
        super().set_epoch(epoch)

    def state_dict(self, position: int | None = None) -> dict[str, Any]:
        """The place in this epoch; plain containers and tensors.

        Args:
            position: How many indices this rank has trained on since the loader was last iterated. None: all that it
                was given, which with worker processes includes those that they fetch in advance.
        """
        current = self._pass
        if current is None:
            return dict(self._resume) if self._resume is not None else {"epoch": self.epoch, "consumed": 0}
        if position is None:
            if current.finished:
                return {"epoch": self.epoch, "consumed": 0}
            position = current.handed_out
        position = whole(type(self).__name__, "position", position, 0)
        saved: dict[str, Any] = {"epoch": self.epoch, "consumed": current.origin + position * current.num_replicas}
        if saved["consumed"]:
            saved["digest"] = digest_tensor(current.indices).hex()
        if current.version != self.state.record(self.name).version:
            # The engine's checkpoint holds the newer list; this epoch goes on with the older.
            saved["indices"] = current.indices.clone()
        return saved

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called: the next iteration deals the rest, also to another number of ranks.

        Call `set_epoch` before each epoch as usual: the saved epoch is finished, any other one is dealt whole.
        """
        missing = [key for key in ("epoch", "consumed") if key not in state]
        if missing:
            raise ConfigError(f"{type(self).__name__}: the saved state has no {' and no '.join(missing)}")
        super().set_epoch(whole(type(self).__name__, "epoch", state["epoch"], 0))
        self._pass = None
        place = whole(type(self).__name__, "consumed", state["consumed"], 0)
        self._resume = dict(state) if place or "indices" in state else None

    def _place(self) -> tuple[int, int]:
        """The shard and the number of shards."""
        rank, replicas = self._rank, self._num_replicas
        if rank is None or replicas is None:
            initialized = dist.is_available() and dist.is_initialized()
            if not initialized and os.environ.get("WORLD_SIZE", "1") != "1":
                raise ConfigError(
                    f"{type(self).__name__}: WORLD_SIZE is {os.environ['WORLD_SIZE']} but torch.distributed is not "
                    "initialized: call torch.distributed.init_process_group first, or give num_replicas and rank"
                )
            rank = rank if rank is not None else dist.get_rank() if initialized else 0
            replicas = replicas if replicas is not None else dist.get_world_size() if initialized else 1
            if rank >= replicas:
                raise ConfigError(f"{type(self).__name__}: rank must be below num_replicas={replicas}, got {rank}")
        return rank, replicas

    def _each(self, left: int, replicas: int) -> int:
        """How many indices a rank gets of so many that are left."""
        return max(0, left // replicas if self.drop_last else -(-left // replicas))

    def _goal(self, count: int, replicas: int) -> int:
        """How far into a list of `count` an epoch goes, padding apart; beyond its end where the list is dealt again."""
        if self._num_samples is None:
            return count
        total = self._num_samples * replicas
        if count == 0 or (self.drop_last and count < total):
            raise ConfigError(
                f"{type(self).__name__}: num_samples={self._num_samples} on {replicas} ranks takes {total} indices, "
                f"but value {self.name!r} ({self.state.text(self.name)}) has {count}; give a smaller num_samples or a "
                f"longer list{', or drop_last=False to deal some twice' if count else ''}"
            )
        return total

    def _indices(self) -> torch.Tensor:
        """The list in force, as int64 on the CPU."""
        value = self.state[self.name]
        try:
            indices = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            indices = torch.tensor(math.nan)
        whole_numbers = not (indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool)
        # An empty list has no type; torch makes it a float.
        if indices.dim() != 1 or not (whole_numbers or not len(indices)):
            raise ConfigError(
                f"{type(self).__name__}: value {self.name!r} must be a 1-D integer tensor or a list of whole numbers, "
                f"got {describe(value)}"
            )
        return indices.to("cpu", torch.int64)

    def _begin(self) -> tuple[int, torch.Tensor]:
        """How much of the list was consumed before, and the list."""
        saved = self._resume
        if saved is None:
            return 0, self._indices()
        if "indices" in saved:
            return saved["consumed"], saved["indices"].to("cpu")
        indices = self._indices()
        if saved["digest"] == digest_tensor(indices).hex():
            return saved["consumed"], indices
        raise ConfigError(
            f"{type(self).__name__}: the saved place is in another list than value {self.name!r} "
            f"({self.state.text(self.name)}) holds now; restore the engine's state too, before the loader is iterated"
        )

    def _begun(self) -> None:
        # Not in __iter__: a loader with workers makes two iterators where this sampler gives it whole batches, and uses
        # the second.
        self._resume = None

    def _order(self, indices: torch.Tensor) -> torch.Tensor:
        if not self.shuffle:
            return indices
        seed = int.from_bytes(digest_text(f"{self.seed}/{self.epoch}")[:8], "little")
        return indices[torch.randperm(len(indices), generator=torch.Generator().manual_seed(seed))]
