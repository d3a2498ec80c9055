"""Syncs of one group of ranks: what main computes is sent, and every rank gets the same values."""

import time
from collections.abc import Mapping
from typing import Any

import torch

from syncstate.errors import CodecError
from syncstate.loop.batch import Batch
from syncstate.loop.collection import Collection
from syncstate.loop.guard import RandomGuard
from syncstate.loop.line import Line
from syncstate.loop.passage import Inbound, Outbound, Passage
from syncstate.loop.payload import Contents, Sealed, seal
from syncstate.loop.rules import Rules
from syncstate.loop.sources import Failure, Refused, cannot_travel, compute
from syncstate.wire.channel import Channel, Wait
from syncstate.wire.codec import decode, encode
from syncstate.wire.frame import Stamp
from syncstate.wire.handing import hand_round

__all__ = ["MOST_IN_FLIGHT", "Exchange", "lanes"]

MOST_IN_FLIGHT = 8


def lanes(asynchronous: bool) -> tuple[str, ...]:
    """The lanes that an exchange needs of its channel."""
    return ("blocking", "frames", "bodies") if asynchronous else ("blocking",)


class Exchange:
    """Runs syncs over a channel.

    Args:
        channel: The private groups.
        rules: What all syncs have in common.

    Attributes:
        channel, rules: As given.
        blocking, asynchronous: Where the syncs of each kind travel.
    """

    def __init__(self, channel: Channel, rules: Rules) -> None:
        self.channel = channel
        self.rules = rules
        self.blocking = Line(channel, rules, "blocking", "blocking", 1)
        self.asynchronous = Line(channel, rules, "frames", "bodies", MOST_IN_FLIGHT)
        self._guard = RandomGuard()

    def collect(self, line: Line, batch: Batch, stamp: Stamp, fields: dict[str, Any]) -> Collection:
        """Run the collecting functions of this rank, and post their results to main."""
        return Collection(line, batch, stamp, fields, self._guard)

    def depart(
        self,
        line: Line,
        batch: Batch,
        stamp: Stamp,
        fields: dict[str, Any],
        collected: Mapping[int, Any] | Failure | None,
    ) -> Passage:
        """Compute on main and post what came of it; post its receipt elsewhere.

        Args:
            line: Where it travels.
            batch, stamp: What is due.
            fields: What the contexts of these computations have in common.
            collected: What the ranks collected, or why nothing was.

        Raises:
            SyncStateError: The sync failed for a reason that ends the engine.
        """
        frame = line.frame(batch)
        if not self.channel.topology.is_main:
            return Inbound(line, batch, stamp, frame)
        outbound = Outbound(line, batch, stamp, frame)
        if isinstance(collected, Failure):
            outbound.refuse(collected)
            return outbound
        with self._guard:
            try:
                sealed = self._sealed(batch, fields, collected, frame.capacity)
                outbound.write(sealed)
            except Refused as error:
                outbound.refuse(error.failure)
            except CodecError as error:
                rank = self.channel.topology.rank
                text = f"{batch.label} at step {stamp.step} on main (rank {rank}): CodecError: {error}"
                outbound.refuse(Failure("compute", text, list(batch.names), error))
            else:
                outbound.send(sealed)  # in the guard, which puts the generators back in the shadow of the wire
        return outbound

    def _sealed(self, batch: Batch, fields: dict[str, Any], collected: Mapping[int, Any] | None, room: int) -> Sealed:
        rules, topology = self.rules, self.channel.topology
        values = compute(batch, fields, rules, topology.rank, collected)
        now = time.monotonic()
        intervals = [rhythm.decide(fields["step"], now) for rhythm in batch.rhythms]
        try:
            return seal(batch, values, intervals, topology.world_size, room, rules.allow_pickle)
        except CodecError as error:
            raise cannot_travel(batch, values, error, fields["step"], topology.rank, rules.allow_pickle) from error

    def run(self, batch: Batch, fields: dict[str, Any]) -> Contents | Failure:
        """One blocking sync, from collecting to what every rank received.

        Raises:
            SyncStateError: The sync failed for a reason that ends the engine.
        """
        line = self.blocking
        stamp = line.stamp(batch, fields)
        if not batch.collectors:
            return self.depart(line, batch, stamp, fields, None).finish()
        collection = self.collect(line, batch, stamp, fields)
        return concluded(self.depart(line, batch, stamp, fields, collection.finish()).finish(), collection)

    def warm_up(self, wait: Wait, names: tuple[str, ...]) -> None:
        """Send a message that says nothing on each lane: connections are made, and every rank has them.

        Raises:
            SyncStateError: The groups do not work.
        """
        for name in names:
            nothing = torch.zeros(64, dtype=torch.uint8, device="cpu")
            self.channel.finish(self.channel.begin_broadcast(nothing, wait, lane=name))

    def hand_round(self, value: Any, root: int, wait: Wait) -> Any:
        """Bring a value of one rank to all.

        Args:
            value: The value on the rank `root`; ignored elsewhere.
            root: The rank that has it.
            wait: What to say when it fails.
        """
        data = encode(value, allow_pickle=self.rules.allow_pickle) if self.channel.topology.rank == root else None
        return decode(hand_round(self.channel, data, root, wait), allow_pickle=self.rules.allow_pickle)


def concluded(result: Contents | Failure, collection: Collection) -> Contents | Failure:
    """What a sync with a collection brought.

    A failure is raised here from this rank's own exception, and what this rank had observed goes into the next sync.
    """
    if isinstance(result, Failure):
        collection.give_back()
        return result._replace(cause=collection.cause or result.cause)
    return result
