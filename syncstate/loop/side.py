"""One group of ranks that share values: the world, or a node."""

from collections.abc import Sequence
from typing import Any

from syncstate.loop.batch import Batch
from syncstate.loop.entry import Entry
from syncstate.loop.exchange import Exchange
from syncstate.loop.holder import Holder
from syncstate.state import SharedState
from syncstate.topology import Topology

__all__ = ["Side"]

_MOST_BATCHES = 256


class Side:
    """What one scope of an engine needs.

    Args:
        state: The values.
        topology: This process among the ranks of the scope.
        exchange: How values travel.
        node: The number of the node, for a scope of one node.

    Attributes:
        topology, exchange: As given.
        holder: Brings values into force.
        place: What all contexts have in common.
    """

    def __init__(self, state: SharedState, topology: Topology, exchange: Exchange, node: int | None = None) -> None:
        self._state = state
        self.topology = topology
        self.exchange = exchange
        self.holder = Holder(state, exchange.rules.seed, exchange.channel)
        self._where = "" if node is None else f" on node {node} (global ranks {list(topology.global_ranks)})"
        self._stream = "" if node is None else f"/node {node}"
        self._batches: dict[tuple[Entry, ...], Batch] = {}
        self.place: dict[str, Any] = {
            "rank": topology.rank,
            "world_size": topology.world_size,
            "local_rank": topology.local_rank,
            "node_rank": topology.node_rank,
            "num_nodes": topology.num_nodes,
            "is_main": topology.is_main,
        }

    def batch(self, entries: Sequence[Entry]) -> Batch:
        """The batch of these entries; the same ones come again and again."""
        key = tuple(entries)
        batch = self._batches.get(key)
        if batch is None:
            if len(self._batches) >= _MOST_BATCHES:
                self._batches.clear()
            batch = self._batches[key] = Batch(entries, self._state, self._where, self._stream)
        return batch
