"""The training process's side: batches of indices, stamped with the values in force."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.utils.data import BatchSampler, Sampler

from syncstate.errors import ConfigError
from syncstate.samplers.indices import SharedIndexSampler
from syncstate.samplers.reader import find_reader
from syncstate.samplers.saved import beginning, check, history, saved
from syncstate.samplers.sharding import check_sharded, stays_itself
from syncstate.samplers.walk import History, Walk
from syncstate.schedule import whole
from syncstate.state import SharedState
from syncstate.wire.codec import encode

if TYPE_CHECKING:
    from typing import Self

__all__ = ["SharedBatchSampler"]


@stays_itself
class SharedBatchSampler(Sampler[list[Any]]):
    """Stamps the indices of each batch with values in force when the batch is drawn; `SharedDataset` hands them on.

    A `DataLoader` draws `ahead = num_workers * prefetch_factor` batches (0 without workers) when it is iterated, and
    then one each time it hands one on. So batch k of an epoch, counted from 0, is drawn when batch k - ahead is
    fetched, and carries the values in force then: after the step of batch k - ahead - 1, if each batch is a step. This
    depends on counts alone, so it is the same on every rank that has as many workers, and in every run. How fast a
    worker or a rank is does not matter, unless the loader has `in_order=False`.

    The batches themselves are those of `batch_sampler`; this class neither shards nor shuffles. Its other attributes
    (`batch_size`, `drop_last`, `sampler`) can be read here too. A resumed run repeats batches and stamps as they were,
    if its loader has as many workers as before.

    - Lightning: put a `SharedIndexSampler` or a `DistributedSampler` into `batch_sampler`, which then stays as it is,
      whatever `use_distributed_sampler` says. Save the state in `on_save_checkpoint` of the module or data module, and
      load it in `on_load_checkpoint`, before the loader is iterated.
    - Accelerate: prepare the loader as usual, with `SharedIndexSampler.unsharded` or any sampler below. One batch
      more is drawn in advance, and the batches of a round, one for each rank, carry the same values. To resume in
      mid-epoch load the state and use `accelerate.skip_first_batches`, as the `Trainer` of Transformers does by itself.

    The values travel to the worker once a batch, encoded. That costs microseconds for numbers and texts; a tensor of
    many megabytes is copied for each batch: rather let the worker compute it from something small.

    Args:
        batch_sampler: Yields lists of indices, the same in each run with the same epoch. Indices are whole numbers,
            strings or tuples, which any dataset takes stamped as they are, or anything else, for `SharedDataset` only.
        state: The shared state.
        names: The values to stamp: their names, or one name. May be empty, to be able to resume in mid-epoch only.
        sampler: What Lightning gives where it wants to shard, see above. Not for users.

    Attributes:
        batch_sampler, state: As given.
        names: A tuple.

    Raises:
        ConfigError: An unknown value or no batch sampler; in Lightning, an unsharded one on several ranks.
        NotReady: While iterating, a value is not in force yet.

    Example::

        batches = SharedBatchSampler(BatchSampler(SharedIndexSampler(state, "order"), 32, False), state, ["max_len"])
        loader = DataLoader(SharedDataset(dataset), batch_sampler=batches, collate_fn=collate, num_workers=4)
    """

    def __new__(cls, *args: Any, sampler: Any = None, **options: Any) -> "Self":
        """Lightning makes batch samplers anew around a sampler of its own; this one stays itself, with its state."""
        if sampler is not None and args and isinstance(args[0], cls):
            return args[0]
        return super().__new__(cls)

    def __init__(
        self, batch_sampler: Iterable[Any], state: SharedState, names: Iterable[str] | str, *, sampler: Any = None
    ) -> None:
        if batch_sampler is self:
            check_sharded(self.batch_sampler, sampler)
            return
        owner = type(self).__name__
        if sampler is not None:
            raise ConfigError(f"{owner}: sampler is for Lightning; give batch_sampler the sampler to draw from")
        if not isinstance(batch_sampler, Iterable) or isinstance(batch_sampler, SharedBatchSampler):
            raise ConfigError(
                f"{owner}: batch_sampler must yield lists of indices, as torch.utils.data.BatchSampler does, and not "
                f"stamped ones, got {type(batch_sampler).__name__}"
            )
        if not isinstance(state, SharedState):
            raise ConfigError(f"{owner}: state must be a SharedState, got {state!r}")
        self.batch_sampler: Any = batch_sampler
        self.state = state
        self.names = (names,) if isinstance(names, str) else tuple(names)
        unknown = [name for name in self.names if name not in state.names]
        if unknown:
            raise ConfigError(f"{owner}: no shared value {unknown[0]!r}; there are {', '.join(state.names) or 'none'}")
        self._epoch, self._told = 0, False
        self._walk: Walk | None = None
        self._resume: dict[str, Any] | None = None
        self._values: list[Any] = []
        self._packed = b""

    def __len__(self) -> int:
        """Batches in an epoch, also in one that is resumed."""
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[list[Any]]:
        return _Draws(self)

    @property
    def sampler(self) -> Any:
        """The sampler inside of `batch_sampler`; hosts read it, tell it the epoch, and may put another in its place."""
        return self.batch_sampler.sampler

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    def __getattr__(self, name: str) -> Any:
        # While this object is being unpickled, there is no batch sampler yet. Lightning's marks are not inherited.
        if name == "batch_sampler" or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.batch_sampler, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_walk": None}  # which is at work in this process

    # Epochs

    @property
    def epoch(self) -> int:
        """The epoch, as the samplers below know it if they do."""
        known = [getattr(each, "epoch", None) for each in self._below()]
        return next((epoch for epoch in known if isinstance(epoch, int)), self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, also of the samplers below. Another than the present one begins with its first batch."""
        self._told = True
        self._turn(epoch)

    def _turn(self, epoch: int) -> None:
        self._epoch = epoch
        for each in self._below():
            if callable(set_epoch := getattr(each, "set_epoch", None)):
                set_epoch(epoch)

    def _below(self) -> list[Any]:
        inner = getattr(self.batch_sampler, "sampler", None)
        return [self.batch_sampler] if inner is None else [inner, self.batch_sampler]

    # Checkpoints

    def state_dict(self, position: int | None = None) -> dict[str, Any]:
        """The place in this epoch and the stamps of batches that were drawn but not trained on; local.

        Args:
            position: How many batches this rank has trained on since the loader was last iterated. None: as many as a
                `DataLoader` has handed on. Under Accelerate, which fetches ahead and skips batches by itself when it
                resumes, None saves no place but the stamps of all batches that may be in flight.

        Returns:
            Plain containers and tensors; the stamps are encoded as in the engine's own state.

        Raises:
            ConfigError: A position beyond what was drawn, or so far behind that the stamps are forgotten.
        """
        walk, owner = self._walk, type(self).__name__
        if walk is None or walk.epoch_now != self.epoch:
            if self._resume is not None and self._resume["epoch"] == self.epoch:
                return dict(self._resume)
            return beginning(self.epoch)
        trained = None if walk.reader.host else walk.trained()
        if position is not None:
            trained = whole(owner, "position", position, 0)
            if trained > walk.batches or not walk.history.knows(walk.base + trained):
                raise ConfigError(
                    f"{owner}: position must be the number of batches trained on since the loader was iterated, got "
                    f"{position} where {walk.batches} were drawn"
                )
        elif walk.ended and trained == walk.batches and not (self._told or self.epoch):
            return beginning(self.epoch)  # nobody says which epoch comes next, so it is this one again
        state = saved(walk.epoch, None if trained is None else walk.base + trained, walk.history)
        indexed = self._indexed()
        if indexed is not None:
            given = (trained or 0) * self.batch_sampler.batch_size
            state["sampler"] = indexed.state_dict(position=min(given, walk.indices))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called: the next iteration begins there, and repeats the stamps drawn before.

        A `SharedIndexSampler` in a `BatchSampler` is restored too; of other samplers, the batches that were trained on
        are drawn once more and left out. Call `set_epoch` before each epoch as usual.

        Raises:
            ConfigError: No state of such a sampler, or one with other values.
        """
        check(type(self).__name__, state, self.names, self.state.allow_pickle)
        self._walk, self._resume = None, dict(state)
        self._turn(state["epoch"])
        indexed = self._indexed()
        if indexed is not None and "sampler" in state:
            indexed.load_state_dict(state["sampler"])

    def _indexed(self) -> SharedIndexSampler | None:
        """The sampler below, if it can be saved and its indices are dealt in batches of one size."""
        inner = getattr(self.batch_sampler, "sampler", None)
        return inner if type(self.batch_sampler) is BatchSampler and isinstance(inner, SharedIndexSampler) else None

    # Drawing

    def _begin(self, frame: FrameType | None) -> Walk:
        resume, self._resume = self._resume, None
        source = iter(self.batch_sampler)
        base, stamps = 0, History()
        if resume is not None and resume["epoch"] == self.epoch:
            base = resume["batches"] or 0
            stamps = history(resume)
            if "sampler" not in resume or self._indexed() is None:
                self._skip(source, base)
        replicas = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self._walk = Walk(self.epoch, base, source, stamps, find_reader(frame), replicas)
        return self._walk

    def _skip(self, source: Iterator[Any], count: int) -> None:
        for number in range(count):
            if next(source, None) is None:
                raise ConfigError(
                    f"{type(self).__name__}: the saved place is batch {count} of epoch {self.epoch}, but batch_sampler "
                    f"has only {number} there"
                )

    def _live(self) -> bytes:
        """The values in force, encoded once for each set of them."""
        values = [self.state[name] for name in self.names]
        if not self._packed or any(new is not old for new, old in zip(values, self._values, strict=True)):
            self._packed = encode(dict(zip(self.names, values, strict=True)), allow_pickle=self.state.allow_pickle)
            self._values = values
        return self._packed


class _Draws(Iterator[list[Any]]):
    """Begins when the first batch is asked for: a loader with workers makes two of these and uses one."""

    def __init__(self, owner: SharedBatchSampler) -> None:
        self._owner = owner
        self._walk: Walk | None = None

    def __next__(self) -> list[Any]:
        owner = self._owner
        if self._walk is None:
            self._walk = owner._begin(sys._getframe(1))
        try:
            return self._walk.draw(owner._live, owner.state.allow_pickle)
        finally:
            self._walk.epoch_now = owner.epoch
