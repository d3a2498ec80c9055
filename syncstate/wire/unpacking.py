"""Trees to values. The bytes may come from anywhere: what is not a value is a `CodecError`."""

import pathlib
import pickle
import struct
from collections.abc import Callable
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import torch

from syncstate.errors import CodecError
from syncstate.wire import arrays
from syncstate.wire.shelf import Shelf
from syncstate.wire.vocabulary import (
    ATOMS,
    BITS_FIRST,
    BITS_PREFIX,
    CONTAINERS,
    MAX_DEPTH,
    NEVER,
    Code,
    Mark,
    aligned,
    check_types,
)

__all__ = ["Region", "unpack_tree"]

Region = memoryview | np.ndarray[Any, Any]

_UNCHECKED_BYTES = 512  # msgpack up to this size cannot claim enough memory to be worth a check
_COMPLEX_BITS = struct.Struct("<dd")
# Looked up once: these are read for each tensor.
_TENSOR = Code.TENSOR
_TENSOR_HEADS = arrays.TENSOR_HEADS
_from_numpy = torch.from_numpy
_ndarray = np.ndarray


def unpack_tree(
    tree: bytes | memoryview, region: Region | None, copy: bool, allow_pickle: bool, shelf: Shelf | None = None
) -> Any:
    """Returns the value of `tree`, whose blobs lie in `region`; see `codec.unpack`."""
    if torch.is_inference_mode_enabled():  # tensors made in that mode could never be used in training
        with torch.inference_mode(False):
            return unpack_tree(tree, region, copy, allow_pickle, shelf)
    try:
        return _unpack(tree, region, copy, allow_pickle, shelf)
    except msgpack.StackError as error:
        raise CodecError(f"cannot decode: nested deeper than {MAX_DEPTH} levels") from error
    except Exception as error:  # bytes can be wrong in more ways than one would list
        reason = str(error) if type(error) is CodecError else f"{type(error).__name__}: {error}"
        raise CodecError(f"cannot decode a tree of {len(tree)} bytes: {reason}") from error


def _unpack(
    tree: bytes | memoryview, region: Region | None, copy: bool, allow_pickle: bool, shelf: Shelf | None
) -> Any:
    bits = b""
    if tree[0] == BITS_FIRST:
        start = BITS_PREFIX.size
        end = start + BITS_PREFIX.unpack_from(tree)[1]
        bits, tree = bytes(tree[start:end]), memoryview(tree)[end:]
    if shelf is not None and region is None and (filled := shelf.fill(tree, bits)) is not None:
        return filled
    if len(tree) > _UNCHECKED_BYTES:
        _check_lengths(tree)
    unpacking = _Unpacking(bits, region, copy, allow_pickle, shelf)
    value = msgpack.unpackb(
        tree,
        ext_hook=unpacking.extension,
        list_hook=_unmark,
        strict_map_key=False,
        unicode_errors="surrogatepass",
    )
    kind = type(value)
    if kind in CONTAINERS:
        check_types(value, 1, allow_pickle)
    elif kind not in ATOMS and (not allow_pickle or kind in NEVER):
        raise CodecError("a mark or a timestamp stands alone")
    beside = 0 if region is None else len(region)
    if unpacking.bits_end != len(bits) or unpacking.blobs_end != beside:
        raise CodecError(f"{len(bits)} + {beside} bytes of bits, {unpacking.bits_end} + {unpacking.blobs_end} are used")
    if shelf is not None and region is None:
        shelf.remember(tree, value)
    return value


def _check_lengths(tree: bytes | memoryview) -> None:
    """Raises unless all lists, maps and texts are as long as they claim.

    The parser allocates a list when it reads its length, so that a few bytes, nested, could claim much memory. Skipping
    a value runs through it and makes nothing.
    """
    reader = msgpack.Unpacker(max_buffer_size=len(tree))
    reader.feed(tree)
    reader.skip()


def _unmark(items: list[Any]) -> Any:
    if items and type(items[0]) is Mark:
        return items[0].container(items[1:])
    return items


class _Unpacking:
    """One decoding: turns extensions into atoms and takes bits and blobs in their order."""

    __slots__ = ("allow_pickle", "bits", "bits_end", "blobs_end", "copy", "region", "shelf")

    def __init__(self, bits: bytes, region: Region | None, copy: bool, allow_pickle: bool, shelf: Shelf | None) -> None:
        self.bits = bits
        self.shelf = shelf
        self.region = region
        self.copy = copy
        self.allow_pickle = allow_pickle
        self.bits_end = 0  # of what has been taken
        self.blobs_end = 0

    def extension(self, code: int, data: bytes) -> Any:
        """Returns the atom or mark of an extension; msgpack calls it for each."""
        if code == _TENSOR:  # written out, because small tensors are many
            layout = _TENSOR_HEADS.get(data) or arrays.tensor_head(data)
            start = self.bits_end
            self.bits_end = end = start + layout.nbytes
            if end > len(self.bits):
                raise CodecError(f"{len(self.bits)} bytes of bits, more are needed")
            if self.shelf is not None and layout.same and (ready := self.shelf.take(layout)) is not None:
                tensor, bits = ready
                bits[:] = self.bits[start:end]
                return tensor
            own = bytearray(self.bits[start:end])
            if layout.same:
                return _from_numpy(_ndarray(layout.shape, layout.carrier, own))
            return arrays.read_tensor(layout, own)
        reader = _READERS.get(code)
        if reader is None:
            raise CodecError(f"unknown extension {code} of {len(data)} bytes")
        return reader(self, data)

    def array(self, head: bytes) -> Any:
        layout = arrays.array_head(head)
        start = self.bits_end
        self.bits_end = start + layout.nbytes
        return arrays.read_array(layout, self.bits, start, copy=True)

    def tensor_blob(self, head: bytes) -> Any:
        layout = arrays.tensor_head(head)
        return arrays.read_tensor(layout, *self.next_blob(layout), copy=self.copy)

    def array_blob(self, head: bytes) -> Any:
        layout = arrays.array_head(head)
        return arrays.read_array(layout, *self.next_blob(layout), copy=self.copy)

    def next_blob(self, layout: arrays.Layout) -> tuple[Region, int]:
        start = aligned(self.blobs_end)
        self.blobs_end = start + layout.nbytes
        if self.region is None or self.blobs_end > len(self.region):
            raise CodecError(f"a blob of {layout.nbytes} bytes lies outside the bytes that were sent")
        return self.region, start

    def pickled(self, data: bytes) -> Any:
        if not self.allow_pickle:
            raise CodecError("it holds a pickle, which can run any code; allow_pickle=True on all ranks loads it")
        return pickle.loads(data)  # noqa: S301  asked for by name, on every rank


def _text(kind: type) -> Callable[[_Unpacking, bytes], Any]:
    return lambda _, data: kind(data.decode("utf-8", "surrogatepass"))


def _mark(container: type) -> Callable[[_Unpacking, bytes], Any]:
    mark = Mark(container)

    def read(_: _Unpacking, data: bytes) -> Mark:
        if data:
            raise CodecError("a mark carries data")
        return mark

    return read


_READERS: dict[int, Callable[[_Unpacking, bytes], Any]] = {
    Code.TENSOR_BLOB: _Unpacking.tensor_blob,
    Code.ARRAY: _Unpacking.array,
    Code.ARRAY_BLOB: _Unpacking.array_blob,
    Code.SCALAR: lambda _, data: arrays.read_scalar(data),
    Code.INT: lambda _, data: int.from_bytes(data, "little", signed=True),
    Code.COMPLEX: lambda _, data: complex(*_COMPLEX_BITS.unpack(data)),
    Code.PATH: _text(pathlib.Path),
    Code.PURE_POSIX_PATH: _text(pathlib.PurePosixPath),
    Code.PURE_WINDOWS_PATH: _text(pathlib.PureWindowsPath),
    Code.PICKLE: _Unpacking.pickled,
    Code.TUPLE: _mark(tuple),
    Code.SET: _mark(set),
    Code.FROZENSET: _mark(frozenset),
}
