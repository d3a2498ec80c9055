"""What the codec knows: the extension codes of the tree, the types that travel, how deep they may nest.

A tree is msgpack. What msgpack has no type for is an extension. An atom is one extension. A tuple or set is a list
whose first element is an extension that only marks it; no list of a user can hold one. Types are matched exactly, so
that nothing arrives as its base class. The bits of small tensors and arrays stand before the msgpack, behind
`BITS_PREFIX`, in the order in which the extensions name them; larger ones lie in a region beside the tree.
"""

import pathlib
import struct
from typing import Any, NamedTuple

import msgpack  # type: ignore[import-untyped]
import numpy as np
import torch

from syncstate.errors import CodecError

__all__ = [
    "ALIGNMENT",
    "ATOMS",
    "BITS_FIRST",
    "BITS_PREFIX",
    "CONTAINERS",
    "INLINE_BYTES",
    "MAX_DEPTH",
    "NATIVE",
    "NEVER",
    "NUMPY_NUMBERS",
    "NUMPY_SCALARS",
    "Code",
    "Mark",
    "aligned",
    "check_types",
]

ALIGNMENT = 64  # bytes; where a blob may start in its region
INLINE_BYTES = 4096  # bits up to this size lie in the tree: cheaper to copy than to describe
MAX_DEPTH = 128  # containers in containers
BITS_FIRST = 0xC1  # the one byte with which no msgpack starts
BITS_PREFIX = struct.Struct("<B7xQ")  # BITS_FIRST, the number of bytes of bits


class Code:
    """The extension codes; part of the format."""

    TENSOR = 1
    TENSOR_BLOB = 2
    ARRAY = 3
    ARRAY_BLOB = 4
    SCALAR = 5
    INT = 6
    COMPLEX = 7
    PATH = 8
    PURE_POSIX_PATH = 9
    PURE_WINDOWS_PATH = 10
    PICKLE = 11
    TUPLE = 12
    SET = 13
    FROZENSET = 14


class Mark(NamedTuple):
    """Stands first in a decoded list that is to become another container."""

    container: type


NUMPY_NUMBERS = "?bBhHiIlLqQefdgFDG"  # NumPy's one-letter codes
NUMPY_SCALARS = frozenset(
    {np.dtype(char).type for char in NUMPY_NUMBERS} | {np.datetime64, np.timedelta64, np.void, np.str_, np.bytes_}
)
NATIVE = frozenset({type(None), bool, int, float, str, bytes})
CONTAINERS = frozenset({list, tuple, dict, set, frozenset})
ATOMS = (
    NATIVE
    | {complex, type(pathlib.Path()), pathlib.PurePosixPath, pathlib.PureWindowsPath}
    | {torch.Tensor, torch.nn.Parameter, np.ndarray}
    | NUMPY_SCALARS
)
_KNOWN = ATOMS | CONTAINERS
# Types that msgpack would write by itself as something else, and what only the codec may put into a tree.
NEVER = frozenset({bytearray, memoryview, msgpack.ExtType, msgpack.Timestamp, Mark})


def aligned(size: int) -> int:
    """Returns `size` rounded up to where a blob may start."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def check_types(value: Any, depth: int, allow_pickle: bool) -> None:
    """Raises a `CodecError` if a container holds, at any depth, a type that may not pass, or is nested too deep.

    Used on both sides. It looks at the types of all elements at once, and at single ones only to go further down.
    """
    if depth > MAX_DEPTH:
        raise CodecError(f"nested deeper than {MAX_DEPTH} levels")
    kinds = set(map(type, value))
    if type(value) is dict:
        kinds.update(map(type, value.values()))
    if kinds <= ATOMS:
        return
    if not (kinds <= _KNOWN or allow_pickle) or kinds & NEVER:
        raise CodecError("a type that cannot travel")
    for inner in value:
        if type(inner) in CONTAINERS:
            check_types(inner, depth + 1, allow_pickle)
    if type(value) is dict:
        for inner in value.values():
            if type(inner) in CONTAINERS:
                check_types(inner, depth + 1, allow_pickle)
