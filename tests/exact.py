"""Equality down to the type and the bit, which `==` does not give (1 == True, nan != nan, 0.0 == -0.0)."""

import struct
from typing import Any

import numpy as np
import torch

__all__ = ["identical"]


def identical(a: Any, b: Any) -> bool:
    """Tells whether two values have the same types and bits, and their dicts the same order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return bool((a.dtype, a.shape, a.device, tensor_bits(a)) == (b.dtype, b.shape, b.device, tensor_bits(b)))
    if isinstance(a, np.ndarray):
        return bool((a.dtype, a.shape, _bits(a)) == (b.dtype, b.shape, _bits(b)))
    if isinstance(a, (np.str_, np.bytes_)):
        return bool(a == b) and len(a) == len(b)
    if isinstance(a, np.generic):
        return bool((a.dtype, _bits(a)) == (b.dtype, _bits(b)))
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return identical([a.real, a.imag], [b.real, b.imag])
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, dict):
        return identical(list(a.items()), list(b.items()))
    if isinstance(a, (set, frozenset)):
        return len(a) == len(b) and all(any(identical(x, y) for y in b) for x in a)
    return bool(a == b)


def _bits(a: Any) -> bytes:
    raw: bytes = a.tobytes()
    if a.dtype.char in "gG" and np.finfo(np.longdouble).nmant == 63:
        # Of the 16 bytes of an 80-bit number 6 are padding, and hold whatever was there before.
        return np.frombuffer(raw, np.uint8).reshape(-1, np.dtype("g").itemsize)[:, :10].tobytes()
    return raw


def tensor_bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype is torch.complex32:
        plain = plain.view(torch.int32)
    return plain.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()
