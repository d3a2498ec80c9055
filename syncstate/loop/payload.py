"""What a frame says, beside values: the next points of announced schedules, and how long the items of a scatter are."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from syncstate.errors import CodecError
from syncstate.loop.batch import Batch
from syncstate.wire.codec import Parcel, decode, encode, pack

__all__ = ["Contents", "Sealed", "item_of", "items_for", "open_payload", "seal"]

_TREE_SPARE = 64  # bytes; a tree and a region may be this much apart


class Sealed(NamedTuple):
    """What main sends.

    Attributes:
        parcel: For the frame, and the body behind it.
        items: An item for each rank, of equal length, where they do not fit into the frame.
    """

    parcel: Parcel
    items: list[torch.Tensor] | None = None


class Contents(NamedTuple):
    """What a rank received.

    Attributes:
        values: In the order of the batch.
        intervals: Steps to the next point, for each rhythm of the batch.
        item_bytes: Length of the item that follows in a scatter; 0 where there is none.
    """

    values: list[Any]
    intervals: list[int]
    item_bytes: int


def seal(batch: Batch, values: list[Any], intervals: list[int], world_size: int, room: int, pickle: bool) -> Sealed:
    """Pack what main computed.

    Args:
        batch: The batch.
        values: Its values.
        intervals: For its rhythms.
        world_size: Number of ranks.
        room: Bytes of payload that fit into the frame.
        pickle: Whether values may travel by pickle.

    Raises:
        CodecError: A value cannot travel.
    """
    if batch.bare:
        return Sealed(pack(values, allow_pickle=pickle))
    parcel = pack([values, intervals, 0], allow_pickle=pickle)
    if not batch.scattered or len(parcel.tree) + _TREE_SPARE + parcel.blob_bytes <= room:
        return Sealed(parcel)
    items = [encode([values[i][rank] for i in batch.scattered], allow_pickle=pickle) for rank in range(world_size)]
    longest = max(map(len, items)) + 8
    kept = [None if index in batch.scattered else value for index, value in enumerate(values)]
    return Sealed(pack([kept, intervals, longest], allow_pickle=pickle), [_padded(item, longest) for item in items])


def _padded(item: bytes, nbytes: int) -> torch.Tensor:
    """The length of an item, and the item: the backend scatters equal lengths only."""
    padded = bytearray(nbytes)
    padded[:8] = len(item).to_bytes(8, "little")
    padded[8 : 8 + len(item)] = item
    return torch.frombuffer(padded, dtype=torch.uint8)


def item_of(padded: torch.Tensor, batch: Batch, pickle: bool) -> list[Any]:
    """The values that one rank gets: one for each scattered entry."""
    view = padded.numpy().data
    length = int.from_bytes(view[:8], "little")
    if length > len(view) - 8:
        raise CodecError(f"received an item of {length} bytes in {len(view) - 8}")
    values = decode(view[8 : 8 + length], allow_pickle=pickle)
    if type(values) is not list or len(values) != len(batch.scattered):
        raise CodecError(f"{batch.label}: received something else than {len(batch.scattered)} items")
    return values


def open_payload(batch: Batch, parts: Any, max_bytes: int) -> Contents:
    """What main sealed, checked.

    Raises:
        CodecError: Something else.
    """
    if batch.bare and type(parts) is list and len(parts) == len(batch.entries):
        return Contents(parts, [], 0)
    if batch.bare:
        values, intervals, item_bytes = parts, [], 0
    elif type(parts) is list and len(parts) == 3:
        values, intervals, item_bytes = parts
    else:
        raise CodecError(f"{batch.label}: received something else than values and what belongs to them")
    if type(values) is not list or len(values) != len(batch.entries):
        raise CodecError(f"{batch.label}: received something else than {len(batch.names)} values")
    if type(intervals) is not list or len(intervals) != len(batch.rhythms) or {*map(type, intervals)} - {int}:
        raise CodecError(f"{batch.label}: received something else than {len(batch.rhythms)} next points")
    if type(item_bytes) is not int or not 0 <= item_bytes <= max_bytes + 4096:
        raise CodecError(f"{batch.label}: received impossible items of {item_bytes} bytes, max_bytes is {max_bytes}")
    return Contents(values, intervals, item_bytes)


def items_for(rank: int, batch: Batch, values: Sequence[Any]) -> list[Any]:
    """The values that a rank holds, of which it gets an item each where they are scattered."""
    return [value[rank] if index in batch.scattered else value for index, value in enumerate(values)]
