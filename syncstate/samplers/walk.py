"""One walk through the batches of an epoch: what each was stamped with, and how far the training has come."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from syncstate.errors import ConfigError
from syncstate.samplers.reader import Reader
from syncstate.samplers.stamps import Stamp, stamp_indices

__all__ = ["History", "Walk"]


_SPARE = 64  # batches that are remembered beyond those that can be in flight, for who saves a place further back


class History:
    """Which batches of an epoch carry which values: encoded values, each from a batch number on.

    Attributes:
        drawn: How many batches of the epoch have a stamp.
    """

    def __init__(self, drawn: int = 0, stamps: Iterable[tuple[int, bytes]] = ()) -> None:
        self.drawn = drawn
        pairs = list(stamps)
        self._starts = [start for start, _ in pairs]
        self._packed = [packed for _, packed in pairs]

    def add(self, packed: bytes) -> None:
        """One batch more."""
        if not self._packed or self._packed[-1] != packed:
            self._starts.append(self.drawn)
            self._packed.append(packed)
        self.drawn += 1

    def forget(self, before: int) -> None:
        """Let go of what only batches before a number carry: values can be large, and epochs long."""
        while len(self._starts) > 1 and self._starts[1] <= before:
            del self._starts[0], self._packed[0]

    def knows(self, number: int) -> bool:
        """Whether the stamps from a batch on are still there."""
        return number >= self.drawn or number >= self._starts[0]

    def at(self, number: int) -> bytes:
        """The values of a batch; those of the earliest one that is known for a batch before it."""
        return self._packed[max(0, bisect_right(self._starts, number) - 1)]

    def since(self, number: int | None) -> list[tuple[int, bytes]]:
        """The stamps of the batches from a number on; None: of all."""
        if number is None:
            return list(zip(self._starts, self._packed, strict=True))
        if number >= self.drawn:
            return []
        first = max(0, bisect_right(self._starts, number) - 1)
        starts = [max(number, self._starts[first]), *self._starts[first + 1 :]]
        return list(zip(starts, self._packed[first:], strict=True))


class Walk:
    """The walk itself.

    Attributes:
        epoch: The epoch of its batches.
        epoch_now: What the samplers below called the epoch when they were last asked; some turn to the next by
            themselves when they have given all they have.
        base: The number of its first batch in the epoch; not 0 where an earlier run had trained on those before.
        reader: Who draws.
        history: The stamps of the epoch.
        batches, indices: How many were handed out.
        ended: Whether there are no more.
    """

    def __init__(
        self, epoch: int, base: int, source: Iterator[Any], history: History, reader: Reader, replicas: int
    ) -> None:
        self.epoch = self.epoch_now = epoch
        self.base = base
        self.reader = reader
        self.history = history
        self.batches = self.indices = 0
        self.ended = False
        self._attempts = 0
        self._source = source
        self._last = Stamp(b"")
        # Accelerate pads its last round with indices from the first batches of all ranks. Their stamps are kept here,
        # to carry then what the other batches of the last round carry; otherwise ranks would differ.
        self._first: list[Stamp] = []
        self._kept = replicas if reader.host else 0
        # In flight: those drawn ahead, one that is trained on, one that a host looks ahead; of each rank, if it shards.
        self._span = (reader.ahead + 2) * (replicas if reader.host else 1) + _SPARE

    def draw(self, live: Callable[[], bytes], allow_pickle: bool) -> list[Any]:
        """The next batch, each index with its stamp.

        Args:
            live: Gives the encoded values in force now; not asked where an earlier run has drawn this batch already.
            allow_pickle: As for `SharedState`.
        """
        self._attempts += 1
        try:
            batch = next(self._source)
        except StopIteration:
            self._end()
            raise
        number = self.base + self.batches
        if number >= self.history.drawn:
            self.history.add(live())
            self.history.forget(number - self._span)
        # One for each batch, with or without workers: what a dataset does to a value stays in its batch.
        self._last = Stamp(self.history.at(number), allow_pickle)
        if len(self._first) < self._kept:
            self._first.append(self._last)
        stamped = stamp_indices(_indices(batch), self._last)
        self.batches += 1
        self.indices += len(stamped)
        return stamped

    def _end(self) -> None:
        if not self.ended and self.batches:
            for stamp in self._first:
                stamp.replace(self._last.packed)
        self.ended = True

    def trained(self) -> int:
        """How many batches of this walk the loader has handed on."""
        # With each batch that it hands on, a loader draws one more, or finds that there are no more.
        return min(self.batches, max(0, self._attempts - self.reader.ahead))


def _indices(batch: Any) -> Iterable[Any]:
    if isinstance(batch, Iterable) and not isinstance(batch, str | bytes):
        return batch
    raise ConfigError(
        f"SharedBatchSampler: batch_sampler must yield lists of indices, got {batch!r}; put a sampler of single "
        "indices into torch.utils.data.BatchSampler(sampler, batch_size, drop_last) first"
    )
