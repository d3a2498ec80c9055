"""What a user said about one shared value, checked once."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Final, Literal, Protocol, TypeVar, runtime_checkable

import torch

from syncstate.context import Context
from syncstate.errors import CodecError, ConfigError
from syncstate.schedule import At, Every, Once, Schedule
from syncstate.spec import TensorSpec, parse_spec
from syncstate.transport import Transport, check_transport
from syncstate.wire.codec import pack

__all__ = [
    "MISSING",
    "Definition",
    "Missing",
    "Source",
    "check_initial",
    "check_schedule",
    "define",
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

    Optional are `collect`, `apply`, `derive`, `state_dict` and `load_state_dict`. `collect(ctx)` runs on every rank
    before the computation, or is the word `"observed"`. `apply(value, ctx)` runs on every rank when the value comes
    into force. `derive(value, ctx)` returns what this rank holds, made from what main sent (a seed of its own, say); it
    must be a pure function of its arguments.
    """

    def compute(self, ctx: Context) -> T_co:
        """The value for `ctx.step`; runs on the main process only."""


@dataclass
class Definition:
    """One shared value as its user declared it, in the words of `SharedState.add`."""

    name: str
    source: Any
    every: Schedule | None
    collect: Callable[[Context], Any] | Literal["observed"] | None
    reduce: str
    scattered: bool
    apply: Callable[[Any, Context], object] | None
    derive: Callable[[Any, Context], Any] | None
    spec: TensorSpec | type | None
    device: torch.device | None
    initial: Any
    transport: Transport
    checkpoint: bool | None
    compute: Callable[[Context], Any]

    @property
    def stateful(self) -> bool:
        """Whether the source has a state of its own, which lives on the main process."""
        return hasattr(self.source, "state_dict") and hasattr(self.source, "load_state_dict")

    def kept(self, scope: str) -> bool:
        """Whether the value goes into checkpoints, where `scope` holds unless it has one of its own."""
        return self.checkpoint if self.checkpoint is not None else (self.transport.scope or scope) != "node"

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
    return every


def check_initial(name: str, initial: Any, *, allow_pickle: bool) -> Any:
    """An initial value as it is; a `ConfigError` if ranks could not even compare it."""
    try:
        pack(initial, allow_pickle=allow_pickle)
    except CodecError as error:
        raise ConfigError(f"value {name!r}: initial cannot be shared: {error}") from error
    return initial


_REDUCTIONS = ("list", "mean", "sum", "min", "max", "any", "all")


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
    checkpoint: bool | None,
) -> Definition:
    """Check one declaration.

    Raises:
        ConfigError: A setting that is unknown or impossible.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"a shared value needs a non-empty name, got {name!r}")
    owner = f"value {name!r}"
    if deliver not in ("broadcast", "scatter"):
        raise ConfigError(f"{owner}: deliver must be 'broadcast' or 'scatter', got {deliver!r}")
    if checkpoint is not None and not isinstance(checkpoint, bool):
        raise ConfigError(f"{owner}: checkpoint must be true or false, got {checkpoint!r}")
    definition = Definition(
        name=name,
        source=source,
        every=check_schedule(owner, every),
        collect=_one_of(owner, "collect", "collect(ctx)", collect, source),
        reduce=_reduction(owner, reduce),
        scattered=deliver == "scatter",
        apply=_one_of(owner, "apply", "an apply(value, ctx)", apply, source),
        derive=getattr(source, "derive", None),
        spec=parse_spec(owner, spec),
        device=_device(owner, device),
        initial=_initial(source, initial),
        transport=check_transport(owner, async_op, lag, scope, timeout),
        checkpoint=checkpoint,
        compute=_compute(owner, source),
    )
    _check_asynchronous(owner, definition)
    return definition


def _compute(owner: str, source: Any) -> Callable[[Context], Any]:
    """What computes: the source itself, or its method."""
    compute = getattr(source, "compute", None)
    if compute is None:
        compute = source
    if not callable(compute) or inspect.isclass(source):
        raise ConfigError(f"{owner}: the source must be a callable or an object with compute(ctx), got {source!r}")
    found: Callable[[Context], Any] = compute
    return found


def _initial(source: Any, given: Any) -> Any:
    """What was given, else the source's own. A source that has one goes on from it while nothing is known."""
    own = getattr(source, "initial", MISSING)
    if given is MISSING:
        return own
    if own is not MISSING:
        source.initial = given
    return given


def _one_of(owner: str, key: str, form: str, given: Any, source: Any) -> Any:
    """What was given for a key, else the source's own."""
    own = getattr(source, key, None)
    if given is not None and own is not None:
        raise ConfigError(f"{owner}: the source has {form} of its own; leave out {key}= or the source's")
    chosen = given if given is not None else own
    observed = key == "collect" and chosen == "observed"
    if chosen is not None and not callable(chosen) and not observed:
        also = " or the word 'observed'" if key == "collect" else ""
        raise ConfigError(f"{owner}: {key} must be a callable {form.removeprefix('an ')}{also}, got {chosen!r}")
    return chosen


def _reduction(owner: str, reduce: Any) -> str:
    if reduce not in _REDUCTIONS:
        raise ConfigError(f"{owner}: reduce must be one of {', '.join(_REDUCTIONS)}, got {reduce!r}")
    return str(reduce)


def _device(owner: str, device: Any) -> torch.device | None:
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"{owner}: device must be a device such as 'cuda' or 'cpu', got {device!r}") from error


def _check_asynchronous(owner: str, definition: Definition) -> None:
    """Refuse what a value says of itself and cannot be; what it takes from the engine gives way instead."""
    transport, every = definition.transport, definition.every
    if not transport.async_op:
        return
    if every is not None and every.unit in ("epochs", "once"):
        raise ConfigError(
            f"{owner}: async_op=True with {every}: an epoch's value would reach the samplers late, and a value that is "
            "computed once is waited for; give async_op=False"
        )
    if definition.collect is not None and transport.lag is not None and transport.lag < 2:
        raise ConfigError(
            f"{owner}: lag must be at least 2 for an asynchronous value that collects, got {transport.lag}: what the "
            "ranks send is computed with one step later"
        )
