"""The bits of a tensor: as whole numbers, copied, compared and subtracted, without a second copy of the tensor."""

import ctypes
import math
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["EQUAL", "aligned", "difference", "parts", "spread", "whole"]

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LONG = (torch.int64, torch.uint64)
_LOWEST = -(1 << 63)
_ALIGNMENT = 8  # bytes
_CHUNK = 1 << 15  # elements; what is subtracted at a time stays in the cache
EQUAL = -1.0  # the difference of what does not differ in any bit
_threads = threading.local()


def whole(tensor: Tensor) -> Tensor:
    """A view of a tensor's bits as whole numbers, in the same shape (complex128: with a last dimension of 2).

    Copies and comparisons of whole numbers know no NaN and no signed zero, and every backend has them.
    """
    if tensor.dtype is torch.complex128:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_WHOLE[tensor.element_size()])


def spread(tensor: Tensor) -> bool:
    """Whether several elements lie in one place in memory, as after `expand`."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def parts(view: Tensor, room: int, limit: int, width: int) -> list[list[Tensor]]:
    """Cut a tensor into views that fill buckets one after another.

    Where it is cut depends on its shape alone and not on how it lies in memory, so that all ranks cut alike.

    Args:
        view: Of at least one element.
        room: Bytes left in the first bucket.
        limit: Bytes of every other bucket; at least one element.
        width: Bytes that an element takes in a bucket.

    Returns:
        For each bucket the views that go into it, in the order of the elements; the first may be empty.
    """
    filled: list[list[Tensor]] = [[]]
    stack = [view]
    while stack:
        part = stack.pop()
        size = part.numel() * width
        if size <= room:
            filled[-1].append(part)
            room -= aligned(size)
            continue
        row = size // part.shape[0] if part.ndim else size
        if part.ndim and room >= row:
            rows = room // row
            stack += [part[rows:], part[:rows]]
        elif row <= limit or part.ndim < 2:
            stack.append(part)
            filled.append([])
            room = limit
        else:
            stack += [part[0]] if part.shape[0] == 1 else [part[1:], part[0]]
    return filled


def aligned(size: int) -> int:
    """A size rounded up, so that what follows can be seen as numbers of any type."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def difference(mine: Tensor, other: Tensor, dtype: torch.dtype) -> float:
    """The largest absolute difference between the elements of two tensors, given as whole numbers.

    Equal numbers and two NaN count as 0, NaN beside a number as infinity.

    Args:
        mine, other: As `whole` returns them, of the same shape.
        dtype: What their bits stand for.

    Returns:
        The difference; `EQUAL` where no bit differs.
    """
    flat, there = mine.reshape(-1), other.reshape(-1)
    count, largest = flat.numel(), EQUAL
    compare = _comparison(flat, there)
    for begin in range(0, count, _CHUNK):
        end = min(begin + _CHUNK, count)
        if not compare(begin, end):
            largest = max(largest, _largest(flat[begin:end], there[begin:end], dtype))
    return largest


def _comparison(mine: Tensor, other: Tensor) -> Callable[[int, int], bool]:
    """What says whether two flat tensors hold the same from one element to another."""
    memcmp = _memcmp
    if memcmp is None or not (mine.is_cpu and other.is_cpu and mine.is_contiguous() and other.is_contiguous()):
        return lambda begin, end: torch.equal(mine[begin:end], other[begin:end])
    width, first, second = mine.element_size(), mine.data_ptr(), other.data_ptr()
    return lambda begin, end: memcmp(first + begin * width, second + begin * width, (end - begin) * width) == 0


def _largest(mine: Tensor, other: Tensor, dtype: torch.dtype) -> float:
    if dtype is torch.float32 or dtype is torch.float64:
        # The quick way, in their own type; what overflows or is not a number goes the exact one.
        apart = torch.sub(mine.view(dtype), other.view(dtype), out=_room(mine, dtype))
        lowest, highest = (bound.item() for bound in torch.aminmax(apart))
        if math.isfinite(lowest) and math.isfinite(highest):
            return float(max(-lowest, highest))
    if dtype in _LONG:
        return _exact_long(mine, other, signed=dtype is torch.int64)
    try:
        return _exact(_numbers(mine, dtype), _numbers(other, dtype))
    except NotImplementedError:  # a type that torch cannot convert, such as float4
        return math.inf


def _exact_long(a: Tensor, b: Tensor, *, signed: bool) -> float:
    """The largest difference of 64-bit whole numbers, of which float64 cannot tell all apart."""
    if not signed:  # in this order as numbers with a sign
        a, b = a ^ _LOWEST, b ^ _LOWEST
    # What wraps around is right without a sign; moved down by half the range, it is in order with one.
    apart = (torch.maximum(a, b) - torch.minimum(a, b)) ^ _LOWEST
    return float(int(apart.max().item()) - _LOWEST)


def _room(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for differences, kept by each thread: fresh memory costs more than the subtraction."""
    kept: dict[Any, Tensor] = vars(_threads).setdefault("rooms", {})
    room = kept.get((dtype, like.device))
    if room is None:
        room = kept[dtype, like.device] = torch.empty(_CHUNK, dtype=dtype, device=like.device)
    return room[: like.numel()]


def _exact(a: Tensor, b: Tensor) -> float:
    apart = (a - b).abs()
    largest = apart.max().item()
    if math.isnan(largest):
        equal = (a == b) | (a.isnan() & b.isnan())
        largest = apart.nan_to_num_(nan=math.inf, posinf=math.inf).masked_fill_(equal, 0.0).max().item()
    return float(largest)


def _numbers(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Bits as numbers that can be subtracted: float64 or complex128."""
    if dtype in (torch.complex128, torch.complex32):  # of the second torch knows little
        halves = bits.view(torch.float64 if dtype is torch.complex128 else torch.float16).reshape(-1, 2).double()
        return torch.complex(halves[:, 0], halves[:, 1])
    # On the CPU, because not every accelerator knows float64.
    return bits.view(dtype).cpu().to(torch.complex128 if dtype.is_complex else torch.float64)


def _load_memcmp() -> Callable[[int, int, int], int] | None:
    """The C library's comparison, which runs at memory speed and stops at the first difference."""
    if sys.platform == "win32":
        return None
    try:
        found = ctypes.CDLL(None).memcmp
    except (OSError, AttributeError):
        return None
    found.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    found.restype = ctypes.c_int
    return found


_memcmp = _load_memcmp()
