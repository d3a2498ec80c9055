"""Values to trees: what msgpack does not know becomes an extension or a marked list; bits go beside it."""

import pathlib
import pickle
import struct
import sys
from collections.abc import Callable
from ctypes import string_at
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import torch

from syncstate.errors import CodecError
from syncstate.wire import arrays
from syncstate.wire.vocabulary import BITS_FIRST, BITS_PREFIX, INLINE_BYTES, NATIVE, NEVER, NUMPY_SCALARS, Code

__all__ = ["Packing"]

# Looked up once: these are read for each tensor.
_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_TENSOR_LAYOUTS = arrays.TENSOR_LAYOUTS
_COMPLEX_BITS = struct.Struct("<dd")


class Packing:
    """One encoding: `tree` makes the tree, `blobs` are then the flat bits that belong beside it."""

    __slots__ = ("allow_pickle", "bits", "blobs", "inline_bytes", "ordered")

    def __init__(self, allow_pickle: bool, inline_bytes: int = INLINE_BYTES) -> None:
        self.allow_pickle = allow_pickle
        self.inline_bytes = inline_bytes
        self.bits: list[bytes] = []
        self.blobs: list[torch.Tensor] = []
        self.ordered: dict[int, list[Any]] = {}

    def tree(self, value: Any) -> bytes:
        """Returns the tree of `value`, whose types have been checked."""
        try:
            packed: bytes = msgpack.Packer(default=self.convert, strict_types=True).pack(value)
        except UnicodeEncodeError:  # lone surrogates; the error handler for them makes every string slower
            self.bits, self.blobs = [], []
            packer = msgpack.Packer(default=self.convert, strict_types=True, unicode_errors="surrogatepass")
            packed = packer.pack(value)
        if not self.bits:
            return packed
        return b"".join((BITS_PREFIX.pack(BITS_FIRST, sum(map(len, self.bits))), *self.bits, packed))

    def convert(self, value: Any) -> Any:
        """Returns `value` as an extension or a marked list; msgpack calls it for each type it does not know."""
        kind = type(value)
        if kind is _Tensor or kind is _Parameter:
            # The common case costs only attributes of the tensor: any operation would take longer than all of this.
            try:
                layout = _TENSOR_LAYOUTS.get((value.dtype, value.shape))
                if (
                    layout is not None
                    and layout.quick
                    and value.is_cpu
                    and value.is_contiguous()
                    and not value.is_neg()
                    and value.untyped_storage().nbytes() >= layout.nbytes  # smaller: freed, reading it would crash
                    and (address := value.data_ptr())  # 0: lazy zeros
                ):
                    self.bits.append(string_at(address, layout.nbytes))
                    return layout.mark
            except RuntimeError:
                pass  # it has no shape or memory: below, the error says so
        handler = _HANDLERS.get(kind)
        if handler is None:
            return self.pickled(value)
        try:
            return handler(self, value)
        except CodecError:
            if not self.allow_pickle:
                raise
            return self.pickled(value)

    def probe(self, value: Any) -> None:
        """Raises a `CodecError` if `value`, which is no container, cannot travel: empty if its type is to blame."""
        if type(value) in NEVER:
            raise CodecError
        if type(value) not in NATIVE:
            self.convert(value)

    def pickled(self, value: Any) -> Any:
        if not self.allow_pickle:
            raise CodecError
        try:
            return msgpack.ExtType(Code.PICKLE, pickle.dumps(value, protocol=5))
        except Exception as error:
            raise CodecError(f"it cannot be pickled: {type(error).__name__}: {error}") from error

    def tensor(self, value: torch.Tensor) -> Any:
        try:
            layout = arrays.tensor_layout(value)
        except CodecError:
            raise
        except RuntimeError as error:
            raise CodecError(f"its shape cannot be read: {error}") from error
        return self.placed(layout, arrays.tensor_bits(value, layout), Code.TENSOR_BLOB)

    def array(self, value: np.ndarray[Any, Any]) -> Any:
        layout = arrays.ARRAY_LAYOUTS.get((value.dtype, value.shape)) or arrays.array_layout(value)
        if layout.quick:
            self.bits.append(value.tobytes())
            return layout.mark
        return self.placed(layout, arrays.array_bits(value, layout), Code.ARRAY_BLOB)

    def placed(self, layout: arrays.Layout, flat: torch.Tensor, blob_code: int) -> Any:
        if layout.nbytes <= self.inline_bytes:
            self.bits.append(flat.numpy().tobytes())
            return layout.mark
        self.blobs.append(flat)
        return msgpack.ExtType(blob_code, layout.head)

    def in_order(self, value: set[Any] | frozenset[Any]) -> list[Any]:
        """Returns the elements in an order that depends on them alone: by value, or else by their bytes."""
        if len(value) < 2:
            return list(value)
        if set(map(type, value)) in ({str}, {int}):
            return sorted(value)
        if id(value) not in self.ordered:  # kept, because the bytes of an outer set ask again
            self.ordered[id(value)] = sorted(value, key=self.bytes_of)
        return self.ordered[id(value)]

    def bytes_of(self, element: Any) -> bytes:
        inner = Packing(self.allow_pickle, sys.maxsize)
        inner.ordered = self.ordered
        return inner.tree(element)


def _text(code: int) -> Callable[[Packing, Any], Any]:
    return lambda _, path: msgpack.ExtType(code, str(path).encode("utf-8", "surrogatepass"))


def _windows_path(packing: Packing, value: pathlib.PureWindowsPath) -> Any:
    if pathlib.PureWindowsPath(str(value)) != value:
        raise CodecError(f"pathlib reads its own text {str(value)!r} as another path")
    return _text(Code.PURE_WINDOWS_PATH)(packing, value)


def _set(code: int) -> Callable[[Packing, Any], Any]:
    mark = msgpack.ExtType(code, b"")
    return lambda packing, items: [mark, *packing.in_order(items)]


def _int(_: Packing, value: int) -> Any:
    return msgpack.ExtType(Code.INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _complex(_: Packing, value: complex) -> Any:
    return msgpack.ExtType(Code.COMPLEX, _COMPLEX_BITS.pack(value.real, value.imag))


def _scalar(_: Packing, value: np.generic) -> Any:
    return msgpack.ExtType(Code.SCALAR, arrays.write_scalar(value))


_TUPLE = msgpack.ExtType(Code.TUPLE, b"")
_HANDLERS: dict[type, Callable[[Packing, Any], Any]] = {
    torch.Tensor: Packing.tensor,
    torch.nn.Parameter: Packing.tensor,
    np.ndarray: Packing.array,
    int: _int,  # those that 64 bits cannot hold
    complex: _complex,
    type(pathlib.Path()): _text(Code.PATH),
    pathlib.PurePosixPath: _text(Code.PURE_POSIX_PATH),
    pathlib.PureWindowsPath: _windows_path,
    tuple: lambda _, items: [_TUPLE, *items],
    set: _set(Code.SET),
    frozenset: _set(Code.FROZENSET),
    **dict.fromkeys(NUMPY_SCALARS, _scalar),
}
