"""The ranks of an engine meet, compare their plans, and connect: all of them, and on each node if values ask for it."""

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from syncstate.errors import MismatchError
from syncstate.loop.difference import differences
from syncstate.loop.exchange import Exchange, lanes
from syncstate.loop.options import Options
from syncstate.loop.plan import Plan
from syncstate.loop.rules import Rules
from syncstate.loop.side import Side
from syncstate.state import SharedState
from syncstate.topology import Topology
from syncstate.wire.channel import Channel, Wait
from syncstate.wire.meeting import Groups, Meeting
from syncstate.wire.notes import Note
from syncstate.wire.rendezvous import meet

__all__ = ["Opened", "open_sides", "tell"]


class Opened:
    """What a run talks through.

    Args:
        topology: The group.
        timeout: Seconds that each part of opening may take.

    Attributes:
        meeting: Where the ranks compare what they hold; None for a group of one.
        channels: The private groups: of the whole group, and of the node.
        sides: Scope -> the group that shares its values.
    """

    def __init__(self, topology: Topology, timeout: float) -> None:
        self.topology = topology
        self.timeout = timeout
        self.meeting: Meeting | None = meet(topology, timeout) if topology.world_size > 1 else None
        self.channels: list[Channel] = []
        self.sides: dict[str, Side] = {}

    def connect(self, state: SharedState, plan: Plan, options: Options) -> None:
        """Make the groups that the plan needs. Collective."""
        rules = Rules(plan.digest[:8], options.seed, options.frame_bytes, options.max_bytes, state.allow_pickle)
        scopes = {entry.scope for entry in plan.entries}
        asynchronous = {entry.scope for entry in plan.entries if entry.async_op}
        node: tuple[int, Topology] | None = None
        world = self.topology
        if "node" in scopes:
            node = find_node(self.topology, self.meeting)
            world = replace(world, node_rank=node[1].node_rank, num_nodes=node[1].num_nodes)
        self._side("world", state, world, self.meeting, rules, "world" in asynchronous, None)
        if node is not None:
            number, topology = node
            meeting = None
            if self.meeting is not None and topology.world_size > 1:
                meeting = self.meeting.part(f"node/{number}", topology)
            self._side("node", state, topology, meeting, rules, "node" in asynchronous, number)

    def _side(
        self,
        scope: str,
        state: SharedState,
        topology: Topology,
        meeting: Meeting | None,
        rules: Rules,
        asynchronous: bool,
        node: int | None,
    ) -> None:
        names = lanes(asynchronous)
        channel = Channel(topology, meeting, names)
        self.channels.append(channel)
        channel.connect(self.timeout)
        exchange = Exchange(channel, rules)
        exchange.warm_up(self.wait("start"), names)
        self.sides[scope] = Side(state, topology, exchange, node)

    def wait(self, what: str) -> Wait:
        """What to say when a part of opening fails."""
        return Wait(what, 0, self.timeout, time.monotonic())

    def close(self, *, abrupt: bool) -> None:
        """Drop the groups, those made last first; a channel leaves the place where its ranks have met."""
        if self.meeting is not None and not self.channels:
            self.meeting.depart()
        for channel in reversed(self.channels):
            channel.teardown(abrupt=abrupt)
        self.meeting = None


def open_sides(state: SharedState, plan: Plan, topology: Topology, options: Options) -> Opened:
    """Meet the other ranks, compare plans, make the private groups. Collective.

    Raises:
        MismatchError: The ranks have different plans; names the first keys that differ.
        SyncTimeout: A rank did not come.
    """
    opened = Opened(topology, options.seconds)
    groups: Groups = {}
    try:
        if opened.meeting is not None:
            groups = opened.meeting.compare("start", plan.digest.hex(), plan.text)
        if len(groups) < 2:
            opened.connect(state, plan, options)
            return opened
    except BaseException as error:
        tell(opened, error, 0)
        opened.close(abrupt=True)
        raise
    opened.close(abrupt=False)  # in good order: the ranks agree that they disagree, and can try again
    raise MismatchError("start: the plans of the ranks differ:\n  " + differences(groups))


def tell(opened: Opened, error: BaseException, step: int) -> Note:
    """Tell the other ranks of an error, in the group and on the node; returns the note that stands."""
    note = Note.of(error, opened.topology.rank, step)
    standing = [channel.tell(replace(note, rank=channel.topology.rank)) for channel in opened.channels]
    return standing[0] if standing else note


def find_node(topology: Topology, meeting: Meeting | None) -> tuple[int, Topology]:
    """The number of this node, and this process among the ranks of it. Collective.

    A node is what `GROUP_RANK` says, else `RANK` // `LOCAL_WORLD_SIZE`, else a `LOCAL_RANK` that starts again at 0,
    else a host name; what not every rank has does not count.

    Args:
        topology: The group.
        meeting: Where its ranks compare; None for a group of one.
    """
    mine = json.dumps([_number("GROUP_RANK"), _number("LOCAL_WORLD_SIZE"), _number("LOCAL_RANK"), socket.gethostname()])
    groups = {mine: ([0], "")} if meeting is None else meeting.compare("start: finding the nodes", mine)
    facts: list[Any] = [None] * topology.world_size
    for told, (ranks, _) in groups.items():
        for rank in ranks:
            facts[rank] = json.loads(told)
    labels = _nodes(facts, topology.global_ranks)
    order = list(dict.fromkeys(labels))
    members = [rank for rank, label in enumerate(labels) if label == labels[topology.rank]]
    number = order.index(labels[topology.rank])
    return number, Topology(
        rank=members.index(topology.rank),
        world_size=len(members),
        main=0,
        global_ranks=tuple(topology.global_ranks[rank] for rank in members),
        local_rank=topology.local_rank,
        node_rank=number,
        num_nodes=len(order),
    )


def _nodes(facts: Sequence[Sequence[Any]], global_ranks: Sequence[int]) -> list[Any]:
    """A label for the node of each rank."""
    group_ranks, sizes, local_ranks, hosts = zip(*facts, strict=True)
    if None not in group_ranks:
        return list(group_ranks)
    if None not in sizes:
        return [rank // size for rank, size in zip(global_ranks, sizes, strict=True)]
    if None not in local_ranks:
        labels, node = [], -1
        for local_rank in local_ranks:
            node += local_rank == 0 or node < 0
            labels.append(node)
        return labels
    return list(hosts)


def _number(name: str) -> int | None:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return None
