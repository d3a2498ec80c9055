"""How values travel: waited for or not, in force when, among whom, and how long that may take."""

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from syncstate.errors import ConfigError
from syncstate.schedule import whole

__all__ = ["Transport", "check_transport", "seconds"]


@dataclass
class Transport:
    """How a value travels, as far as its user said; None takes the engine's.

    Attributes:
        async_op: Whether training goes on while it travels.
        lag: Steps from the step at which it is due to the step at which it comes into force.
        scope: `"world"` or `"node"`.
        timeout: Seconds that a sync may take.
    """

    async_op: bool | None = None
    lag: int | None = None
    scope: str | None = None
    timeout: float | None = None


def seconds(owner: str, timeout: Any) -> float:
    """A timeout in seconds, from a number or a `timedelta`; `owner` is named in the error."""
    number = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number) or number <= 0:
        raise ConfigError(
            f"{owner}: timeout must be a finite number of seconds above 0 or a timedelta, got {timeout!r}"
        )
    return float(number)


def check_transport(
    owner: str, async_op: Any, lag: Any, scope: Any, timeout: Any, *, default: Transport | None = None
) -> Transport:
    """Check what a user said about how values travel; `owner` is named in the error.

    Args:
        owner: Such as `"value 'seed'"`.
        async_op, lag, scope, timeout: As given.
        default: What holds where nothing is said.
    """
    if async_op is not None and not isinstance(async_op, bool):
        raise ConfigError(f"{owner}: async_op must be true, false or None, got {async_op!r}")
    if lag is not None:
        lag = whole(owner, "lag", lag, 0)
    if scope not in (None, "world", "node"):
        raise ConfigError(f"{owner}: scope must be 'world' or 'node', got {scope!r}")
    asynchronous = async_op if async_op is not None or default is None else default.async_op
    if asynchronous and lag == 0:
        raise ConfigError(
            f"{owner}: lag must be at least 1 with async_op=True, got 0: an asynchronous value cannot be in force in "
            "the step that computes it; give async_op=False or a larger lag"
        )
    return Transport(async_op, lag, scope, None if timeout is None else seconds(owner, timeout))
