"""Tensors and NumPy arrays as bytes: a small header (dtype, shape) in the tree, and the plain bits elsewhere.

A header is the number of dimensions, the dimensions as int64, the dtype's name. It is made or parsed once for each
dtype and shape. Bits keep the byte order of the machine (tensors) or of their dtype (arrays).
"""

import math
import re
import struct
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgpack  # type: ignore[import-untyped]
import numpy as np
import torch

from syncstate.digest import flat_bytes
from syncstate.errors import CodecError
from syncstate.wire.vocabulary import INLINE_BYTES, NUMPY_NUMBERS, Code

__all__ = [
    "ARRAY_LAYOUTS",
    "TENSOR_HEADS",
    "TENSOR_LAYOUTS",
    "Bits",
    "Layout",
    "array_bits",
    "array_layout",
    "array_head",
    "tensor_head",
    "read_array",
    "read_scalar",
    "read_tensor",
    "tensor_bits",
    "tensor_layout",
    "write_scalar",
]

_Key = TypeVar("_Key")
Bits = bytes | bytearray | memoryview | np.ndarray[Any, Any]

_CACHE_SIZE = 1024  # entries of each cache; a full one starts anew
_MAX_DIMS = 64

# The dtype in which NumPy holds the bits of a tensor; those it does not know travel as unsigned integers of that size.
_CARRIERS = {
    **{name: name for name in ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "bool")},
    **{name: name for name in ("float16", "float32", "float64", "complex64", "complex128")},
    "bfloat16": "uint16",
    "complex32": "uint32",
    **{f"float8_{kind}": "uint8" for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")},
    "float4_e2m1fn_x2": "uint8",
}
_TORCH_DTYPES: dict[str, tuple[torch.dtype, np.dtype[Any]]] = {
    name: (getattr(torch, name), np.dtype(carrier)) for name, carrier in _CARRIERS.items() if hasattr(torch, name)
}
_TORCH_NAMES = {dtype: name for name, (dtype, _) in _TORCH_DTYPES.items()}

# Nothing else is ever given to np.dtype(): other texts can name structures and Python objects.
_NUMPY_NAME = re.compile(r"[<>|](?:[biufc]\d{1,2}|[SUV]\d{1,9}|[mM]8(?:\[\d{0,9}[a-zA-Zμ]{1,7}\])?)")
# Numbers go by their one-letter code, which tells apart classes of the same width, such as longlong and int64.
_SCALAR_DTYPES = {char.encode(): np.dtype(char) for char in NUMPY_NUMBERS}
_SCALAR_PREFIXES = {dtype.type: b"\1" + char for char, dtype in _SCALAR_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Layout:
    """What a header says: `carrier` is NumPy's dtype of the bits, `dtype` torch's, None for an array."""

    head: bytes
    mark: Any  # the extension that stands in the tree when the bits are among the small ones
    shape: tuple[int, ...]
    nbytes: int
    carrier: np.dtype[Any]
    dtype: torch.dtype | None
    same: bool  # the carrier is dtype's own counterpart, and any bits are a value
    checked: bool  # some bit patterns of this dtype are no values
    quick: bool  # small, and its memory is its bits: neither to be checked nor, being complex, lazily conjugated


TENSOR_LAYOUTS: dict[tuple[torch.dtype, tuple[int, ...]], Layout] = {}
ARRAY_LAYOUTS: dict[tuple[np.dtype[Any], tuple[int, ...]], Layout] = {}
TENSOR_HEADS: dict[bytes, Layout] = {}
_ARRAY_HEADS: dict[bytes, Layout] = {}


def tensor_layout(tensor: torch.Tensor) -> Layout:
    """Returns the layout of a tensor; raises `CodecError` for a kind of tensor that has no plain bits."""
    if tensor.layout is not torch.strided:
        raise CodecError(f"a tensor with layout {tensor.layout} has no plain bits; send x.to_dense()")
    if tensor.is_nested:
        raise CodecError("a nested tensor has no shape; send list(x.unbind())")
    layout = TENSOR_LAYOUTS.get((tensor.dtype, tensor.shape))
    if layout is not None:
        return layout
    name = _TORCH_NAMES.get(tensor.dtype)
    if name is None:
        raise CodecError(f"the dtype {tensor.dtype} cannot travel; send x.dequantize() or x.int_repr() if quantized")
    return _cached(TENSOR_LAYOUTS, (tensor.dtype, tensor.shape), _layout(name, tuple(tensor.shape), True))


def array_layout(array: np.ndarray[Any, Any]) -> Layout:
    """Returns the layout of an array; raises `CodecError` for objects, structures and dtypes of other packages."""
    return _cached(ARRAY_LAYOUTS, (array.dtype, array.shape), _layout(_numpy_name(array.dtype), array.shape, False))


def tensor_bits(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Returns the flat uint8 bits of a tensor, uncopied where it is contiguous in CPU memory."""
    try:
        flat = flat_bytes(tensor)
    except (ValueError, RuntimeError) as error:
        raise CodecError(f"its data cannot be read: {error}") from error
    if layout.checked:
        _check_bits(flat.numpy(), layout.carrier)
    return flat


def array_bits(array: np.ndarray[Any, Any], layout: Layout) -> torch.Tensor:
    """Returns the flat uint8 bits of an array, uncopied where it is contiguous."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if layout.checked:
        _check_bits(flat, layout.carrier)
    if not flat.flags.writeable:
        flat = np.asarray(_Writeable(flat))
    return torch.from_numpy(flat)


class _Writeable:
    """Shows read-only memory as writeable, since torch warns about any other; nothing here writes to it."""

    def __init__(self, flat: np.ndarray[Any, Any]) -> None:
        self.source = flat  # the view made from this object keeps it alive, and so the memory
        self.__array_interface__ = {**flat.__array_interface__, "data": (flat.ctypes.data, False)}


def read_tensor(layout: Layout, bits: Bits, start: int = 0, *, copy: bool = False) -> torch.Tensor:
    """Returns a tensor over the memory of `bits`, which must be writeable, or over a copy; raises if they are short."""
    array = read_array(layout, bits, start, copy=copy)
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype is layout.dtype else tensor.view(cast(torch.dtype, layout.dtype))


def read_array(layout: Layout, bits: Bits, start: int = 0, *, copy: bool = False) -> np.ndarray[Any, Any]:
    """Returns an array over the memory of `bits`, or over a copy; raises if they are short."""
    array: np.ndarray[Any, Any] = np.ndarray(layout.shape, layout.carrier, bits, start)
    if layout.checked:
        _check_bits(array.reshape(-1).view(np.uint8), layout.carrier)
    return array.copy() if copy else array


def tensor_head(head: bytes) -> Layout:
    """Returns the layout that a tensor's header describes."""
    return TENSOR_HEADS.get(head) or _cached(TENSOR_HEADS, head, _parse(head, True))


def array_head(head: bytes) -> Layout:
    """Returns the layout that an array's header describes."""
    return _ARRAY_HEADS.get(head) or _cached(_ARRAY_HEADS, head, _parse(head, False))


def write_scalar(value: np.generic) -> bytes:
    """Returns the bytes of a NumPy scalar: the length of its dtype's name, the name, the bits (or text, for str_)."""
    if isinstance(value, np.str_):
        return b"\1U" + value.encode("utf-8", "surrogatepass")
    if isinstance(value, np.bytes_):
        return b"\1S" + bytes(value)
    prefix = _SCALAR_PREFIXES.get(type(value))
    if prefix is None:
        name = _numpy_name(value.dtype).encode()
        prefix = bytes([len(name)]) + name
    return prefix + value.tobytes()


def read_scalar(data: bytes) -> np.generic:
    """Returns the NumPy scalar that `write_scalar` wrote."""
    start = 1 + data[0]
    name = data[1:start]
    if name == b"U":
        return np.str_(data[start:].decode("utf-8", "surrogatepass"))
    if name == b"S":
        return np.bytes_(data[start:])
    dtype = _SCALAR_DTYPES.get(name)
    if dtype is None:
        if _NUMPY_NAME.fullmatch(name.decode()) is None:
            raise CodecError(f"unknown NumPy scalar {name[:40]!r}")
        dtype = np.dtype(name.decode())
    if dtype.itemsize != len(data) - start:
        raise CodecError(f"a scalar of dtype {dtype} has {len(data) - start} bytes instead of {dtype.itemsize}")
    array: np.ndarray[Any, Any] = np.ndarray((), dtype, data, start)
    if dtype.kind in "bU":
        _check_bits(array.reshape(-1).view(np.uint8), dtype)
    return cast(np.generic, array.copy()[()] if dtype.kind == "V" else array[()])  # a void scalar stays a view


def _numpy_name(dtype: np.dtype[Any]) -> str:
    name = dtype.str
    if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None or not _NUMPY_NAME.fullmatch(name):
        raise CodecError(f"the dtype {dtype} cannot travel; send plain numbers, or a dict of the fields x[name]")
    if np.dtype(name) != dtype or dtype.itemsize == 0:
        raise CodecError(f"the dtype {dtype} is not one of NumPy's own, or has no bytes; send x.view of plain numbers")
    return name


def _layout(name: str, shape: tuple[int, ...], is_tensor: bool) -> Layout:
    dtype, carrier = _TORCH_DTYPES[name] if is_tensor else (None, np.dtype(name))
    head = struct.pack(f"<B{len(shape)}q", len(shape), *shape) + name.encode()
    nbytes = math.prod(shape) * carrier.itemsize
    checked = carrier.kind in "bU"
    return Layout(
        head=head,
        mark=msgpack.ExtType(Code.TENSOR if is_tensor else Code.ARRAY, head),
        shape=shape,
        nbytes=nbytes,
        carrier=carrier,
        dtype=dtype,
        same=name == carrier.name and not checked,
        checked=checked,
        quick=nbytes <= INLINE_BYTES and not checked and not (dtype is not None and dtype.is_complex),
    )


def _parse(head: bytes, is_tensor: bool) -> Layout:
    dims = head[0] if head else _MAX_DIMS + 1
    if dims > _MAX_DIMS or len(head) < 1 + 8 * dims:
        raise CodecError(f"a header of {len(head)} bytes is cut off, or has more than {_MAX_DIMS} dimensions")
    shape = struct.unpack_from(f"<{dims}q", head, 1)
    if min(shape, default=0) < 0:
        raise CodecError(f"negative dimension in shape {shape}")
    name = head[1 + 8 * dims :].decode()
    known = name in _TORCH_DTYPES if is_tensor else _NUMPY_NAME.fullmatch(name)
    if not known:
        raise CodecError(f"unknown dtype {name[:40]!r}")
    layout = _layout(name, shape, is_tensor)
    if layout.carrier.itemsize == 0:
        raise CodecError(f"dtype {name!r} has no bytes")
    return layout


def _check_bits(flat: np.ndarray[Any, Any], carrier: np.dtype[Any]) -> None:
    """Refuses bits that NumPy or torch would read as a value and then misbehave on."""
    if carrier.kind == "b" and flat.size and flat.max() > 1:
        raise CodecError("a bool array holds bytes other than 0 and 1; send x.view of uint8, or x != 0")
    code_points = np.dtype(np.uint32).newbyteorder(carrier.byteorder)
    if carrier.kind == "U" and flat.size and flat.view(code_points).max() > 0x10FFFF:
        raise CodecError("a text array holds numbers that are no characters")


def _cached(cache: dict[_Key, Layout], key: _Key, layout: Layout) -> Layout:
    if len(cache) >= _CACHE_SIZE:
        cache.clear()
    cache[key] = layout
    return layout
