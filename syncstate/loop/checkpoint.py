"""What of an engine goes into a checkpoint: plain containers, numbers, text and byte tensors only.

    {"version": 1, "seen": [step, epoch],
     "values": {name: {"data": uint8 tensor, "version": int, "computed_at": int, "applied_at": int,
                       "next": [step, interval] where main announces it, "scattered": True where it is}},
     "flights": [{"step": int, "epoch": int, "apply_at": {name: int}, "data": {name: uint8 tensor},
                  "intervals": {name: int}}],
     "sources": {name: uint8 tensor}}

`flights` are values that were computed and are not in force yet. Of a scattered value only main has the data. Values
are stored in the encoding in which they travel, so every type comes back as it was.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from syncstate.digest import digest_bytes
from syncstate.errors import CodecError, ConfigError
from syncstate.loop.entry import Entry
from syncstate.loop.flight import Flight
from syncstate.state import SharedState
from syncstate.wire.bits import as_bytes, as_tensor
from syncstate.wire.codec import decode, encode

__all__ = ["Restored", "parse", "read_flight", "restore", "snapshot"]

_VERSION = 1
_log = logging.getLogger("syncstate")


class Restored(NamedTuple):
    """A checkpoint that was loaded and not yet put into force.

    Attributes:
        content: The dictionary, checked.
        seen: The last step and epoch.
        record: A digest of the values in force, which tells whether the ranks loaded the same.
        flights: A short text that tells which values were on their way.
    """

    content: dict[str, Any]
    seen: tuple[int, int]
    record: str
    flights: str


def snapshot(
    state: SharedState, seen: tuple[int, int], flights: Iterable[Flight], *, scope: str, is_main: bool
) -> dict[str, Any]:
    """What goes into a checkpoint. Local: never communicates.

    Args:
        state: The values.
        seen: Last step and epoch.
        flights: What is on its way.
        scope: The engine's.
        is_main: Whether the sources of this process have computed, so that their own states count.
    """
    values: dict[str, dict[str, Any]] = {}
    sources, pickle = {}, state.allow_pickle
    saved = {name for name in state.names if state.definition(name).kept(scope)}
    for name in state.names:
        record, definition = state.record(name), state.definition(name)
        if name in saved and record.version:
            values[name] = {
                "version": record.version,
                "computed_at": record.steps[0],
                "applied_at": record.steps[1],
            }
            if definition.scattered:
                values[name]["scattered"] = True
            if is_main or not definition.scattered:
                values[name]["data"] = as_tensor(encode(record.sent, allow_pickle=pickle))
            if record.announced is not None:
                values[name]["next"] = list(record.announced)
        if name in saved and definition.stateful and is_main:
            sources[name] = as_tensor(encode(definition.source.state_dict(), allow_pickle=pickle))
    whole = {name for name in saved if is_main or not state.definition(name).scattered}
    on_their_way = [_flight(flight, whole, pickle) for flight in flights if flight.values is not None]
    return {
        "version": _VERSION,
        "seen": list(seen),
        "values": values,
        "flights": [flight for flight in on_their_way if flight["apply_at"]],
        "sources": sources,
    }


def _flight(flight: Flight, saved: Collection[str], pickle: bool) -> dict[str, Any]:
    names = [name for name in flight.pending if name in saved]
    values = flight.values or {}
    return {
        "step": flight.step,
        "epoch": flight.fields["epoch"],
        "apply_at": {name: flight.pending[name] for name in names},
        "data": {name: as_tensor(encode(values[name], allow_pickle=pickle)) for name in names},
        "intervals": {name: flight.intervals[name] for name in names if name in flight.intervals},
    }


def read_flight(content: Mapping[str, Any], place: dict[str, Any], pickle: bool) -> Flight:
    """A flight of a checkpoint.

    Args:
        content: What `snapshot` wrote.
        place: What contexts on this rank have in common.
        pickle: Whether values may be pickles.
    """
    flight = Flight({**place, "step": content["step"], "epoch": content["epoch"]}, content["apply_at"])
    flight.values = {name: decode(as_bytes(data), allow_pickle=pickle) for name, data in content["data"].items()}
    flight.intervals = dict(content["intervals"])
    return flight


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
            steps = f"{value['version']} {value['computed_at']} {value['applied_at']} {value.get('next')}"
            data = None if value.get("scattered") else value.get("data")  # which of a scattered one only main has
            summary.append(f"{name} {steps} " + ("" if data is None else digest_bytes(as_bytes(data)).hex()))
        flights = [(flight["step"], sorted(flight["apply_at"].items())) for flight in content.get("flights", [])]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"load_state_dict: the state is damaged: {type(error).__name__}: {error}") from error
    return Restored(dict(content), seen, digest_bytes("\n".join(summary).encode()).hex(), str(flights))


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
    # First what can fail by itself: a source that refuses its state leaves the values as they were.
    if is_main:
        for entry in entries:
            if entry.checkpoint and entry.definition.stateful and entry.name in content["sources"]:
                entry.definition.source.load_state_dict(_read(content["sources"], entry.name, state.allow_pickle))
    found = []
    for entry in entries:
        state._forget(entry.name)  # where this process has run before, what it computed later than the checkpoint
        stored = content["values"].get(entry.name)
        if not entry.checkpoint or stored is None:
            continue
        if "next" in stored and entry.rhythm is not None:
            entry.record.announced = tuple(stored["next"])
            entry.rhythm.restore(*entry.record.announced)
        if "data" not in stored:
            continue
        sent = _read({entry.name: stored["data"]}, entry.name, state.allow_pickle)
        entry.record.put(sent, (stored["computed_at"], stored["applied_at"]), stored["version"])
        found.append(entry)
    return found


def _read(stored: Mapping[str, torch.Tensor], name: str, pickle: bool) -> Any:
    try:
        return decode(as_bytes(stored[name]), allow_pickle=pickle)
    except CodecError as error:
        raise ConfigError(f"load_state_dict: value {name!r} cannot be read: {error}") from error
