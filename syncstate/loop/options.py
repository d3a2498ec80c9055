"""What a user chose for an engine, checked once."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

from syncstate.definition import check_schedule
from syncstate.errors import ConfigError
from syncstate.schedule import Every, Schedule
from syncstate.transport import Transport, check_transport, seconds

__all__ = ["Options", "Resync"]


class Resync(Protocol):
    """What an engine knows of a `ParameterResync`."""

    every: Schedule
    host_model: Any

    def agreed(self) -> dict[str, Any]: ...
    def bind(self, topology: Any, channel: Any, meeting: Any, timeout: float, part: Any, *, group: Any) -> None: ...
    def tell(self, note: Any) -> None: ...

    def unbind(self, *, abrupt: bool) -> None: ...
    def serve(self, step: int) -> Any: ...


@dataclass(frozen=True)
class Options:
    """The keyword arguments of `SyncEngine`, where they are explained.

    Raises:
        ConfigError: An impossible setting.
    """

    every: Schedule = field(default_factory=lambda: Every(steps=100))
    seed: int = 0
    group: Any = None
    main: int | None = None
    scope: str = "world"
    async_op: bool = False
    lag: int | None = None
    timeout: float | timedelta = 300.0
    frame_bytes: int = 16384
    max_bytes: int = 1 << 33
    on_error: str = "raise"
    config: Mapping[str, Any] | None = None
    resync: Any = None
    verify_values: bool = False
    events: Any = None
    transport: Transport = field(init=False)

    def __post_init__(self) -> None:
        check_schedule("engine", self.every, optional=False)
        if self.async_op is None or self.scope is None:
            raise ConfigError(f"engine: async_op and scope must be given, got {self.async_op!r} and {self.scope!r}")
        if self.timeout is None:
            seconds("engine", self.timeout)
        transport = check_transport("engine", self.async_op, self.lag, self.scope, self.timeout)
        object.__setattr__(self, "transport", transport)
        object.__setattr__(self, "resync", check_resyncs(self.resync))
        if not isinstance(self.verify_values, bool):
            raise ConfigError(f"engine: verify_values must be true or false, got {self.verify_values!r}")
        self._check_whole("seed", None)
        self._check_whole("frame_bytes", 1024)
        self._check_whole("max_bytes", 1)
        if self.main is not None:
            self._check_whole("main", 0)
        if self.frame_bytes % 64:
            raise ConfigError(f"engine: frame_bytes must be a multiple of 64, got {self.frame_bytes!r}")
        if self.on_error not in ("raise", "keep"):
            raise ConfigError(f"engine: on_error must be 'raise' or 'keep', got {self.on_error!r}")
        if self.config is not None and not isinstance(self.config, Mapping):
            raise ConfigError(f"engine: config must be a mapping, got {self.config!r}")
        object.__setattr__(self, "timeout", self.transport.timeout)

    def _check_whole(self, key: str, least: int | None) -> None:
        given = getattr(self, key)
        allowed = "a whole number" if least is None else f"a whole number of at least {least}"
        try:
            number = operator.index(given)
        except TypeError:
            raise ConfigError(f"engine: {key} must be {allowed}, got {given!r}") from None
        if isinstance(given, bool) or (least is not None and number < least):
            raise ConfigError(f"engine: {key} must be {allowed}, got {given!r}")
        object.__setattr__(self, key, number)

    @property
    def seconds(self) -> float:
        """The timeout in seconds."""
        return seconds("engine", self.timeout)

    def agreed(self) -> dict[str, Any]:
        """What must be the same on all ranks, because it decides what is sent or raised."""
        return {key: getattr(self, key) for key in ("seed", "frame_bytes", "max_bytes", "on_error", "verify_values")}


def check_resyncs(given: Any) -> tuple[Resync, ...]:
    """What a user gave as `resync`, as a tuple.

    Raises:
        ConfigError: Something else than a `ParameterResync` or a sequence of them.
    """
    if given is None:
        return ()
    resyncs = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    for resync in resyncs:
        if not all(hasattr(resync, name) for name in ("every", "agreed", "bind", "tell", "unbind", "serve")):
            raise ConfigError(f"engine: resync must be a ParameterResync or a list of them, got {resync!r}")
    if len({id(resync) for resync in resyncs}) < len(resyncs):
        raise ConfigError("engine: resync names one ParameterResync twice")
    return resyncs
