"""Counters of an engine, by value and in all."""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from syncstate.state import SharedState

__all__ = ["Counters", "Stats"]


class Counters(NamedTuple):
    """What happened to one value on this rank.

    Attributes:
        syncs: How often it was refreshed.
        failed: How often its computation failed.
    """

    syncs: int
    failed: int


class Stats(Mapping[str, Counters]):
    """Name -> counters, with totals as attributes.

    Args:
        state: The values.

    Attributes:
        syncs: How many syncs this rank took part in.
        failed: How many of them brought an error instead of values.
        collectives: How many collectives they took on the private group.
        seconds: Time spent in them on this rank, the sources' computation included.
    """

    def __init__(self, state: SharedState) -> None:
        self._state = state
        self.syncs = 0
        self.failed = 0
        self.collectives = 0
        self.seconds = 0.0
        # Counted by set of names, because the same ones come again and again; taken apart when somebody asks.
        self._synced: dict[tuple[str, ...], int] = {}
        self._failures: dict[str, int] = {}

    def count(self, names: tuple[str, ...], failed: Collection[str], seconds: float) -> None:
        """Add one sync.

        Args:
            names: The values that were due.
            failed: Those that failed; empty when values came.
            seconds: What the sync took on this rank.
        """
        self.syncs += 1
        self.seconds += seconds
        self._synced[names] = self._synced.get(names, 0) + (not failed)
        if failed:
            self.failed += 1
            for name in failed:
                self._failures[name] = self._failures.get(name, 0) + 1

    def __getitem__(self, name: str) -> Counters:
        self._state.record(name)  # raises for a name that was never added
        return Counters(
            sum(count for names, count in self._synced.items() if name in names), self._failures.get(name, 0)
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._state.names)

    def __len__(self) -> int:
        return len(self._state.names)
