"""What a user said about one shared value, checked once."""

import importlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

from syncstate.context import Context
from syncstate.errors import CodecError, ConfigError
from syncstate.schedule import At, Every, Once, Schedule
from syncstate.spec import TensorSpec, parse_spec
from syncstate.wire.codec import pack

__all__ = [
    "MISSING",
    "Definition",
    "Missing",
    "Source",
    "check_initial",
    "check_schedule",
    "define",
    "refuse",
    "seconds",
]


T_co = TypeVar("T_co", covariant=True)


class Missing:
    """The type of `MISSING`: nothing was given, where None is a value."""

    _only: "Missing | None" = None

    def __new__(cls) -> "Missing":
        # One object in each process, also after pickling.
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Final = Missing()


@runtime_checkable
class Source(Protocol[T_co]):
    """The shape of a source that is an object.

    Optional are `apply`, `derive`, `state_dict` and `load_state_dict`. `apply(value, ctx)` runs on every rank when the
    value comes into force. `derive(value, ctx)` returns what this rank holds, made from what main sent (a seed of its
    own, say); it must be a pure function of its arguments.
    """

    def compute(self, ctx: Context) -> T_co:
        """The value for `ctx.step`; runs on the main process only."""


@dataclass
class Definition:
    """One shared value as its user declared it. The fields are the arguments of `SharedState.add`."""

    name: str
    source: Any
    every: Schedule | None
    apply: Callable[[Any, Context], object] | None
    derive: Callable[[Any, Context], Any] | None
    spec: TensorSpec | type | None
    initial: Any
    timeout: float | None
    checkpoint: bool
    compute: Callable[[Context], Any]

    @property
    def stateful(self) -> bool:
        """Whether the source has a state of its own, which lives on the main process."""
        return hasattr(self.source, "state_dict") and hasattr(self.source, "load_state_dict")

    def __getstate__(self) -> dict[str, Any]:
        # A decorated function is found under its name as a handle, not as itself, which pickle refuses.
        state = {f.name: getattr(self, f.name) for f in fields(self)}
        path = _decorated(self.source)
        if path is not None:
            state["source"] = state["compute"] = _Reference(*path)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(state["source"], _Reference):
            state["source"] = state["compute"] = state["source"].resolve()
        self.__dict__.update(state)


@dataclass(frozen=True)
class _Reference:
    module: str
    qualname: str

    def resolve(self) -> Any:
        found: Any = importlib.import_module(self.module)
        for part in self.qualname.split("."):
            found = getattr(found, part)
        return getattr(found, "source", found)


def _decorated(source: Any) -> tuple[str, str] | None:
    """Where a function is found that a decorator replaced by its handle."""
    module, qualname = getattr(source, "__module__", None), getattr(source, "__qualname__", "")
    if not inspect.isfunction(source) or module is None or "<" in qualname:
        return None
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return (module, qualname) if getattr(found, "source", None) is source else None


def check_schedule(owner: str, every: Any, *, optional: bool = True) -> Schedule | None:
    """Check what a user gave as a schedule; `owner` is named in the error."""
    if every is None and optional:
        return None
    if not isinstance(every, (Every, At, Once)):
        raise ConfigError(f"{owner}: every must be Every(...), At([...]) or Once(), got {every!r}")
    if every.unit in ("seconds", "overhead"):
        raise ConfigError(f"{owner}: {every} is not available yet; give Every(steps=...) or Every(epochs=...)")
    return every


def check_initial(name: str, initial: Any, *, allow_pickle: bool) -> Any:
    """An initial value as it is; a `ConfigError` if ranks could not even compare it."""
    try:
        pack(initial, allow_pickle=allow_pickle)
    except CodecError as error:
        raise ConfigError(f"value {name!r}: initial cannot be shared: {error}") from error
    return initial


def seconds(owner: str, timeout: Any) -> float:
    """A timeout in seconds, from a number or a `timedelta`; `owner` is named in the error."""
    number = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number) or number <= 0:
        raise ConfigError(
            f"{owner}: timeout must be a finite number of seconds above 0 or a timedelta, got {timeout!r}"
        )
    return float(number)


def refuse(owner: str, **options: tuple[Any, Any]) -> None:
    """Refuse an option that is part of the interface and not built yet, instead of ignoring it."""
    for key, (given, only) in options.items():
        if given is not None and given != only:
            raise ConfigError(f"{owner}: {key}={given!r} is not available yet; leave it out or give {only!r}")


def define(
    name: str,
    source: Any,
    *,
    every: Schedule | None,
    collect: Any,
    reduce: str,
    deliver: str,
    apply: Callable[[Any, Context], object] | None,
    spec: Any,
    device: Any,
    initial: Any,
    async_op: bool | None,
    lag: int | None,
    scope: str | None,
    timeout: float | timedelta | None,
    checkpoint: bool,
) -> Definition:
    """Check one declaration.

    Raises:
        ConfigError: A setting that is unknown, impossible or not available yet.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"a shared value needs a non-empty name, got {name!r}")
    owner = f"value {name!r}"
    refuse(
        owner,
        collect=(collect if collect is not None else getattr(source, "collect", None), None),
        reduce=(reduce, "list"),
        deliver=(deliver, "broadcast"),
        device=(device, None),
        async_op=(async_op, False),
        lag=(lag, 0),
        scope=(scope, "world"),
    )
    compute = getattr(source, "compute", None)
    if compute is None:
        compute = source
    if not callable(compute) or inspect.isclass(source):
        raise ConfigError(f"{owner}: the source must be a callable or an object with compute(ctx), got {source!r}")
    own = getattr(source, "apply", None)
    if apply is not None and own is not None:
        raise ConfigError(f"{owner}: the source has an apply(value, ctx) of its own; leave out apply= or the source's")
    apply = apply if apply is not None else own
    if apply is not None and not callable(apply):
        raise ConfigError(f"{owner}: apply must be a callable apply(value, ctx), got {apply!r}")
    if not isinstance(checkpoint, bool):
        raise ConfigError(f"{owner}: checkpoint must be true or false, got {checkpoint!r}")
    return Definition(
        name=name,
        source=source,
        every=check_schedule(owner, every),
        apply=apply,
        derive=getattr(source, "derive", None),
        spec=parse_spec(owner, spec),
        initial=getattr(source, "initial", MISSING) if initial is MISSING else initial,
        timeout=None if timeout is None else seconds(owner, timeout),
        checkpoint=checkpoint,
        compute=compute,
    )
