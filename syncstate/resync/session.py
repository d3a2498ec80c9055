"""A resync between ranks that are connected: who compares what with whom, and one report of it all."""

import json
import struct
from dataclasses import replace
from itertools import chain
from typing import Any

from syncstate.errors import ConfigError
from syncstate.resync.buckets import Pool
from syncstate.resync.choice import Choice
from syncstate.resync.digests import Digests
from syncstate.resync.items import WORLD, Item, Slot
from syncstate.resync.line import Line
from syncstate.resync.modes import Outcome, Talk
from syncstate.resync.optimizer import optimizer_items
from syncstate.resync.report import DriftReport, TensorDrift
from syncstate.resync.tensors import Selection, Survey
from syncstate.topology import Topology
from syncstate.wire.channel import Channel
from syncstate.wire.meeting import Meeting
from syncstate.wire.notes import Note
from syncstate.wire.rendezvous import meet

__all__ = ["Session", "look", "surveyor"]

_TALLY = struct.Struct("<qqqd")  # bytes of a list of drifts; tensors, values; this rank's share of the payload bytes


def surveyor(choice: Choice, topology: Topology) -> Survey:
    """What looks at a module for a choice."""
    return Survey(choice.include, choice.exclude, topology.global_ranks)


def look(module: Any, choice: Choice, survey: Survey) -> tuple[Selection, list[Item], dict[str, Slot]]:
    """What there is to compare on this rank: of the module, of optimizers, and where optimizers can hold more.

    Raises:
        ConfigError: Something cannot be compared, or an exclusion matches nothing.
    """
    selection = survey.look(module)
    added, places = optimizer_items(choice.optimizers, selection)
    selection.check_matched()
    return selection, added, places


class Session:
    """The connections of a resync.

    Args:
        topology: The group.
        channel: Its private channel; belongs to the caller.
        meeting: Where the ranks compare texts; None for a group of one.
        timeout: Seconds that each wait may take.
        group: The process group over which bulk that lies on an accelerator travels; None for none.
        on_device: Treat tensors on the CPU as if they were on an accelerator; for tests.

    Attributes:
        topology, channel: As given.
    """

    def __init__(
        self,
        topology: Topology,
        channel: Channel,
        meeting: Meeting | None,
        timeout: float,
        group: Any = None,
        *,
        on_device: bool = False,
    ) -> None:
        self.topology = topology
        self.channel = channel
        self._timeout = timeout
        self._pool = Pool()
        self._digests = Digests(on_device)
        self._world = Line(topology, topology.global_ranks, channel, meeting, timeout, group, direct=on_device)
        self._surveys: dict[Choice, Survey] = {}
        self._cohorts: dict[tuple[int, ...], tuple[Line, Channel]] = {}

    def run(self, module: Any, choice: Choice, step: int) -> DriftReport:
        """Compare, and repair what the mode repairs. Collective.

        Args:
            module: A module or a mapping of tensors.
            choice: What to do.
            step: Where training is.

        Raises:
            ConfigError: The module has nothing that could be compared, or an exclusion matches nothing.
            SyncStateError: Ranks hold other tensors, or one of them failed, died or did not come in time.
        """
        survey = self._surveys.get(choice)
        if survey is None:
            survey = self._surveys[choice] = surveyor(choice, self.topology)
        selection, added, places = look(module, choice, survey)
        by_cohort: dict[tuple[int, ...], list[Item]] = {WORLD: []}
        for item in sorted([*selection.items, *added], key=lambda item: item.name):
            by_cohort.setdefault(item.cohort, []).append(item)
        lonely = [cohort for cohort in by_cohort if len(cohort) == 1]
        unreplicated = tuple(item.name for cohort in lonely for item in by_cohort.pop(cohort))
        before, share = self._world.sent, 0.0
        found = Outcome([], 0, 0)
        for cohort in sorted(by_cohort):
            line = self._line(cohort)
            line.step, sent = step, line.sent
            talk = Talk(
                line, choice.mode, choice.source, choice.bucket_bytes, choice.plan, self._digests, self._pool
            )  # fmt: skip
            part = talk.run(by_cohort[cohort], {} if cohort else selection.sharded, places)
            found = Outcome(found.drifted + part.drifted, found.tensors + part.tensors, found.values + part.values)
            share += (line.sent - sent) / len(cohort) if cohort else 0.0
            if unreplicated and all(item.cohort in lonely for item in selection.items if item.travels):
                # Not before, so that ranks that shard in other ways have said so.
                self._world.apart = ConfigError(
                    f"resync: nothing is replicated: each of the {len(unreplicated)} tensors is sharded over all ranks "
                    "of the group, so there is nothing to compare. Shard over one dimension of a device mesh and "
                    "replicate over another, or leave out the resync"
                )
                raise self._world.apart
        if selection.sharded:
            found, share = self._merge(found, share)
        total = self._world.sent - before + round(share)
        drifted, tensors, values = found
        return DriftReport(
            step, drifted, total, choice.mode, tensors, values, unreplicated, self.topology.world_size
        )  # fmt: skip

    def _line(self, cohort: tuple[int, ...]) -> Line:
        """The line of ranks that hold the same shards; connected when it is first needed."""
        if cohort == WORLD:
            return self._world
        if cohort not in self._cohorts:
            mine, main = self.topology.global_ranks[self.topology.rank], self.topology.global_ranks[self.topology.main]
            topology = replace(
                self.topology,
                rank=cohort.index(mine),
                world_size=len(cohort),
                main=cohort.index(main) if main in cohort else 0,
                global_ranks=cohort,
            )
            meeting = meet(topology, self._timeout)
            channel = Channel(topology, meeting)
            line = Line(topology, self.topology.global_ranks, channel, meeting, self._timeout)
            self._cohorts[cohort] = (line, channel)
            channel.connect(self._timeout)
        return self._cohorts[cohort][0]

    def _merge(self, found: Outcome, share: float) -> tuple[Outcome, float]:
        """What all cohorts have found, the same on all ranks. Collective."""
        mine = json.dumps(found.drifted).encode()
        tallies = list(map(_TALLY.unpack, self._world.gather(_TALLY.pack(len(mine), *found[1:], share))))
        total = None
        if tallies:
            longest, tensors, values, shares = zip(*tallies, strict=True)
            total = _TALLY.pack(max(longest), max(tensors), max(values), sum(shares))
        size, tensors, values, share = _TALLY.unpack(self._world.spread(total, _TALLY.size))
        if size == len(b"[]"):
            return Outcome([], tensors, values), share
        union: dict[str, TensorDrift] = {}
        lists = self._world.gather(mine.ljust(size))
        for name, ranks, largest in chain.from_iterable(map(json.loads, lists)):
            known = union.get(name, TensorDrift(name, (), 0.0))
            together = tuple(sorted({*known.ranks, *ranks}))
            union[name] = TensorDrift(name, together, max(known.max_abs_diff, largest))
        merged = json.dumps(sorted(union.values())).encode() if lists else None
        told = json.loads(self._world.hand_round(merged))
        return Outcome([TensorDrift(name, tuple(ranks), most) for name, ranks, most in told], tensors, values), share

    def in_unison(self, error: BaseException) -> bool:
        """Whether all ranks have raised this error together, so that they can go on together."""
        return error is self._world.apart

    def tell(self, note: Note) -> None:
        """Tell the ranks that wait in a cohort's channel why this one does not come."""
        for _, channel in self._cohorts.values():
            channel.tell(replace(note, rank=channel.topology.rank))

    def close(self, *, abrupt: bool, step: int) -> None:
        """Drop the cohorts' channels."""
        while self._cohorts:
            _, channel = self._cohorts.popitem()[1]
            if not abrupt:
                channel.sign_off(step)
            channel.teardown(abrupt=abrupt)
