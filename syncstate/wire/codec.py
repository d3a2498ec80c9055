"""Values to bytes and back, without pickle.

A value becomes a tree in msgpack and, beside it, the bits of its larger tensors and arrays, uncopied. `vocabulary` says
which types there are and how the tree tells them apart.

Bytes from elsewhere can only make a value or a `CodecError`. Decoding runs no code (unless pickle is allowed) and
takes less than 128 bytes of memory for each byte given, plus 1 MiB: the lengths that the tree claims are checked
against the bytes that are there before anything is made of them.
"""

import struct
from typing import Any

import torch

from syncstate.errors import CodecError
from syncstate.wire.packing import Packing
from syncstate.wire.refusals import explain
from syncstate.wire.shelf import Shelf
from syncstate.wire.unpacking import unpack_tree
from syncstate.wire.vocabulary import ALIGNMENT, ATOMS, CONTAINERS, INLINE_BYTES, MAX_DEPTH, NEVER, aligned, check_types

__all__ = ["ALIGNMENT", "INLINE_BYTES", "MAX_DEPTH", "Parcel", "decode", "encode", "pack", "unpack", "write_blobs"]

_PREFIX = struct.Struct("<4sIQ")  # magic and version, zero, length of the tree
_MAGIC = b"SSV1"
_WORD = 16  # bytes; no dtype needs a larger alignment


class Parcel:
    """An encoded value: `tree`, and `blobs`, the flat uint8 bits that lie beside it.

    Attributes:
        tree: the msgpack bytes.
        blobs: 1-D contiguous uint8 CPU tensors; they alias the value where its memory was contiguous.
        offsets: where each blob starts in the region, multiples of 64.
        blob_bytes: the length of the region; 0 without blobs.
    """

    __slots__ = ("blob_bytes", "blobs", "offsets", "tree")

    def __init__(self, tree: bytes, blobs: list[torch.Tensor]) -> None:
        self.tree = tree
        self.blobs = blobs
        self.offsets: list[int] = []
        self.blob_bytes = 0
        for blob in blobs:
            start = aligned(self.blob_bytes)
            self.offsets.append(start)
            self.blob_bytes = start + blob.numel()


def encode(value: Any, *, allow_pickle: bool = False) -> bytes:
    """Returns `value` as bytes for `decode`.

    Args:
        value: any nesting of None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset,
            `pathlib.Path`, NumPy arrays and scalars, and tensors.
        allow_pickle: pickle what else is found. Only for bytes that come from a trusted place.

    Raises:
        CodecError: part of the value cannot travel; names the part, its type and what is allowed.
    """
    parcel = pack(value, allow_pickle=allow_pickle)
    pieces: list[Any] = [_PREFIX.pack(_MAGIC, 0, len(parcel.tree)), parcel.tree]
    start = end = aligned(_PREFIX.size + len(parcel.tree))
    if parcel.blobs:
        pieces.append(bytes(start - _PREFIX.size - len(parcel.tree)))
    for blob, offset in zip(parcel.blobs, parcel.offsets, strict=True):
        pieces += bytes(start + offset - end), blob.numpy().data
        end = start + offset + blob.numel()
    return b"".join(pieces)


def decode(data: bytes | bytearray | memoryview, *, allow_pickle: bool = False) -> Any:
    """Returns the value that `encode` turned into `data`, in memory of its own.

    Args:
        data: what `encode` returned.
        allow_pickle: also load pickles, which can run any code. Only for bytes that come from a trusted place.

    Raises:
        CodecError: the bytes are no value.
    """
    try:
        view = memoryview(data).cast("B")
        magic, zero, length = _PREFIX.unpack_from(view)
    except (TypeError, ValueError, struct.error) as error:
        raise CodecError(f"cannot decode: not bytes that encode() wrote ({error})") from error
    end = _PREFIX.size + length
    if magic != _MAGIC or zero or end > len(view) or end < len(view) <= aligned(end):
        raise CodecError(f"cannot decode {len(view)} bytes: not what encode() wrote, cut off, or with more behind it")
    region = view[aligned(end) :] if end < len(view) else None
    return unpack_tree(view[_PREFIX.size : end], region, True, allow_pickle)


def pack(value: Any, *, allow_pickle: bool = False) -> Parcel:
    """Returns `value` as a tree and the blobs beside it. Arguments and errors as for `encode`."""
    packing = Packing(allow_pickle)
    try:
        kind = type(value)
        if kind in CONTAINERS:
            check_types(value, 1, allow_pickle)
        elif kind not in ATOMS and (not allow_pickle or kind in NEVER):
            raise CodecError("a type that cannot travel")
        tree = packing.tree(value)
    except Exception as error:  # whatever a value does when it is looked at, the caller gets one kind of error
        raise explain(value, error, Packing(allow_pickle).probe, MAX_DEPTH) from error
    return Parcel(tree, packing.blobs)


def write_blobs(parcel: Parcel, into: torch.Tensor) -> None:
    """Copies the blobs of a parcel to their offsets in `into`, a 1-D uint8 tensor of at least `blob_bytes`."""
    for blob, offset in zip(parcel.blobs, parcel.offsets, strict=True):
        into.narrow(0, offset, blob.numel()).copy_(blob)


def unpack(
    tree: bytes | memoryview,
    region: torch.Tensor | None,
    *,
    copy: bool,
    allow_pickle: bool = False,
    shelf: Shelf | None = None,
) -> Any:
    """Returns the value of a tree and its blobs.

    Args:
        tree: `Parcel.tree`.
        region: the `blob_bytes` bytes of the blobs, a 1-D contiguous uint8 CPU tensor; None without blobs.
        copy: True gives every tensor and array memory of its own; False makes those that lie in the region views of it.
        allow_pickle: as for `decode`.
        shelf: where small tensors may lie ready.

    Raises:
        CodecError: the bytes are no value.
    """
    if region is None:
        return unpack_tree(tree, None, copy, allow_pickle, shelf)
    if region.dtype is not torch.uint8 or region.dim() != 1 or not region.is_contiguous() or not region.is_cpu:
        raise CodecError(f"the region of the blobs must be a 1-D uint8 CPU tensor, not {region.dtype} {region.shape}")
    copy = copy or region.data_ptr() % _WORD != 0  # views of it would not lie where their dtype must
    return unpack_tree(tree, region.numpy(), copy, allow_pickle, shelf)
