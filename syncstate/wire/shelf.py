"""Memory for the small tensors of the next sync, made while this rank waits for it."""

import torch

from syncstate.wire.arrays import Layout

__all__ = ["Shelf"]

_MOST_TENSORS = 4096


class Shelf:
    """Tensors made ahead, because most syncs bring the layouts of the one before, and making takes longer than filling.

    `stock` makes them in the order in which they came last time; `take` hands them out.
    """

    __slots__ = ("_items", "_next", "_wanted")

    def __init__(self) -> None:
        self._wanted: list[Layout] = []
        self._items: list[tuple[Layout, torch.Tensor, memoryview]] = []
        self._next = 0

    def stock(self) -> None:
        """Make what the next sync is likely to need."""
        with torch.inference_mode(False):
            for layout in self._wanted[len(self._items) :]:
                tensor = torch.empty(layout.shape, dtype=layout.dtype, device="cpu")
                bits = tensor.reshape(-1).view(torch.uint8) if layout.shape else tensor.reshape(1).view(torch.uint8)
                self._items.append((layout, tensor, bits.numpy().data))

    def take(self, layout: Layout) -> tuple[torch.Tensor, memoryview] | None:
        """A tensor of this layout and its bytes, if one lies ready; and remember that it was wanted."""
        index = self._next
        self._next = index + 1
        if index < len(self._items):
            ready, tensor, bits = self._items[index]
            if ready is layout:
                return tensor, bits
        if index >= len(self._wanted) or self._wanted[index] is not layout:
            del self._wanted[index:]
            if index < _MOST_TENSORS:
                self._wanted.append(layout)
        return None

    def turn(self) -> None:
        """The sync is over: what was made is used up or of no use."""
        del self._wanted[self._next :]
        self._items.clear()
        self._next = 0
