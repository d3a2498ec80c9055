"""Tensors and values come from the ranks that have the right ones, and every rank notes by how much its own differ."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from syncstate.errors import MismatchError
from syncstate.resync.bits import EQUAL, difference
from syncstate.resync.buckets import Bucket, Pool, broadcast, fill
from syncstate.resync.items import Item, parse_about, writable
from syncstate.resync.line import Line
from syncstate.resync.optimizer import make
from syncstate.wire import decode, encode

__all__ = ["Transfer", "device_of", "with_memory"]

_CPU = torch.device("cpu")


class Transfer:
    """Brings items from their sources to all ranks.

    Args:
        line: The ranks.
        items: All items, in the order that all ranks share.
        lacking: Rank -> names of what its optimizer lacks.
        bucket_bytes: Most bytes of a message.
        pool: Memory.
        writes: Whether this rank takes over what differs, or only looks at it.

    Attributes:
        apart: Number of an item -> the largest difference of this rank's from the source's, or `EQUAL`.
    """

    def __init__(
        self,
        line: Line,
        items: Sequence[Item],
        lacking: Mapping[int, set[str]],
        bucket_bytes: int,
        pool: Pool,
        *,
        writes: bool,
    ) -> None:
        self.apart: dict[int, float] = {}
        self._line = line
        self._items = items
        self._lacking = lacking
        self._limit = bucket_bytes
        self._pool = pool
        self._writes = writes

    def run(self, roots: Mapping[int, int]) -> None:
        """Bring items; collective.

        Args:
            roots: Number of an item -> the rank whose it is.

        Raises:
            SyncStateError: A rank failed, died or did not come in time.
        """
        self.apart.update(dict.fromkeys(roots, EQUAL))
        values: dict[int, list[int]] = {}
        tensors: dict[int, list[int]] = {}
        for number, root in roots.items():
            item = self._items[number]
            if item.is_value:
                values.setdefault(root, []).append(number)
            elif item.name in self._lacking.get(root, ()):
                self._drop(number)
            elif item.travels:
                tensors.setdefault(root, []).append(number)
        for root in sorted(values):
            self._bring_values(values[root], root)
        buckets = [(root, bucket) for root in sorted(tensors) for bucket in self._buckets(tensors[root])]
        broadcast(self._line, buckets, self._pool, self._take)

    def _drop(self, number: int) -> None:
        item = self._items[number]
        if not item.absent:
            self.apart[number] = math.inf
            if self._writes and item.slot is not None:
                item.slot.drop()

    def _bring_values(self, numbers: Sequence[int], root: int) -> None:
        mine = [self._items[number].data for number in numbers]
        sends = self._line.topology.rank == root
        came = decode(self._line.hand_round(encode(mine) if sends else None, root))
        for number, own, data in zip(numbers, mine, came, strict=True):
            if own != data:
                self.apart[number] = _apart(own, data)
                if self._writes:
                    self._items[number].set_value(data)

    def _buckets(self, numbers: Sequence[int]) -> Iterator[Bucket]:
        views: dict[str, list[tuple[int, Tensor]]] = {}
        devices = {"cpu": _CPU}
        for number in numbers:
            item = self._items[number]
            if item.absent:
                self.apart[number] = math.inf
                if self._writes:
                    make(item)
            device = device_of(item)
            devices.setdefault(device.type, device)
            views.setdefault(device.type, []).append((number, self._view(item)))
        for kind in sorted(views):
            device = devices[kind] if self._line.carries(devices[kind]) else _CPU
            yield from fill(views[kind], self._limit, device, torch.uint8)

    def _view(self, item: Item) -> Tensor:
        if not item.absent:
            return item.bits()
        dtype, shape, _ = parse_about(item.about)
        return Item("", "", tensor=torch.empty(shape, dtype=dtype, device="meta")).bits()

    def _take(self, number: int, view: Tensor, came: Tensor) -> None:
        """What came for a part of a tensor."""
        if view.is_meta:
            return
        came, item = came.to(view.device), self._items[number]
        dtype = parse_about(item.about)[0] if item.tensor is None else item.tensor.dtype
        apart = difference(view, came, dtype)
        if apart == EQUAL:
            return
        self.apart[number] = max(self.apart[number], apart)
        if self._writes:
            write(item.name, view, came, self._line.topology.rank)


def write(name: str, view: Tensor, came: Tensor, rank: int) -> None:
    """Copy into a view in place, also where several of its elements share a place in memory."""
    target, source = writable(view, came)
    target.copy_(source)
    if target is not view and not torch.equal(view, came):
        raise MismatchError(
            f"resync: {name!r} is an expanded tensor on rank {rank}, whose elements share their memory, and what comes "
            "for them is not all equal; store a tensor with memory of its own"
        )


def _apart(own: bytes | None, data: bytes | None) -> float:
    """The difference of two plain values, if they are numbers."""
    if own is None or data is None:
        return math.inf
    a, b = decode(own), decode(data)
    if type(a) not in (int, float) or type(b) not in (int, float):
        return math.inf
    apart = abs(a - b)
    return math.inf if math.isnan(apart) else float(apart)


def device_of(item: Item) -> torch.device:
    """Where a tensor lies, or would lie on this rank."""
    if item.tensor is not None:
        return item.tensor.device
    if item.slot is None or parse_about(item.about)[2] == "cpu":
        return _CPU
    return item.slot.device


def with_memory(items: Sequence[Item]) -> list[int]:
    """Numbers of all items that have something to bring."""
    return [number for number, item in enumerate(items) if item.travels]
