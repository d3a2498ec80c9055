"""The one message of fixed size that every sync sends, and the rule for what does not fit into it.

Whatever two ranks do wrong, their frames have the same size, so the collective itself always pairs: with gloo a larger
source aborts the receiving process and a smaller one leaves garbage behind.

    prefix  what both sides know beforehand: a receiver compares it with its own, byte by byte
    lengths kind, and the sizes of tree, blob region and body
    tree    the value without the bytes of tensors
    region  the bytes of tensors, each at a multiple of 64

What does not fit goes into a second collective, the body, of the exact length: the region alone where the tree fits
into the frame, else both.
"""

import struct
from enum import IntEnum
from typing import NamedTuple

import torch

from syncstate.errors import CodecError
from syncstate.wire.codec import Parcel, write_blobs
from syncstate.wire.vocabulary import aligned

__all__ = ["HEADER_BYTES", "Frame", "Kind", "Lengths", "Stamp"]

_MAGIC = b"SyST"
_VERSION = 1
_PREFIX = struct.Struct("<4sHHqqq8s8s")
_LENGTHS = struct.Struct("<qqqq")
HEADER_BYTES = 128


class Kind(IntEnum):
    """What a frame says."""

    VALUES = 1
    ERROR = 2


class Stamp(NamedTuple):
    """What both sides must agree on before they look further.

    Attributes:
        sequence: Number of the sync since the group was made.
        step, epoch: Where the ranks are.
        plan: First 8 bytes of the plan's digest.
        due: First 8 bytes of a digest of the names that are refreshed.
    """

    sequence: int
    step: int
    epoch: int
    plan: bytes
    due: bytes

    def prefix(self) -> bytes:
        """The first bytes of a frame with this stamp."""
        return _PREFIX.pack(_MAGIC, _VERSION, HEADER_BYTES, *self)


class Lengths(NamedTuple):
    """How the payload is laid out. Sizes in bytes; `body` is 0 when everything is in the frame."""

    kind: int
    tree: int
    region: int
    body: int


class Frame:
    """A buffer for one frame, used again for every sync.

    Args:
        nbytes: Size, the same on every rank.
        max_bytes: No payload is larger, and no receiver allocates more.
        buffer: 1-D uint8 memory of that size on the CPU; None makes it.

    Attributes:
        capacity: Bytes of payload that fit into the frame.
    """

    def __init__(self, nbytes: int, max_bytes: int, buffer: torch.Tensor | None = None) -> None:
        if buffer is None:
            with torch.inference_mode(False):  # which would make a buffer that can be used in that mode only
                buffer = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        self.buffer = buffer
        self._raw = self.buffer.numpy().data
        self.capacity = nbytes - HEADER_BYTES
        self._max_bytes = max_bytes
        self._lengths = (b"", Lengths(0, 0, 0, 0))  # the last ones that were checked, and their bytes

    def write(self, stamp: Stamp, kind: Kind, parcel: Parcel) -> torch.Tensor | None:
        """Fill the frame; returns the body where there must be one, uncopied where it is a single tensor.

        Raises:
            CodecError: The payload is larger than `max_bytes`.
        """
        tree, region = parcel.tree, parcel.blob_bytes
        tree_end = aligned(len(tree)) if region else len(tree)
        # An error fits the frame, and must get through however little is allowed.
        if kind is Kind.VALUES and tree_end + region > self._max_bytes:
            raise CodecError(
                f"the values of this sync take {tree_end + region} bytes, more than max_bytes={self._max_bytes}; "
                "share less or give the engine a larger max_bytes on every rank"
            )
        body: torch.Tensor | None = None
        raw = self._raw
        if tree_end + region <= self.capacity:
            raw[HEADER_BYTES : HEADER_BYTES + len(tree)] = tree
            if region:
                write_blobs(parcel, self.buffer[HEADER_BYTES + tree_end :])
        elif len(tree) <= self.capacity:
            raw[HEADER_BYTES : HEADER_BYTES + len(tree)] = tree
            body = self._region(parcel)
        else:
            body = torch.empty(tree_end + region, dtype=torch.uint8, device="cpu")
            body.numpy().data[: len(tree)] = tree
            write_blobs(parcel, body[tree_end:])
        raw[: _PREFIX.size] = stamp.prefix()
        _LENGTHS.pack_into(raw, _PREFIX.size, kind, len(tree), region, 0 if body is None else body.numel())
        return body

    @staticmethod
    def _region(parcel: Parcel) -> torch.Tensor:
        if len(parcel.blobs) == 1 and parcel.blobs[0].numel() == parcel.blob_bytes:
            return parcel.blobs[0]
        region = torch.empty(parcel.blob_bytes, dtype=torch.uint8, device="cpu")
        write_blobs(parcel, region)
        return region

    def begins(self, prefix: bytes) -> bool:
        """Whether the received frame has the stamp that this rank expects; see `Stamp.prefix`."""
        return self._raw[: _PREFIX.size] == prefix

    def stamp(self) -> Stamp:
        """The stamp of the received frame, for saying how it differs.

        Raises:
            CodecError: These bytes are no frame of this version.
        """
        magic, version, header, *rest = _PREFIX.unpack_from(self._raw)
        if magic != _MAGIC or version != _VERSION or header != HEADER_BYTES:
            raise CodecError(
                f"received bytes that are no frame of version {_VERSION}, they start with "
                f"{bytes(self._raw[:8]).hex()}; do all ranks run the same version of syncstate?"
            )
        return Stamp(*rest)

    def lengths(self) -> Lengths:
        """How the received payload is laid out, checked against the limits before anything is allocated.

        Raises:
            CodecError: Impossible lengths.
        """
        raw = bytes(self._raw[_PREFIX.size : _PREFIX.size + _LENGTHS.size])
        if raw == self._lengths[0]:  # most syncs look like the one before
            return self._lengths[1]
        lengths = Lengths._make(_LENGTHS.unpack(raw))
        kind, tree, region, body = lengths
        inside = (aligned(tree) if region else tree) + region
        placed = (
            (body == 0 and inside <= self.capacity)
            or (region > 0 and body == region and tree <= self.capacity)
            or (body > 0 and body == inside)
        )
        if kind not in (Kind.VALUES, Kind.ERROR) or tree < 1 or region < 0 or body < 0 or not placed:
            raise CodecError(f"received a frame with impossible lengths: {lengths}")
        if inside > self._max_bytes and (body or kind == Kind.VALUES):
            raise CodecError(f"received a frame that announces {inside} bytes, more than max_bytes={self._max_bytes}")
        self._lengths = (raw, lengths)
        return lengths

    def payload(self, lengths: Lengths, body: torch.Tensor | None) -> tuple[memoryview, torch.Tensor | None]:
        """The tree and the blob region, both views: of the frame, or of the body."""
        _, tree, region, _ = lengths
        if body is None or (region and body.numel() == region and tree <= self.capacity):
            encoded = self._raw[HEADER_BYTES : HEADER_BYTES + tree]
            if not region:
                return encoded, None
            start = HEADER_BYTES + aligned(tree)
            return encoded, self.buffer[start : start + region] if body is None else body
        encoded = body.numpy().data[:tree]
        return encoded, body[aligned(tree) :] if region else None
