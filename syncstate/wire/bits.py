"""Bytes as tensors and back: what travels, and what lies in checkpoints."""

import torch

__all__ = ["as_bytes", "as_tensor"]


def as_tensor(data: bytes | bytearray) -> torch.Tensor:
    """A 1-D uint8 tensor on the CPU, in memory of its own."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def as_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a uint8 tensor on any device."""
    return bytes(tensor.cpu().contiguous().numpy().data)
