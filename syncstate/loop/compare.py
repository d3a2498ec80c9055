"""Who holds what: for people who look at a run, and for `verify_values`."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from syncstate.digest import digest_bytes
from syncstate.errors import MismatchError
from syncstate.loop.difference import rank_ranges
from syncstate.loop.entry import Entry
from syncstate.state import SharedState
from syncstate.wire.codec import encode
from syncstate.wire.meeting import Meeting

__all__ = ["table", "verify"]

_WIDTH = 60


def _summary(state: SharedState, names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Name -> (digest of the value held, what to show of it)."""
    found = {}
    for name in names:
        if name not in state:
            found[name] = ("", "not ready")
            continue
        digest = digest_bytes(encode(state[name], allow_pickle=state.allow_pickle)).hex()
        found[name] = (digest, f"{_shown(state[name])} ({state.text(name)})")
    return found


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.numel() > 8:
        return f"tensor {list(value.shape)} {value.dtype}"
    text = " ".join(repr(value).split())
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."


def _groups(
    what: str, state: SharedState, names: Sequence[str], meeting: Meeting | None, step: int
) -> dict[str, dict[str, tuple[list[int], str]]]:
    """Name -> digest -> (ranks that hold it, what to show)."""
    mine = json.dumps(_summary(state, names))
    held = (
        {"": ([0], mine)} if meeting is None else meeting.compare(what, digest_bytes(mine.encode()).hex(), mine, step)
    )
    groups: dict[str, dict[str, tuple[list[int], str]]] = {name: {} for name in names}
    for ranks, text in held.values():
        for name, (digest, shown) in json.loads(text).items():
            group = groups.setdefault(name, {}).setdefault(digest, ([], shown))
            group[0].extend(ranks)
    return groups


def table(state: SharedState, meeting: Meeting | None, step: int) -> str:
    """A line for each value: which ranks hold what, equal ranks together. Collective.

    Args:
        state: The values.
        meeting: Where the ranks compare; None for a group of one.
        step: Where training is.
    """
    lines = []
    for name, held in _groups("inspect", state, state.names, meeting, step).items():
        sides = sorted(held.values())
        lines.append(f"{name}: " + "; ".join(f"{rank_ranges(ranks)}: {shown}" for ranks, shown in sides))
    return "\n".join(lines)


def verify(state: SharedState, entries: Sequence[Entry], meeting: Meeting, step: int) -> None:
    """Compare the values that have just come into force. Collective.

    Args:
        state: The values.
        entries: Which ones; those that ranks hold for themselves are left out.
        meeting: Where the ranks compare.
        step: Where training is.

    Raises:
        MismatchError: Ranks hold different values; names them and what they hold.
    """
    shared = [entry for entry in entries if entry.scope == "world" and not entry.definition.scattered]
    names = [entry.name for entry in shared if entry.definition.derive is None]
    if not names:  # as on all ranks: what nodes hold for themselves may come into force on some alone
        return
    for name, held in _groups("verify_values", state, names, meeting, step).items():
        if len(held) > 1:
            sides = "; ".join(f"{rank_ranges(ranks)}: {shown}" for ranks, shown in sorted(held.values()))
            raise MismatchError(f"value {name!r} differs between ranks after the sync at step {step}: {sides}")
