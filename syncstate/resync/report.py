"""What a resync found, for programs and for people."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from syncstate.loop.difference import rank_ranges

__all__ = ["DriftReport", "TensorDrift"]

_MOST_LINES = 50
_MOST_NAMES = 5


class TensorDrift(NamedTuple):
    """One tensor that differed between replicas.

    Attributes:
        name: Its name in the module, without the prefixes of wrappers; `optimizer.state.<parameter>.<key>` or
            `optimizer.param_groups.<index>.<key>` for what an optimizer holds.
        ranks: The ranks in the group that differed from the source.
        max_abs_diff: The largest absolute difference of an element over those ranks. NaN beside a number counts as
            infinity; so does what has no difference, such as a missing state or a text. It is 0 where only the bits
            differ (0.0 and -0.0).
    """

    name: str
    ranks: tuple[int, ...]
    max_abs_diff: float


@dataclass(frozen=True)
class DriftReport:
    """What one resync found, the same on every rank. True when something had drifted; its text is a table.

    Attributes:
        step: The step at which it ran.
        drifted: The tensors that differed from the source before the resync; empty after `mode="average"`, which
            expects them to.
        bytes_sent: Payload bytes on the wire: those of every broadcast and reduction once, and what each rank sent to
            the main process.
        mode: What was done: `"check"`, `"repair"`, `"copy"` or `"average"`.
        tensors: How many tensors were looked at.
        values: How many plain values of optimizers.
        unreplicated: Names of tensors that no other rank of the group holds, because they are sharded over all of
            them. Nothing can be said of these.
        world_size: Number of ranks in the group.
    """

    step: int
    drifted: list[TensorDrift] = field(default_factory=list)
    bytes_sent: int = 0
    mode: str = "check"
    tensors: int = 0
    values: int = 0
    unreplicated: tuple[str, ...] = ()
    world_size: int = 1

    def __bool__(self) -> bool:
        return bool(self.drifted)

    def __str__(self) -> str:
        lines = [f"resync ({self.mode}) at step {self.step}: {self._verdict()}; {_size(self.bytes_sent)} sent"]
        if self.drifted:
            lines += _table(self.drifted)
        if self.unreplicated:
            lines.append(
                f"  not compared, because no other rank of the group holds them: {_few(self.unreplicated)} "
                f"({_count(len(self.unreplicated), 'tensor')})"
            )
        return "\n".join(lines)

    def _verdict(self) -> str:
        looked = _count(self.tensors, "tensor")
        if self.values:
            looked = f"{self.tensors + self.values} tensors and values"
        where = _count(self.world_size, "rank")
        if self.mode == "average":
            return f"{looked} averaged over {where}"
        if not self.drifted:
            return f"{looked} equal on {where}"
        done = {"check": "differ", "repair": "differed and are repaired", "copy": "differed and are replaced"}
        return f"{len(self.drifted)} of {looked} {done[self.mode]}, on {where}"


def _table(drifted: Sequence[TensorDrift]) -> list[str]:
    rows = [("name", "ranks", "largest difference")]
    rows += [(drift.name, _ranks(drift.ranks), _number(drift.max_abs_diff)) for drift in drifted[:_MOST_LINES]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    if len(drifted) > _MOST_LINES:
        lines.append(f"  and {len(drifted) - _MOST_LINES} more")
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    return rank_ranges(ranks).split(" ", 1)[1]


def _number(value: float) -> str:
    return "none to give" if math.isinf(value) else f"{value:.6g}"


def _few(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _size(number: int) -> str:
    if number < 10_000:
        return f"{number} bytes"
    return f"{number / 1e3:.0f} KB" if number < 10_000_000 else f"{number / 1e6:.0f} MB"
