"""Values come into force on this rank: what a sync or a checkpoint brings is derived, held and applied."""

import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from syncstate.context import Context
from syncstate.loop.batch import Batch
from syncstate.loop.exchange import Exchange
from syncstate.loop.plan import Entry
from syncstate.loop.sources import Failure, describe
from syncstate.loop.stats import Stats
from syncstate.state import SharedState
from syncstate.topology import Topology
from syncstate.wire.channel import Channel, Wait

__all__ = ["Refresh"]

_MOST_BATCHES = 256


class Refresh:
    """Refreshes values of a state through an exchange.

    Args:
        state: The values.
        seed: The engine's seed.
        topology: This process in the group.
        channel, exchange: How values travel.
    """

    def __init__(self, state: SharedState, seed: int, topology: Topology, channel: Channel, exchange: Exchange) -> None:
        self._state = state
        self._seed = seed
        self._channel = channel
        self._exchange = exchange
        self._batches: dict[tuple[Entry, ...], Batch] = {}
        self._unsettled: Batch | None = None
        self._rank = topology.rank
        self._place: dict[str, Any] = {
            "rank": topology.rank,
            "world_size": topology.world_size,
            "local_rank": topology.local_rank,
            "node_rank": topology.node_rank,
            "num_nodes": topology.num_nodes,
            "is_main": topology.is_main,
        }

    def sync(self, due: Sequence[Entry], place: Mapping[str, Any], stats: Stats) -> tuple[str, ...] | Failure:
        """Refresh values on every rank, in one sync; returns their names, or why main sent none.

        Args:
            due: Which values; at least one.
            place: `step`, `epoch`, `model` and `host` of the contexts.
            stats: Where the sync is counted.

        Raises:
            SyncStateError: The sync failed for a reason that ends the engine.
        """
        begun, collectives = time.monotonic(), self._channel.collectives
        batch = self._batch(due)
        fields = {**self._place, **place}
        if self._unsettled is not None and self._place["is_main"]:
            self.settle(fields["step"])
        result = self._exchange.run(batch, fields)
        failed: Sequence[str] = ()
        if isinstance(result, Failure):
            failed = result.names
        else:
            steps = (fields["step"], fields["step"])
            for record, value in zip(batch.records, result, strict=True):
                record.version += 1
                record.sent = value
                record.steps = steps
            self._hold(batch, result, fields)
        stats.count(batch.names, failed, self._channel.collectives - collectives, time.monotonic() - begun)
        return result if isinstance(result, Failure) else batch.names

    def settle(self, step: int) -> None:
        """Wait until every rank has applied what it received, if it had anything to apply.

        Args:
            step: Where training is.

        Raises:
            SyncStateError: A rank failed to, or did not answer in time.
        """
        batch, self._unsettled = self._unsettled, None
        if batch is not None:
            self._channel.settle(
                Wait(f"{batch.label}, waiting until every rank has applied it", step, batch.timeout, time.monotonic())
            )

    def take(self, restored: Sequence[Entry], place: Mapping[str, Any]) -> None:
        """Bring values into force that a checkpoint has put into the records.

        Args:
            restored: Which values; at least one.
            place: `step` and `epoch` of the checkpoint.
        """
        self._hold(self._batch(restored), [entry.record.sent for entry in restored], {**self._place, **place})

    def _hold(self, batch: Batch, values: list[Any], fields: dict[str, Any]) -> None:
        if not batch.derives and not batch.applies:
            self._state._update(batch.names, values)
            return
        held = list(values)
        contexts = {
            entry.name: Context.of(fields, entry.record.sent, self._seed, entry.name, entry.record.version)
            for entry in batch.entries
        }
        for index, derive in batch.derives:
            name = batch.names[index]
            with self._telling("derive", name, fields["step"]):
                held[index] = derive(values[index], contexts[name])
        self._state._update(batch.names, held)
        for name, apply in batch.applies:
            with self._telling("apply", name, fields["step"]):
                apply(self._state[name], contexts[name])
        self._channel.acknowledge()
        self._unsettled = batch

    @contextmanager
    def _telling(self, what: str, name: str, step: int) -> Iterator[None]:
        """Run a user's function on this rank; its error reaches the others with value, step, rank and traceback."""
        try:
            yield
        except Exception as error:
            rank = self._rank
            told = f"{what} of value {name!r} failed at step {step} on rank {rank}: {describe(error)}"
            text = "".join(traceback.format_exception(error)).rstrip()
            self._channel.tell("peer", step, f"{told}\nTraceback on rank {rank}:\n{text}")
            error.add_note(f"syncstate: raised by {what} of value {name!r} at step {step} on rank {rank}")
            raise

    def _batch(self, entries: Sequence[Entry]) -> Batch:
        """The batch of these entries; the same ones come again and again."""
        key = tuple(entries)
        batch = self._batches.get(key)
        if batch is None:
            if len(self._batches) >= _MOST_BATCHES:
                self._batches.clear()
            batch = self._batches[key] = Batch(entries)
        return batch
