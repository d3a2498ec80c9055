"""Where the plans of ranks differ, key by key."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from syncstate.digest import digest_bytes
from syncstate.errors import CodecError
from syncstate.spec import describe
from syncstate.wire.codec import encode

__all__ = ["differences", "plan_text", "rank_ranges"]


def plan_text(content: Mapping[str, Any]) -> str:
    """A nested plan as text: the same for equal plans, whatever the order of their keys."""
    return json.dumps(_plain(content), sort_keys=True)


def _plain(content: Any) -> Any:
    """Nested mappings down to leaves that are texts, so that any object of a user's config can be compared."""
    if isinstance(content, Mapping):
        return {str(key): _plain(value) for key, value in content.items()} or "{}"
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        return {str(index): _plain(value) for index, value in enumerate(content)} or "[]"
    if isinstance(content, (set, frozenset)):  # whose own text has no order
        return f"{{{', '.join(sorted(map(str, map(_plain, content))))}}}"
    if isinstance(content, (torch.Tensor, np.ndarray)):  # whose own text leaves out what is long
        with suppress(CodecError):
            return f"{describe(content)} {digest_bytes(encode(content)).hex()[:12]}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(content))  # where an object lies is each process's own


def differences(groups: Mapping[str, tuple[list[int], str]], limit: int = 5) -> str:
    """Where plans differ: the keys in order, with the value and the ranks of each side.

    Args:
        groups: Digest -> (ranks, text), as `Meeting.compare` returns them.
        limit: How many keys to list.
    """
    lines = _lines("", [(ranks, json.loads(text)) for ranks, text in sorted(groups.values())])
    more = [f"and {len(lines) - limit} more"] if len(lines) > limit else []
    return "\n  ".join([*lines[:limit], *more])


def _lines(path: str, sides: list[tuple[list[int], Any]]) -> list[str]:
    if all(isinstance(content, dict) for _, content in sides):
        lines = []
        for key in sorted(set().union(*(content for _, content in sides))):
            inner = [(ranks, content.get(key)) for ranks, content in sides]
            lines += _lines(f"{path}.{key}" if path else key, inner)
        return lines
    held: dict[str, list[int]] = {}
    for ranks, content in sides:
        shown = "missing" if content is None else "there" if isinstance(content, dict) else content
        held.setdefault(shown, []).extend(ranks)
    if len(held) == 1:
        return []
    return [f"{path}: " + "; ".join(f"{shown} on {rank_ranges(ranks)}" for shown, ranks in held.items())]


def rank_ranges(ranks: Iterable[int]) -> str:
    """Ranks in few words, such as `ranks 0-2,5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    told = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return ("rank " if len(runs) == 1 and runs[0][0] == runs[0][1] else "ranks ") + told
