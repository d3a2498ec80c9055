"""What happened, for people: counters, and events handed to a function or written as JSON lines."""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from syncstate.errors import ConfigError

__all__ = ["Sink", "open_sink"]

Sink = Callable[[Mapping[str, Any]], object]


def open_sink(events: Any, is_main: bool) -> Sink | None:
    """What to call with each event.

    Args:
        events: A callable, which every rank calls; or a path, to which the main process appends JSON lines; or None.
        is_main: Whether this is the main process.

    Raises:
        ConfigError: Something else.
    """
    if events is None or callable(events):
        return events  # type: ignore[no-any-return]
    if not isinstance(events, (str, os.PathLike)):
        raise ConfigError(f"events must be a callable or a path, got {events!r}")
    if not is_main:
        return None
    path = os.fspath(events)

    def write(event: Mapping[str, Any]) -> None:
        # Opened for each line: events are rare, and a process that dies leaves whole lines behind.
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(event, default=str) + "\n")

    return write
