"""What the hosts have in common."""

from typing import Any

from syncstate.errors import ConfigError
from syncstate.state import SharedState
from syncstate.topology import find_topology

__all__ = ["check_saved_by_rank_0"]


def check_saved_by_rank_0(host: str, state: SharedState, group: Any, main: int | None, world_size: int) -> None:
    """Refuse what a host's checkpoint would lose: it holds what rank 0 has, and a source's state is where it computes.

    Args:
        host: Whose checkpoint it is, for the message.
        state: The values.
        group, main: The engine's.
        world_size: Number of processes that the host trains on.

    Raises:
        ConfigError: A source with a state of its own computes elsewhere than on rank 0.
    """
    definitions = [state.definition(name) for name in state.names]
    stateful = [definition.name for definition in definitions if definition.kept("world") and definition.stateful]
    if not stateful or world_size == 1:
        return
    topology = find_topology(group, main)
    where = "every process" if group == "single" else f"rank {topology.global_ranks[topology.main]}"
    if where != "rank 0":
        raise ConfigError(
            f"start: the source of value {stateful[0]!r} has a state, which is where it computes, on {where}, and "
            f"{host} saves that of rank 0; leave out main and group, or add the value with checkpoint=False"
        )
