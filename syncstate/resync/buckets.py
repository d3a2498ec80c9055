"""Many tensors in few messages: packed into buckets of one size, of which two are on their way at a time."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from syncstate.resync.bits import aligned, parts
from syncstate.resync.line import Line

__all__ = ["Bucket", "Piece", "Pool", "broadcast", "fill", "reduce"]


class Piece(NamedTuple):
    """A part of a tensor in a bucket.

    Attributes:
        key: The tensor's number.
        offset: Where it begins in the bucket, in bytes.
        view: The part itself.
    """

    key: int
    offset: int
    view: Tensor


class Bucket(NamedTuple):
    """What travels in one message.

    Attributes:
        pieces: One after another.
        size: Bytes.
        dtype: What lies in it.
        device: Where it lies: `"cpu"` or a kind of accelerator.
    """

    pieces: list[Piece]
    size: int
    dtype: torch.dtype
    device: torch.device


class Pool:
    """Memory for the two buckets that are on their way, kept from one resync to the next: fresh memory is slow."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, str], Tensor] = {}

    def take(self, number: int, bucket: Bucket) -> Tensor:
        """The memory of bucket `number`, as elements of the bucket's type. That of the last but one is used again."""
        key = (number % 2, bucket.device.type)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < bucket.size:
            self._buffers.pop(key, None)
            buffer = self._buffers[key] = torch.empty(bucket.size, dtype=torch.uint8, device=bucket.device)
        return buffer[: bucket.size].view(bucket.dtype)


def fill(views: Iterable[tuple[int, Tensor]], limit: int, device: torch.device, dtype: torch.dtype) -> list[Bucket]:
    """Lay tensors into buckets.

    Args:
        views: Number -> tensor, in the same order and shapes on all ranks; none is empty.
        limit: Most bytes of a bucket.
        device: Where the buckets lie.
        dtype: What they hold: uint8 for bits as they are, or the type that elements are converted to.
    """
    limit = max(16, limit // 16 * 16)
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    room = limit
    for key, view in views:
        width = view.element_size() if dtype is torch.uint8 else dtype.itemsize
        for number, found in enumerate(parts(view, room, limit, width)):
            if number and pieces:
                buckets.append(Bucket(pieces, limit - room, dtype, device))
            if number:
                pieces, room = [], limit
            for part in found:
                pieces.append(Piece(key, limit - room, part))
                room -= aligned(part.numel() * width)
    if pieces:
        buckets.append(Bucket(pieces, limit - room, dtype, device))
    return buckets


def inside(buffer: Tensor, piece: Piece) -> Tensor:
    """The place of a piece in its bucket, in its shape; in its type where the bucket holds bits as they are."""
    view = piece.view
    begin = piece.offset // buffer.element_size()
    if buffer.dtype is torch.uint8:
        part = buffer.narrow(0, begin, view.nbytes).view(view.dtype)
    else:
        part = buffer.narrow(0, begin, view.numel())
    return part if view.ndim == 1 else part.view(view.shape)


def _pack(buffer: Tensor, bucket: Bucket) -> None:
    for piece in bucket.pieces:
        inside(buffer, piece).copy_(piece.view)


def broadcast(
    line: Line, buckets: Sequence[tuple[int, Bucket]], pool: Pool, take: Callable[[int, Tensor, Tensor], None]
) -> None:
    """Send buckets, each from a rank of its own, and hand over what comes. Collective.

    Args:
        line: How they travel.
        buckets: Who sends, and what.
        pool: Memory.
        take: Gets the number of a tensor, the view of a part of it, and what came for that part. Not called on the
            rank that sends.
    """
    rank = line.topology.rank
    flying: deque[Callable[[], None]] = deque()
    for number, (root, bucket) in enumerate(buckets):
        if len(flying) == 2:
            flying.popleft()()
        buffer = pool.take(number, bucket)
        if rank == root:
            _pack(buffer, bucket)
        operation = line.begin_broadcast(buffer, root)

        def arrive(
            operation: object = operation, buffer: Tensor = buffer, root: int = root, bucket: Bucket = bucket
        ) -> None:
            line.finish(operation)
            if rank != root:
                for piece in bucket.pieces:
                    take(piece.key, piece.view, inside(buffer, piece))

        flying.append(arrive)
    while flying:
        flying.popleft()()


def reduce(line: Line, buckets: Sequence[Bucket], pool: Pool, take: Callable[[int, Tensor, Tensor], None]) -> None:
    """Sum buckets over all ranks, and hand over the sums. Collective.

    Args:
        line: How they travel.
        buckets: What.
        pool: Memory.
        take: Gets the number of a tensor, the view of a part of it, and the sum for it, which it may change.
    """
    flying: deque[Callable[[], None]] = deque()
    for number, bucket in enumerate(buckets):
        if len(flying) == 2:
            flying.popleft()()
        buffer = pool.take(number, bucket)
        _pack(buffer, bucket)
        operation = line.begin_all_reduce(buffer)

        def arrive(operation: object = operation, buffer: Tensor = buffer, bucket: Bucket = bucket) -> None:
            line.finish(operation)
            for piece in bucket.pieces:
                take(piece.key, piece.view, inside(buffer, piece))

        flying.append(arrive)
    while flying:
        flying.popleft()()
