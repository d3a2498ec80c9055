"""Tensors of which each rank holds a shard: which other ranks hold the same one."""

import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from syncstate.errors import ConfigError

__all__ = ["local_shard", "refuse_sharded"]


def local_shard(name: str, tensor: Tensor, members: Sequence[int] = ()) -> tuple[Tensor, tuple[int, ...]]:
    """What this rank holds of a tensor, and the global ranks that hold the same.

    Args:
        name: For messages.
        tensor: A plain tensor or a `DTensor`.
        members: Global ranks of the group.

    Returns:
        The tensor itself and an empty tuple for a plain tensor, which every rank of the group holds. For a `DTensor`
        its local part, and those ranks of the group that hold the same part: the ones along the dimensions of its mesh
        that replicate it. Where the mesh has no other rank of the group, the group replicates the mesh as a whole, and
        every rank holds the same.

    Raises:
        ConfigError: Each rank holds a part of a sum, which cannot be compared.
    """
    sharded: Any = tensor  # a DTensor, whose module is not loaded here
    placements = getattr(tensor, "placements", None)
    mesh = getattr(tensor, "device_mesh", None)
    if placements is None or mesh is None or not hasattr(tensor, "to_local"):
        return tensor, ()
    local: Tensor = sharded.detach().to_local()
    me, coordinate = dist.get_rank(), mesh.get_coordinate()
    if coordinate is None:  # this rank holds nothing of it
        return local, (me,)
    ranks = mesh.mesh
    # From the last dimension on, so that the numbers of those before stay.
    for dim in reversed(range(len(placements))):
        placement = placements[dim]
        if placement.is_partial():
            raise ConfigError(
                f"resync: {name!r} is a DTensor whose ranks hold parts of a sum ({placement}), which cannot be "
                "compared; leave it out with exclude"
            )
        if not placement.is_replicate():
            ranks = ranks.select(dim, coordinate[dim])
    inside = set(mesh.mesh.reshape(-1).tolist()) & set(members)
    alike = set(ranks.reshape(-1).tolist()) & set(members)
    if inside == {me} or alike == set(members):
        return local, ()
    return local, tuple(sorted(alike))


def refuse_sharded(module: nn.Module) -> None:
    """Raise for wrappers that shard parameters without saying so in the tensors themselves.

    Raises:
        ConfigError: FSDP of the first kind, or a partitioned parameter of DeepSpeed.
    """
    first = sys.modules.get("torch.distributed.fsdp")  # not loaded: then nothing is wrapped by it
    wrapper: Any = getattr(first, "FullyShardedDataParallel", None)
    strategy: Any = getattr(first, "ShardingStrategy", None)
    for path, child in module.named_modules():
        if wrapper is not None and isinstance(child, wrapper) and child.sharding_strategy != strategy.NO_SHARD:
            raise ConfigError(
                f"resync: {path or 'the module'} is sharded by FullyShardedDataParallel, which does not tell which "
                "ranks hold the same shard; nothing can be compared. Use torch.distributed.fsdp.fully_shard, whose "
                "replicated dimensions are compared"
            )
        for name, parameter in child._parameters.items():
            if parameter is not None and hasattr(parameter, "ds_tensor"):
                raise ConfigError(
                    f"resync: {path}.{name} is partitioned over the ranks by DeepSpeed (ZeRO stage 3); nothing is "
                    "replicated, so there is nothing to compare"
                )
