"""One value inside an engine: what its user declared, filled up with the engine's defaults."""

from collections.abc import Callable
from typing import Any

import torch

from syncstate.definition import MISSING, Definition
from syncstate.digest import digest_bytes
from syncstate.errors import ConfigError
from syncstate.loop.rhythm import Rhythm
from syncstate.record import Record
from syncstate.schedule import Schedule
from syncstate.transport import Transport
from syncstate.wire.codec import encode

__all__ = ["Entry"]


class Entry:
    """A value of an engine.

    Args:
        definition: As declared.
        record: What the state knows of it.
        schedule, transport: The engine's.

    Raises:
        ConfigError: What the value says and what it takes from the engine do not go together.

    Attributes:
        name, definition, record: As given.
        schedule, async_op, lag, scope, timeout: The value's own, else the engine's.
        checkpoint: Whether it is saved.
        compute: The function that computes it.
        rhythm: When it is due, where only main can know; else None.
        again: Whether the start computes it whatever its schedule says.
    """

    __slots__ = (
        *("again", "async_op", "checkpoint", "compute", "definition", "lag", "name", "record", "rhythm", "schedule"),
        *("scope", "timeout"),
    )

    def __init__(self, definition: Definition, record: Record, schedule: Schedule, transport: Transport) -> None:
        own = definition.transport
        self.name = definition.name
        self.definition = definition
        self.compute: Callable[..., Any] = definition.compute
        self.record = record
        self.schedule = definition.every if definition.every is not None else schedule
        self.rhythm: Rhythm | None = None
        self.again = False
        self.timeout = own.timeout if own.timeout is not None else transport.timeout or 0.0
        self.scope = own.scope or transport.scope or "world"
        self.checkpoint = definition.kept(self.scope)
        if self.checkpoint and self.scope == "node":
            raise ConfigError(
                f"value {self.name!r}: checkpoint=True with scope='node': a checkpoint holds what one rank knows, the "
                "value of its own node; leave out checkpoint, and each node computes anew when training resumes"
            )
        _check_device(definition)
        self.async_op, self.lag = _resolved(definition, transport, prompt=self.schedule.unit in ("epochs", "once"))

    def announce(self, step: int, interval: int | None) -> None:
        """Every rank: how many steps after a sync the next one follows, if main says so; None after a failure."""
        if self.rhythm is not None:
            self.rhythm.follow(step, interval)
            self.record.announced = self.rhythm.announced

    @property
    def collects(self) -> bool:
        """Whether the ranks send something to main before it computes."""
        return self.definition.collect is not None

    def described(self, allow_pickle: bool) -> dict[str, Any]:
        """What must be the same on all ranks."""
        definition = self.definition
        spec, initial = definition.spec, "none"
        if definition.initial is not MISSING:
            initial = digest_bytes(encode(definition.initial, allow_pickle=allow_pickle)).hex()[:12]
        return {
            "every": str(self.schedule),
            "spec": spec.__name__ if isinstance(spec, type) else str(spec),
            "initial": initial,
            "apply": definition.apply is not None,
            "derive": definition.derive is not None,
            "collect": definition.collect if isinstance(definition.collect, str) else definition.collect is not None,
            "reduce": definition.reduce,
            "deliver": "scatter" if definition.scattered else "broadcast",
            "async_op": self.async_op,
            "lag": self.lag,
            "scope": self.scope,
            "checkpoint": self.checkpoint,
        }


def _resolved(definition: Definition, engine: Transport, *, prompt: bool) -> tuple[bool, int]:
    """Whether a value is asynchronous, and its lag.

    What a value takes over from the engine gives way where it cannot hold: the values of epochs, and those computed
    once, are waited for, and one that collects comes into force two steps later at the earliest.
    """
    own, owner = definition.transport, f"value {definition.name!r}"
    if own.async_op and prompt:
        raise ConfigError(
            f"{owner}: async_op=True and no schedule of its own, and the engine's counts epochs or is Once(); give the "
            "value every=Every(steps=...) or async_op=False"
        )
    async_op = own.async_op if own.async_op is not None else bool(engine.async_op) and not prompt
    least = 0 if not async_op else 2 if definition.collect is not None else 1
    if own.lag is not None:
        if own.lag < least:
            raise ConfigError(
                f"{owner}: lag must be at least {least} for an asynchronous value"
                f"{' that collects' * (least == 2)}, got {own.lag}; the engine is asynchronous: give the value "
                "async_op=False or a larger lag"
            )
        return async_op, own.lag
    if prompt:
        return async_op, 0
    return async_op, max(least, engine.lag or 0)


def _check_device(definition: Definition) -> None:
    """Refuse a device that this process does not have, before anything is sent."""
    if definition.device is not None:
        try:
            torch.empty(0, device=definition.device)
        except (RuntimeError, AssertionError) as error:  # torch raises either
            raise ConfigError(
                f"value {definition.name!r}: device={str(definition.device)!r} is not there in this process: {error}"
            ) from error
