"""Memory for the small tensors of the next sync, made while this rank waits for it."""

from typing import Any

import numpy as np
import torch

from syncstate.wire.arrays import Layout

__all__ = ["Shelf"]

_MOST_TENSORS = 4096
_ONLY = {torch.Tensor}
_from_numpy, _ndarray = torch.from_numpy, np.ndarray


class Shelf:
    """Tensors made ahead: most syncs bring the layouts of the one before, and making takes longer than filling.

    `stock` makes them in the order in which they came last time, `take` hands them out one by one, and `fill` all at
    once where a sync brings nothing but such tensors.
    """

    __slots__ = ("_bits", "_items", "_known", "_next", "_tree", "_wanted")

    def __init__(self) -> None:
        self._wanted: list[Layout] = []
        self._items: list[tuple[Layout, torch.Tensor, bytearray]] = []
        self._next = 0
        self._tree: bytes | None = None
        self._known = False  # whether the sync that is being read left or found its tree here
        self._bits = 0

    def stock(self) -> None:
        """Make what the next sync is likely to need."""
        if len(self._items) == len(self._wanted):
            return
        with torch.inference_mode(False):
            for layout in self._wanted[len(self._items) :]:
                # A third of the time that torch.empty and its views take.
                bits = bytearray(layout.nbytes)
                self._items.append((layout, _from_numpy(_ndarray(layout.shape, layout.carrier, bits)), bits))

    def take(self, layout: Layout) -> tuple[torch.Tensor, bytearray] | None:
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

    def remember(self, tree: bytes | memoryview, value: Any) -> None:
        """Note what a tree was decoded to; `fill` needs the next one only if this is a list of such tensors."""
        self._known = True
        flat = type(value) is list and self._next == len(self._wanted) == len(value) and set(map(type, value)) == _ONLY
        self._tree = bytes(tree) if flat else None
        self._bits = sum(layout.nbytes for layout in self._wanted) if flat else 0

    def fill(self, tree: bytes | memoryview, bits: bytes) -> list[torch.Tensor] | None:
        """The list, if `tree` is the one of the sync before; None where it has to be read.

        Args:
            tree: The tree that came.
            bits: The bytes of its tensors, one after the other.
        """
        ready = len(self._items) == len(self._wanted) and len(bits) == self._bits
        if self._tree is None or not ready or tree != self._tree:
            return None
        start = 0
        for layout, _, own in self._items:
            own[:] = bits[start : start + layout.nbytes]
            start += layout.nbytes
        self._next = len(self._items)
        self._known = True
        return [tensor for _, tensor, _ in self._items]

    def turn(self) -> None:
        """The sync is over: what was made is used up or of no use.

        Where it was not remembered, another one has changed what is made, and its tree says nothing any more.
        """
        if not self._known:
            self._tree = None
        self._known = False
        del self._wanted[self._next :]
        self._items.clear()
        self._next = 0
