"""Digests of tensors where they lie: at memory speed on the CPU; reduced on an accelerator, so that 16 bytes move.

Both depend on the position of every word, so that neither permutations nor pairs of equal changes escape them. They
find differences, they do not withstand someone who looks for collisions.
"""

import ctypes
from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

from syncstate.digest import digest_bytes, flat_bytes
from syncstate.resync.items import Item

__all__ = ["ABSENT", "SIZE", "Digests", "words_digest"]

SIZE = 16  # bytes of a digest
ABSENT = bytes(SIZE)  # the digest of what a rank lacks
_EMPTY = digest_bytes(b"")

# Odd numbers with about as many ones as zeros, from the finalisers of splitmix64 and murmur3, as signed numbers.
_POSITION = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_SECOND = 0xFF51AFD7ED558CCD - (1 << 64)
_CHUNK = 1 << 20  # words (of 8 bytes) that are mixed at a time; temporary memory is a few times as much
_SMALL = 1 << 16  # bytes; tensors below are put together first, because each needs some twenty kernels

_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_view_memory.restype = ctypes.py_object
_READ = 0x100


class Digests:
    """Digests of items.

    Args:
        on_device: Treat tensors on the CPU as if they were on an accelerator; for tests.
    """

    def __init__(self, on_device: bool = False) -> None:
        self._on_device = on_device

    def each(self, items: Sequence[Item]) -> list[bytes]:
        """A digest of each item."""
        found = [b"" if self._remote(item) else _host(item) for item in items]
        remote = [index for index, item in enumerate(items) if self._remote(item)]
        tensors = [words_digest([_tensor(items[index])]) for index in remote]
        for index, digest in zip(remote, _fetch(tensors), strict=True):
            found[index] = digest
        return found

    def groups(self, items: Sequence[Item], size: int) -> list[bytes]:
        """A digest of each `size` items in a row."""
        groups = [items[begin : begin + size] for begin in range(0, len(items), size)]
        if not any(map(self._remote, items)):
            return [digest_bytes(b"".join(map(_host, group))) for group in groups]
        remote: list[Tensor] = []
        counts = []
        for group in groups:
            runs = _runs([_tensor(item) for item in group if self._remote(item)])
            remote += map(words_digest, runs)
            counts.append(len(runs))
        moved = iter(_fetch(remote))
        found = []
        for group, count in zip(groups, counts, strict=True):
            parts = [_host(item) for item in group if not self._remote(item)]
            found.append(digest_bytes(b"".join([*parts, *(next(moved) for _ in range(count))])))
        return found

    def _remote(self, item: Item) -> bool:
        return item.size > 0 and (self._on_device or not _tensor(item).is_cpu)


def _tensor(item: Item) -> Tensor:
    tensor = item.tensor
    if tensor is None:
        raise TypeError(f"{item.name!r} is no tensor")
    return tensor


def _host(item: Item) -> bytes:
    tensor = item.tensor
    if item.end and tensor is not None:
        pointer = tensor.data_ptr()
        if pointer and tensor.untyped_storage().nbytes() >= item.end:
            if pointer != item.memory[0]:
                item.memory = (pointer, _view_memory(pointer, item.size, _READ))
            return xxhash.xxh3_128_digest(item.memory[1])
    if item.absent:
        return ABSENT
    if item.data is not None:
        return digest_bytes(item.data)
    if tensor is None or not item.size:
        return _EMPTY
    return digest_bytes(flat_bytes(tensor).numpy().data)  # which copies, and refuses memory that has been freed


def _runs(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors in a row that are digested together: small ones on one device."""
    runs: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if size >= _SMALL:
            runs.append([tensor])
            room = 0
        elif size <= room and runs[-1][0].device == tensor.device:
            runs[-1].append(tensor)
            room -= size
        else:
            runs.append([tensor])
            room = 8 * _CHUNK - size
    return runs


def words_digest(tensors: Sequence[Tensor]) -> Tensor:
    """The digest of tensors in a row, computed where they lie.

    Each word of 8 bytes is combined with its position, mixed by steps that can be undone (so that no change is lost),
    and summed twice: as it is, and times an odd number that depends on the position.

    Args:
        tensors: On one device, each with elements.

    Returns:
        Two int64 numbers on that device.
    """
    words = [_words(tensor) for tensor in tensors]
    row = words[0] if len(words) == 1 else torch.cat(words)
    total = torch.zeros(2, dtype=torch.int64, device=row.device)
    for begin in range(0, row.numel(), _CHUNK):
        part = row[begin : begin + _CHUNK]
        position = torch.arange(begin + 1, begin + 1 + part.numel(), dtype=torch.int64, device=row.device)
        position.mul_(_POSITION)
        mixed = part ^ position
        mixed.mul_(_MIX[0])
        mixed ^= (mixed >> 32) & 0xFFFFFFFF
        mixed.mul_(_MIX[1])
        mixed ^= (mixed >> 29) & 0x7FFFFFFFF
        total[0] += mixed.sum()
        position.mul_(_SECOND).bitwise_or_(1)
        total[1] += mixed.mul_(position).sum()
    return total


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor as int64, in the order of its elements, filled up with zeros."""
    flat = tensor.detach().contiguous()
    if flat.dtype is torch.complex128:
        flat = torch.view_as_real(flat)
    octets = flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)
    fill = -octets.numel() % 8
    if fill:
        octets = torch.cat([octets, octets.new_zeros(fill)])
    elif octets.storage_offset() % 8:
        octets = octets.clone()  # which cannot be seen as longer words where it lies
    return octets.view(torch.int64)


def _fetch(digests: Sequence[Tensor]) -> list[bytes]:
    """Digests from where they were computed, in one move from each device."""
    found = [b""] * len(digests)
    by_device: dict[torch.device, list[int]] = {}
    for index, digest in enumerate(digests):
        by_device.setdefault(digest.device, []).append(index)
    for indices in by_device.values():
        rows = torch.stack([digests[index] for index in indices]).cpu().numpy()
        for index, row in zip(indices, rows, strict=True):
            found[index] = row.tobytes()
    return found
