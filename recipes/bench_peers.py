"""What people use today, each as its documentation shows it; what is not installed is left out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from bench_lab import Operation
from torch import Tensor

__all__ = ["accelerate_dict", "ignite_each", "installed", "object_list", "raw", "shape_first"]


def raw(tensor: Tensor) -> Operation:
    """One broadcast into a buffer of the right size that is there already: what nothing can be faster than.

    Args:
        tensor: What rank 0 sends, one value in each row; the others take its size and type.
    """
    buffer = _mine(tensor)
    return Operation(lambda: dist.broadcast(buffer, src=0), lambda: list(buffer))


def object_list(values: Sequence[Any]) -> Operation:
    """`torch.distributed.broadcast_object_list`, all values as one object."""
    held: list[Any] = []

    def run() -> None:
        held[:] = [list(values) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(held, src=0)

    return Operation(run, lambda: list(held[0]))


def accelerate_dict(values: Mapping[str, Tensor]) -> Operation:
    """`accelerate.utils.broadcast` of a dict of tensors, whose shapes every rank knows."""
    from accelerate.utils import broadcast

    _accelerate_state()
    tensors = {name: _mine(value) for name, value in values.items()}
    return Operation(lambda: broadcast(tensors), lambda: list(tensors.values()))


def shape_first(value: Tensor) -> Operation:
    """The shape by `broadcast_object_list`, then a tensor allocated to it by `accelerate.utils.broadcast`."""
    from accelerate.utils import broadcast

    _accelerate_state()
    held: list[Tensor] = []

    def run() -> None:
        shape: list[Any] = [tuple(value.shape) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(shape, src=0)
        held[:] = [broadcast(value if dist.get_rank() == 0 else torch.empty(shape[0], dtype=value.dtype))]

    return Operation(run, lambda: held)


def ignite_each(values: Sequence[Tensor]) -> Operation:
    """`ignite.distributed.broadcast`, one call for each tensor, whose shapes every rank knows."""
    from ignite import distributed as idist

    tensors = [_mine(value) for value in values]
    return Operation(lambda: [idist.broadcast(tensor, src=0) for tensor in tensors], lambda: tensors)


def installed(peers: Mapping[str, Callable[[], Operation]]) -> Iterator[tuple[str, Operation]]:
    """Those of the peers whose libraries are there.

    Args:
        peers: Name -> what makes the operation.
    """
    for name, make in peers.items():
        try:
            operation = make()
        except ModuleNotFoundError as error:
            if dist.get_rank() == 0:
                print(f"  {name} is left out: {error}", flush=True)
            continue
        yield name, operation


def _accelerate_state() -> None:
    """Accelerate looks up its group here; this one finds the group that is initialised already."""
    from accelerate import PartialState

    PartialState(cpu=True)


def _mine(tensor: Tensor) -> Tensor:
    """What this rank has before the broadcast: rank 0 the tensor, the others something else."""
    return tensor.clone() if dist.get_rank() == 0 else torch.zeros_like(tensor)
