"""Large receive buffers, used again once nobody holds a value in them: fresh memory costs more than the wire."""

import torch

__all__ = ["Pool"]

_KEPT = 2  # the one whose value is in force, and the one that is being received


class Pool:
    """Buffers of one size; asking for another size forgets them."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """A 1-D uint8 tensor of this size whose memory no value uses."""
        if self._buffers and self._buffers[0].numel() != nbytes:
            self._buffers.clear()
        for buffer in self._buffers:
            if _unused(buffer):
                return buffer
        with torch.inference_mode(False):  # which would make a buffer that can be used in that mode only
            buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._buffers.append(buffer)
        del self._buffers[:-_KEPT]
        return buffer


def _unused(buffer: torch.Tensor) -> bool:
    """Whether the pool's tensor is the only one on its memory."""
    storage = buffer.untyped_storage()
    # One for the tensor, one for the handle just made. Where torch does not say, the buffer counts as in use.
    count = getattr(torch._C, "_storage_Use_Count", None)
    return count is not None and count(storage._cdata) <= 2
