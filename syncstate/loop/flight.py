"""What is on its way: computed at one step, in force from another one on."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from syncstate.loop.batch import Batch
from syncstate.loop.collection import Collection
from syncstate.loop.passage import Passage
from syncstate.loop.sources import Failure
from syncstate.wire.frame import Stamp

__all__ = ["Flight", "Sync"]


class Sync(NamedTuple):
    """One frame that all ranks expect.

    Attributes:
        batch: The values in it.
        stamp: How it is told from others.
    """

    batch: Batch
    stamp: Stamp


class Flight:
    """Values of one sync that come into force later.

    Args:
        fields: What the contexts of these values have in common; `step` and `epoch` are those of the computation.
        pending: Name -> the step from which it is in force.

    Attributes:
        fields, pending: As given; what has come into force, or never will, is taken out of `pending`.
        values: The values by name, once they have arrived.
        failure: Why there are none.
        intervals: Steps to the next point, of the values whose schedule main announces.
        room: Bytes that the payload needed.
        sync: What is on the wire, until it comes into force.
        collection, passage: Where it is there.
    """

    def __init__(self, fields: dict[str, Any], pending: Mapping[str, int]) -> None:
        self.fields = fields
        self.pending = dict(pending)
        self.values: dict[str, Any] | None = None
        self.failure: Failure | None = None
        self.intervals: dict[str, int] = {}
        self.room = 0
        self.sync: Sync | None = None
        self.collection: Collection | None = None
        self.passage: Passage | None = None

    @property
    def step(self) -> int:
        """The step at which it was computed."""
        step: int = self.fields["step"]
        return step

    @property
    def on_the_wire(self) -> "Sync":
        """What is on the wire. Only for a flight that is."""
        if self.sync is None:
            raise RuntimeError("a flight that has arrived is on the wire no more")
        return self.sync

    @property
    def arrived(self) -> bool:
        """Whether values or a failure are here."""
        return self.values is not None or self.failure is not None

    @property
    def apply_at(self) -> int:
        """The first step at which any of it comes into force."""
        return min(self.pending.values())

    def due(self, step: int) -> list[str]:
        """The names that come into force at this step."""
        return [name for name, apply_at in self.pending.items() if apply_at <= step]

    def drop(self, names: Iterable[str]) -> None:
        """These come into force, or never will."""
        for name in names:
            self.pending.pop(name, None)
