"""Who: this rank, the world, the main process. One process without a process group is a group of one."""

import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from syncstate.errors import ConfigError

__all__ = ["Topology", "find_topology", "process_group"]


@dataclass(frozen=True)
class Topology:
    """The place of this process among those that share values.

    Attributes:
        rank: This process in the engine's group, from 0.
        world_size: Number of processes in the group.
        main: The rank in the group that computes.
        global_ranks: The group's members by their rank in the world.
        local_rank, node_rank, num_nodes: Place on the node and of the node, from the launcher's environment.
    """

    rank: int = 0
    world_size: int = 1
    main: int = 0
    global_ranks: tuple[int, ...] = (0,)
    local_rank: int = 0
    node_rank: int = 0
    num_nodes: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process is the main process."""
        return self.rank == self.main


def find_topology(group: Any = None, main: int | None = None) -> Topology:
    """Look up this process in a process group.

    Args:
        group: A `ProcessGroup`, a one-dimensional `DeviceMesh`, `"single"` (this process alone), or None for the world.
        main: Global rank of the main process; None for the group's first.

    Raises:
        ConfigError: No process group although the launcher started several processes, a group that this process
            is no member of, or a main process outside the group.
    """
    ranks, rank = _members(group)
    if main is None:
        main = ranks[0]
    if main not in ranks:
        raise ConfigError(f"main must be a global rank of the group, one of {list(ranks)}, got {main!r}")
    node_rank, num_nodes = _node(ranks[rank])
    return Topology(
        rank=rank,
        world_size=len(ranks),
        main=ranks.index(main),
        global_ranks=ranks,
        local_rank=_env("LOCAL_RANK", 0),
        node_rank=node_rank,
        num_nodes=num_nodes,
    )


def _members(group: Any) -> tuple[tuple[int, ...], int]:
    """Global ranks of the group and the index of this process among them."""
    initialized = dist.is_available() and dist.is_initialized()
    if isinstance(group, str):
        if group != "single":
            raise ConfigError(f"group must be a ProcessGroup, a one-dimensional DeviceMesh or 'single', got {group!r}")
        return (dist.get_rank() if initialized else 0,), 0
    if not initialized:
        if group is None and _env("WORLD_SIZE", 1) > 1:
            raise ConfigError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but torch.distributed is not initialized: call "
                "torch.distributed.init_process_group first, or give group='single' to share nothing"
            )
        if group is not None:
            raise ConfigError("group was given but torch.distributed is not initialized")
        return (0,), 0
    if hasattr(group, "mesh_dim_names"):
        if group.ndim != 1:
            raise ConfigError(f"group: a DeviceMesh must have one dimension, got {group.ndim}; pass mesh['name']")
        group = group.get_group()
    if group is None:
        return tuple(range(dist.get_world_size())), dist.get_rank()
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"group must be a ProcessGroup that this process is a member of, a one-dimensional DeviceMesh or 'single', "
            f"got {group!r} on global rank {dist.get_rank()}"
        )
    ranks = tuple(dist.get_process_group_ranks(group))
    return ranks, ranks.index(dist.get_rank())


def _node(global_rank: int) -> tuple[int, int]:
    """This node and the number of nodes, as far as the launcher's environment tells."""
    local_world_size = _env("LOCAL_WORLD_SIZE", 0)
    if local_world_size:
        node_rank = _env("GROUP_RANK", global_rank // local_world_size)
        return node_rank, max(1, -(-_env("WORLD_SIZE", 1) // local_world_size))
    return _env("GROUP_RANK", 0), 1


def _env(name: str, default: int) -> int:
    """A whole number from the environment; what is no number counts as not set."""
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return default


def process_group(group: Any, topology: Topology) -> Any:
    """The process group behind a group as users give it; None for a process alone.

    Args:
        group: As for `find_topology`, which has accepted it.
        topology: What it found.
    """
    if isinstance(group, dist.ProcessGroup):
        return group
    if hasattr(group, "mesh_dim_names"):
        return group.get_group()
    return dist.group.WORLD if topology.world_size > 1 else None
