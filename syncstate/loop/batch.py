"""The values of one sync, with everything that every sync of the same values needs, worked out once."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from syncstate.context import Context
from syncstate.digest import digest_text
from syncstate.loop.entry import Entry
from syncstate.record import Record
from syncstate.spec import TensorSpec
from syncstate.state import SharedState

__all__ = ["Batch", "Job"]

_LABEL_NAMES = 4


class Job(NamedTuple):
    """One computation. A tuple, because a sync of many small values spends its time on looking up attributes.

    Attributes:
        name: The value.
        stream: What its random numbers are named after: the name, and the node where each node draws its own.
        compute, record, spec: The entry's.
        scattered: Whether it returns an item for each rank.
    """

    name: str
    stream: str
    compute: Callable[[Context], Any]
    record: Record
    spec: TensorSpec | type | None
    scattered: bool


class Batch:
    """The entries of one frame.

    Args:
        entries: In the plan's order, at least one, of one scope.
        state: Whose values they are.
        where: What to say of the group that shares them, such as `" on node 1"`.
        stream: Suffix for the names of random streams.

    Attributes:
        state: As given.
        entries, names, records: The entries, and what they are called and what the state keeps of them.
        timeout: Seconds; the largest of the entries'.
        digest: 8 bytes that tell this set of names from another.
        label: The names, for messages.
        jobs: What the main process computes.
        collectors: (index, function) of the entries that collect.
        derives, applies: What runs on every rank when values come into force, by index.
        devices: (index, device) of the entries whose tensors are put somewhere.
        scattered: Indices of the entries of which each rank gets an item.
        rhythms: Those whose next point main announces with these values.
        lagged: Whether any of them comes into force later than it is computed.
        bare: Whether the payload is the list of values and nothing else.
        largest: Bytes of the largest payload so far, which is the same on all ranks; 0 before the first.
    """

    def __init__(self, entries: Sequence[Entry], state: SharedState, where: str = "", stream: str = "") -> None:
        self.state = state
        self.entries = tuple(entries)
        self.names = tuple(entry.name for entry in entries)
        self.records = tuple(entry.record for entry in entries)
        self.timeout = max(entry.timeout for entry in entries)
        self.digest = digest_text("\0".join(self.names))[:8]
        self.jobs = tuple(
            Job(e.name, e.name + stream, e.compute, e.record, e.definition.spec, e.definition.scattered)
            for e in entries
        )
        kept = [(index, entry.definition) for index, entry in enumerate(entries)]
        self.collectors = [(i, _collector(state, d.name, d.collect)) for i, d in kept if d.collect is not None]
        self.derives = [(i, d.derive) for i, d in kept if d.derive is not None]
        self.applies = [(i, d.apply) for i, d in kept if d.apply is not None]
        self.devices: list[tuple[int, torch.device]] = [(i, d.device) for i, d in kept if d.device is not None]
        self.scattered = [i for i, d in kept if d.scattered]
        self.rhythms = list(dict.fromkeys(entry.rhythm for entry in entries if entry.rhythm is not None))
        self.bare = not self.scattered and not self.rhythms
        self.lagged = any(entry.lag for entry in entries)
        self.largest = 0
        shown = ", ".join(map(repr, self.names[:_LABEL_NAMES]))
        rest = len(self.names) - _LABEL_NAMES
        self.label = f"sync of {shown}" + (f" and {rest} more" if rest > 0 else "") + where

    def intervals(self, announced: Sequence[int]) -> dict[str, int]:
        """Name -> steps to the next sync, for the entries with a rhythm; `announced` has one for each rhythm."""
        if not self.rhythms:
            return {}
        by_rhythm = dict(zip(map(id, self.rhythms), announced, strict=True))
        return {entry.name: by_rhythm[id(entry.rhythm)] for entry in self.entries if entry.rhythm is not None}


def _collector(state: SharedState, name: str, collect: Callable[[Context], Any] | str) -> Callable[[Context], Any]:
    if isinstance(collect, str):  # "observed"
        return lambda _: state._take_observed(name)
    return collect
