"""Who draws batches from a sampler, and how many it draws before it is asked for the first."""

from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

from torch.utils.data.dataloader import _BaseDataLoaderIter

__all__ = ["Reader", "find_reader"]

_FRAMES = 16  # from a batch sampler to whoever iterates the loader there are about ten


class Reader(NamedTuple):
    """Who draws.

    Attributes:
        ahead: How many batches are drawn before the first is asked for: prefetch_factor x num_workers of a
            `DataLoader`, which then draws one, or tries to, for each that it hands on.
        host: Whether somebody stands between, who deals batches out or fetches more of them in advance.
        shards: Among how many ranks Accelerate deals the batches out.
    """

    ahead: int = 0
    host: bool = False
    shards: int = 1


def find_reader(frame: FrameType | None) -> Reader:
    """Look up the stack from the function that draws the first batch.

    A loader tells its sampler nothing, and with workers it draws what nobody has trained on yet. Without this look,
    users would have to count batches whenever they save a sampler.
    """
    ahead, host, shards, found = 0, False, 1, False
    for depth, (module, reader) in enumerate(_callers(frame)):
        # Accelerate's loaders fetch one batch more than they have handed on, and shard the batches of a sampler.
        if module == "accelerate.data_loader":
            host, shards = True, max(shards, getattr(reader, "num_processes", 1))
        if isinstance(reader, _BaseDataLoaderIter) and not found:
            found, host = True, host or depth > 0
            ahead = reader._num_workers * getattr(reader, "_prefetch_factor", 0)
    return Reader(ahead, host, shards)


def _callers(frame: FrameType | None) -> Iterator[tuple[Any, Any]]:
    """The module and the `self` of each function that is at work, from the inside."""
    for _ in range(_FRAMES):
        if frame is None:
            return
        yield frame.f_globals.get("__name__"), frame.f_locals.get("self")
        frame = frame.f_back
