"""Requests of the ranks, each of which counts in one sync."""

from collections.abc import Sequence

from syncstate.context import Context

__all__ = ["Tally"]


class Tally:
    """Kept on main: how many requests of each rank have counted. The ranks send how many they have made in all.

    A sync that fails has consumed no version. The next one computes the same, by which it is known, and what the failed
    one had counted counts again.
    """

    def __init__(self) -> None:
        self._counted: dict[int, int] = {}  # by rank
        self._before: dict[int, int] = {}  # the same before the last sync
        self._version: int | None = None  # of the last sync

    def new(self, made: Sequence[int], ctx: Context) -> list[bool]:
        """Which ranks have made requests that no sync has counted; they have counted now.

        Args:
            made: How many each rank has made since it began, in rank order.
            ctx: Of the computation.
        """
        if not any(made):
            return [False] * len(made)
        version = _version(ctx)
        if version is not None and version == self._version:
            self._counted = self._before
        self._before, self._version = self._counted, version
        new = [count > self._before.get(rank, 0) for rank, count in enumerate(made)]
        self._counted = dict(enumerate(made))
        return new


def _version(ctx: Context) -> int | None:
    """The version that is computed: the counter of its random numbers. None in a context made by hand."""
    state = ctx.rng.bit_generator.state
    if state.get("bit_generator") != "Philox":
        return None
    return int(state["state"]["counter"][3]) or None
