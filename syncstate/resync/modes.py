"""What a resync does: check, repair, copy, average. Each is a talk between the ranks that hold the same tensors."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from syncstate.resync.agree import Agreement, agree
from syncstate.resync.bits import EQUAL
from syncstate.resync.buckets import Pool, fill, reduce
from syncstate.resync.digests import SIZE, Digests
from syncstate.resync.items import Item, Slot
from syncstate.resync.line import Line
from syncstate.resync.report import TensorDrift
from syncstate.resync.transfer import Transfer, device_of, with_memory, write

__all__ = ["MODES", "SOURCES", "Outcome", "Talk"]

MODES = ("check", "repair", "copy", "average")
SOURCES = ("main", "majority")

_NOBODY = -1  # where no rank differs, none is the source
_MOST_DIGESTS = 4096  # that a rank sends in one message
_CPU = torch.device("cpu")


class Outcome(NamedTuple):
    """What a talk has found.

    Attributes:
        drifted: What differed.
        tensors, values: How many there are, on any rank.
    """

    drifted: list[TensorDrift]
    tensors: int
    values: int


@dataclass
class Talk:
    """One resync between the ranks of a line.

    Args:
        line: The ranks.
        mode: One of `MODES`.
        source: One of `SOURCES`.
        bucket_bytes: Most bytes of a message.
        plan: What must be the same on all ranks.
        digests: How contents are compared.
        pool: Memory.
    """

    line: Line
    mode: str
    source: str
    bucket_bytes: int
    plan: Mapping[str, object]
    digests: Digests
    pool: Pool

    def run(self, items: list[Item], more: Mapping[str, str], places: Mapping[str, Slot]) -> Outcome:
        """Do it. Collective.

        Args:
            items: What this rank holds.
            more: Name -> description of what else must be the same on all ranks.
            places: Where an optimizer can hold more.

        Returns:
            What was found; the same on all ranks.

        Raises:
            SyncStateError: Ranks hold other tensors, or one of them failed, died or did not come in time.
        """
        alone = self.line.topology.world_size == 1
        compares = self.mode in ("check", "repair") and not alone
        found = agree(self.line, items, more, places, self.plan, self.digests if compares else None)
        values = sum(item.is_value for item in found.items)
        tensors = sum(not item.is_structure for item in found.items) - values
        if self.mode == "average" and not alone:
            self._average(found)
        if self.mode == "average" or alone:
            return Outcome([], tensors, values)
        transfer = Transfer(
            self.line, found.items, found.lacking, self.bucket_bytes, self.pool, writes=self.mode != "check"
        )
        main = self.line.topology.main
        roots = self._narrow(found) if compares else dict.fromkeys(with_memory(found.items), main)
        transfer.run(roots)
        differing = list(roots) if compares else self._moved(transfer.apart)
        return Outcome(self._told(found.items, {n: transfer.apart[n] for n in differing}), tensors, values)

    def _narrow(self, found: Agreement) -> dict[int, int]:
        """Which of the suspects differ, and whose is right."""
        roots: dict[int, int] = {}
        for begin in range(0, len(found.suspects), _MOST_DIGESTS):
            numbers = found.suspects[begin : begin + _MOST_DIGESTS]
            mine = self.digests.each([found.items[number] for number in numbers])
            held = self.line.gather(b"".join(mine))
            decided = None
            if held:
                columns = ([side[at : at + SIZE] for side in held] for at in range(0, len(held[0]), SIZE))
                decided = struct.pack(f"<{len(numbers)}i", *map(self._decide, columns))
            chosen = struct.unpack(f"<{len(numbers)}i", self.line.spread(decided, 4 * len(numbers)))
            roots.update({number: root for number, root in zip(numbers, chosen, strict=True) if root != _NOBODY})
        return roots

    def _decide(self, column: Sequence[bytes]) -> int:
        """The rank whose tensor is right, from the digests of all ranks."""
        main = self.line.topology.main
        sides: dict[bytes, list[int]] = {}
        for rank, digest in enumerate(column):
            sides.setdefault(digest, []).append(rank)
        if len(sides) == 1:
            return _NOBODY
        if self.source == "majority":
            most = max(map(len, sides.values()))
            largest = [ranks for ranks in sides.values() if len(ranks) == most]
            if len(largest) == 1 and main not in largest[0]:
                return largest[0][0]
        return main

    def _moved(self, apart: Mapping[int, float]) -> list[int]:
        """After a copy: the numbers of the items that had differed on any rank."""
        numbers = list(apart)
        differing = bytes(apart[number] != EQUAL for number in numbers)
        counts = self.line.gather(struct.pack("<q", sum(differing)))
        total = sum(struct.unpack("<q", count)[0] for count in counts)
        (total,) = struct.unpack("<q", self.line.spread(struct.pack("<q", total) if counts else None, 8))
        if not total:
            return []
        sides = self.line.gather(differing)
        anywhere = bytes(map(max, zip(*sides, strict=True))) if sides else None
        return [n for n, hit in zip(numbers, self.line.spread(anywhere, len(numbers)), strict=True) if hit]

    def _told(self, items: Sequence[Item], apart: Mapping[int, float]) -> list[TensorDrift]:
        """The report of what differed, from what each rank has found about its own."""
        numbers, world = list(apart), self.line.topology.world_size
        cell = struct.Struct(f"<d{-(-world // 8)}s")  # the largest difference, and a bit for each rank
        drifted = []
        for begin in range(0, len(numbers), _MOST_DIGESTS):
            part = numbers[begin : begin + _MOST_DIGESTS]
            row = struct.Struct(f"<{len(part)}d")
            rows = self.line.gather(row.pack(*(apart[number] for number in part)))
            summary = None
            if rows:
                columns = zip(*map(row.unpack, rows), strict=True)
                summary = b"".join(cell.pack(max(column), _bitmap(column)) for column in columns)
            cells = cell.iter_unpack(self.line.spread(summary, cell.size * len(part)))
            for number, (largest, bitmap) in zip(part, cells, strict=True):
                ranks = [rank for rank in range(world) if bitmap[rank // 8] >> rank % 8 & 1]
                drifted.append(TensorDrift(items[number].name, tuple(self.line.named(ranks)), largest))
        return drifted

    def _average(self, found: Agreement) -> None:
        """The mean over ranks; of what has none, main's."""
        gone = set().union(*found.lacking.values())
        rest: dict[int, int] = {}
        means: dict[tuple[str, torch.dtype], list[tuple[int, Tensor]]] = {}
        devices = {"cpu": _CPU}
        for number in with_memory(found.items):
            item = found.items[number]
            tensor = item.tensor
            if tensor is None or item.name in gone or not (tensor.is_floating_point() or tensor.is_complex()):
                rest[number] = self.line.topology.main
                continue
            numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            device = device_of(item)
            devices.setdefault(device.type, device)
            wide = torch.float64 if numbers.dtype is torch.float64 else torch.float32
            means.setdefault((device.type, wide), []).append((number, numbers))
        transfer = Transfer(self.line, found.items, found.lacking, self.bucket_bytes, self.pool, writes=True)
        transfer.run(rest)
        buckets = []
        for kind, wide in sorted(means, key=str):
            device = devices[kind] if self.line.carries(devices[kind]) else _CPU
            buckets += fill(means[kind, wide], self.bucket_bytes, device, wide)
        reduce(self.line, buckets, self.pool, lambda *came: self._take_mean(found.items, *came))

    def _take_mean(self, items: Sequence[Item], number: int, view: Tensor, total: Tensor) -> None:
        count = self.line.topology.world_size
        if view.dtype == total.dtype and view.device == total.device and view.is_contiguous():
            torch.div(total, count, out=view)
        else:
            write(items[number].name, view, total.div_(count).to(view.device, view.dtype), self.line.topology.rank)


def _bitmap(column: Sequence[float]) -> bytes:
    """A bit for each rank whose own differs."""
    bits = sum(1 << rank for rank, difference in enumerate(column) if difference != EQUAL)
    return bits.to_bytes(-(-len(column) // 8), "little")
