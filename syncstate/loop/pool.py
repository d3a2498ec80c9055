"""Large buffers, used again once nobody holds a value in them: fresh memory costs more than the wire."""

import torch

__all__ = ["Pool"]


class Pool:
    """Buffers; the ones that were used last are kept.

    Args:
        kept: How many: the one whose value is in force, and those that are on their way at one time.
    """

    def __init__(self, kept: int = 2) -> None:
        self._kept = kept
        self._buffers: list[torch.Tensor] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """A 1-D uint8 tensor of this size whose memory no value uses, the caller's until it is put back."""
        for index, buffer in enumerate(self._buffers):
            if buffer.numel() == nbytes and _unused(buffer):
                return self._buffers.pop(index)
        with torch.inference_mode(False):  # which would make a buffer that can be used in that mode only
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def put(self, buffer: torch.Tensor) -> None:
        """The wire is done with a buffer; values may still lie in it."""
        self._buffers.append(buffer)
        del self._buffers[: -self._kept]


def _unused(buffer: torch.Tensor) -> bool:
    """Whether the pool's tensor is the only one on its memory."""
    storage = buffer.untyped_storage()
    # One for the tensor, one for the handle just made. Where torch does not say, the buffer counts as in use.
    count = getattr(torch._C, "_storage_Use_Count", None)
    return count is not None and count(storage._cdata) <= 2
