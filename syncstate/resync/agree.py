"""What ranks tell each other first: one short record from each to main, and main's verdict to all."""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from syncstate.digest import digest_text
from syncstate.errors import MismatchError
from syncstate.loop.difference import differences, plan_text
from syncstate.resync.digests import SIZE, Digests
from syncstate.resync.items import Item, Slot
from syncstate.resync.line import Line
from syncstate.resync.optimizer import align

__all__ = ["Agreement", "agree"]

# Digests of the plan, the structure and the optimizers' layout; the step. Behind it the digests of up to 60 groups of
# items. Every record has this size, whatever a rank holds: a gather of unequal sizes would end the process.
_HEAD = struct.Struct("<16s16s16sq8x")
_GROUPS = 60
_RECORD = _HEAD.size + _GROUPS * SIZE
_VERDICT = struct.Struct("<B7xQ")
_EQUAL, _DIFFERENT, _APART, _LAYOUT = range(4)


@dataclass
class Agreement:
    """What the ranks of a line have found.

    Attributes:
        items: In an order that all ranks share; with one for everything that any rank's optimizer holds.
        suspects: Numbers of the items among which some differ; empty where all are equal, or where nobody asked.
        lacking: Rank in the line -> names of what its optimizer lacks.
    """

    items: list[Item]
    suspects: list[int] = field(default_factory=list)
    lacking: dict[int, set[str]] = field(default_factory=dict)


def agree(
    line: Line,
    items: list[Item],
    more: Mapping[str, str],
    places: Mapping[str, Slot],
    plan: Mapping[str, object],
    digests: Digests | None,
) -> Agreement:
    """Make sure that the ranks do the same to the same tensors, and find out whether any differ. Collective.

    Args:
        line: The ranks.
        items: What this rank holds.
        more: Name -> description of what else must be the same.
        places: Where an optimizer can hold more.
        plan: What the resync is to do; the same on all ranks.
        digests: How to compare contents; None not to.

    Raises:
        MismatchError: Ranks are at different steps, or hold different tensors; the same text on all ranks.
    """
    lacking: dict[int, set[str]] = {}
    while True:
        size = max(1, -(-len(items) // _GROUPS))
        found = b"".join(digests.groups(items, size)) if digests is not None else b""
        structure = {**more, **{item.name: item.about for item in items if item.slot is None}}
        layout = {item.name: item.about for item in items if item.slot is not None}
        head = _HEAD.pack(_digest(plan), _digest(structure), _digest(layout), line.step)
        records = line.gather((head + found).ljust(_RECORD, b"\0"))
        code, groups = _VERDICT.unpack(line.spread(_judge(records), _VERDICT.size))
        if code == _APART:
            line.apart = _apart(line, {"resync": plan, "step": line.step, "tensors": structure})
            raise line.apart
        if code != _LAYOUT:
            suspects = [i for i in range(len(items)) if groups >> (i // size) & 1] if code == _DIFFERENT else []
            return Agreement(items, suspects, lacking)
        sides = line.compare(_digest(layout).hex(), json.dumps(layout, sort_keys=True))
        layouts = [(ranks, json.loads(text)) for ranks, text in sides.values()]
        items = align(items, [held for _, held in layouts], places, line.members)
        everything = {item.name for item in items if item.slot is not None}
        lacking = {rank: everything - set(held) for ranks, held in layouts for rank in ranks}


def _digest(content: Mapping[str, object]) -> bytes:
    return digest_text(json.dumps(content, sort_keys=True, default=str))


def _judge(records: Sequence[bytes]) -> bytes | None:
    """Main's verdict; None elsewhere."""
    if not records:
        return None
    heads = [_HEAD.unpack_from(record) for record in records]
    plan, structure, layout, step = zip(*heads, strict=True)
    if any(len(set(column)) > 1 for column in (plan, structure, step)):
        return _VERDICT.pack(_APART, 0)
    if len(set(layout)) > 1:
        return _VERDICT.pack(_LAYOUT, 0)
    if len(set(records)) == 1:
        return _VERDICT.pack(_EQUAL, 0)
    groups = 0
    for number in range(_GROUPS):
        begin = _HEAD.size + number * SIZE
        if len({record[begin : begin + SIZE] for record in records}) > 1:
            groups |= 1 << number
    return _VERDICT.pack(_DIFFERENT, groups)


def _apart(line: Line, content: Mapping[str, object]) -> MismatchError:
    text = plan_text(content)
    groups = line.compare(digest_text(text).hex(), text)
    told = {record: (line.named(ranks), said) for record, (ranks, said) in groups.items()}
    return MismatchError(
        f"resync at step {line.step}: the ranks differ:\n  {differences(told)}\n"
        "Every rank must call it at the same steps, with the same module"
    )
