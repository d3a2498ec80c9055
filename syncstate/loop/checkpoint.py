"""What of an engine goes into a checkpoint: plain containers, numbers, text and byte tensors only.

    {"version": 1, "seen": [step, epoch],
     "values": {name: {"data": uint8 tensor, "version": int, "computed_at": int, "applied_at": int}},
     "sources": {name: uint8 tensor}}

Values are stored in the encoding in which they travel, so every type comes back as it was.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from syncstate.digest import digest_bytes
from syncstate.errors import CodecError, ConfigError
from syncstate.loop.plan import Entry
from syncstate.state import SharedState
from syncstate.wire.codec import decode, encode

__all__ = ["Restored", "parse", "restore", "snapshot"]

_VERSION = 1
_log = logging.getLogger("syncstate")


class Restored(NamedTuple):
    """A checkpoint that was loaded and not yet put into force.

    Attributes:
        content: The dictionary, checked.
        seen: The last step and epoch.
        record: A digest of the values, which tells whether the ranks loaded the same.
    """

    content: dict[str, Any]
    seen: tuple[int, int]
    record: str


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().contiguous().numpy().data)


def snapshot(state: SharedState, seen: tuple[int, int], *, is_main: bool) -> dict[str, Any]:
    """What goes into a checkpoint. Local: never communicates.

    Args:
        state: The values.
        seen: Last step and epoch.
        is_main: Whether the sources of this process have computed, so that their own states count.
    """
    values, sources = {}, {}
    for name in state.names:
        record, definition = state.record(name), state.definition(name)
        if definition.checkpoint and record.version:
            values[name] = {
                "data": _tensor(encode(record.sent, allow_pickle=state.allow_pickle)),
                "version": record.version,
                "computed_at": record.steps[0],
                "applied_at": record.steps[1],
            }
        if definition.checkpoint and definition.stateful and is_main:
            sources[name] = _tensor(encode(definition.source.state_dict(), allow_pickle=state.allow_pickle))
    return {"version": _VERSION, "seen": list(seen), "values": values, "sources": sources}


def parse(content: Any) -> Restored:
    """Check what a user loads.

    Raises:
        ConfigError: Not a state of an engine, or of a later version.
    """
    if not isinstance(content, Mapping) or not {"version", "seen", "values", "sources"} <= content.keys():
        raise ConfigError(f"load_state_dict: this is no state of a SyncEngine, got {type(content).__name__}")
    if content["version"] != _VERSION:
        raise ConfigError(
            f"load_state_dict: the state has version {content['version']!r}, this syncstate reads version {_VERSION}"
        )
    try:
        seen = (int(content["seen"][0]), int(content["seen"][1]))
        summary = [str(seen)]  # without the sources' own states, which only main has
        for name, value in sorted(content["values"].items()):
            steps = f"{value['version']} {value['computed_at']} {value['applied_at']}"
            summary.append(f"{name} {steps} {digest_bytes(_bytes(value['data'])).hex()}")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"load_state_dict: the state is damaged: {type(error).__name__}: {error}") from error
    return Restored(dict(content), seen, digest_bytes("\n".join(summary).encode()).hex())


def restore(restored: Restored, entries: Sequence[Entry], state: SharedState, *, is_main: bool) -> list[Entry]:
    """Put a checkpoint's values into the records; returns the entries that have one now.

    Raises:
        ConfigError: A value or a source's state that cannot be read.
    """
    content = restored.content
    known = {entry.name for entry in entries}
    unknown = sorted((set(content["values"]) | set(content["sources"])) - known)
    if unknown:
        _log.warning("the checkpoint has values that this run does not: %s", ", ".join(unknown))
    found = []
    for entry in entries:
        state._forget(entry.name)  # where this process has run before, what it computed later than the checkpoint
        if not entry.definition.checkpoint:
            continue
        try:
            if entry.name in content["values"]:
                stored = content["values"][entry.name]
                entry.record.put(
                    decode(_bytes(stored["data"]), allow_pickle=state.allow_pickle),
                    (stored["computed_at"], stored["applied_at"]),
                    stored["version"],
                )
                found.append(entry)
            if is_main and entry.name in content["sources"] and entry.definition.stateful:
                source_state = decode(_bytes(content["sources"][entry.name]), allow_pickle=state.allow_pickle)
                entry.definition.source.load_state_dict(source_state)
        except CodecError as error:
            raise ConfigError(f"load_state_dict: value {entry.name!r} cannot be read: {error}") from error
    return found
