"""One pass through a shared list of indices."""

from collections.abc import Callable, Iterator

import torch

__all__ = ["Pass"]


class Pass:
    """One walk through the list: which list, where it began, and how far it has come."""

    def __init__(self, indices: torch.Tensor, version: int, origin: int, num_replicas: int) -> None:
        self.indices = indices  # in the order of the shared value, before shuffling
        self.version = version
        self.origin = origin  # how many of the list were consumed before, by all ranks
        self.num_replicas = num_replicas
        self.handed_out = 0  # by this rank
        self.finished = False

    def hand_out(self, shard: list[int], begun: Callable[[], object]) -> Iterator[int]:
        begun()
        for index in shard:
            self.handed_out += 1
            yield index
        self.finished = True
