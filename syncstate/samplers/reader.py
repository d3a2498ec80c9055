"""Who draws batches from a sampler, and how many it draws before it is asked for the first."""

from types import FrameType
from typing import NamedTuple

from torch.utils.data.dataloader import _BaseDataLoaderIter

__all__ = ["Reader", "find_reader"]

_FRAMES = 16  # from a batch sampler to whoever iterates the loader there are about ten


class Reader(NamedTuple):
    """Who draws.

    Attributes:
        ahead: How many batches are drawn before the first is asked for: prefetch_factor x num_workers of a
            `DataLoader`, which then draws one, or tries to, for each that it hands on.
        host: Whether somebody stands between, who deals batches out or fetches more of them in advance.
    """

    ahead: int = 0
    host: bool = False


def find_reader(frame: FrameType | None) -> Reader:
    """Look up the stack from the function that draws the first batch.

    A loader tells its sampler nothing, and with workers it draws what nobody has trained on yet. Without this look,
    users would have to count batches whenever they save a sampler.
    """
    frames = _callers(frame)
    readers = [frame.f_locals.get("self") for frame in frames]
    loaders = [(depth, reader) for depth, reader in enumerate(readers) if isinstance(reader, _BaseDataLoaderIter)]
    # Accelerate's loaders fetch one batch more than they have handed on, and shard the batches of a sampler.
    host = any(frame.f_globals.get("__name__") == "accelerate.data_loader" for frame in frames)
    if not loaders:
        return Reader(0, host)
    depth, loader = loaders[0]
    return Reader(loader._num_workers * getattr(loader, "_prefetch_factor", 0), host or depth > 0)


def _callers(frame: FrameType | None) -> list[FrameType]:
    found: list[FrameType] = []
    while frame is not None and len(found) < _FRAMES:
        found.append(frame)
        frame = frame.f_back
    return found
