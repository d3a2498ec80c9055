"""What every rank holds: a read-only mapping of shared values. Reading it never communicates."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar, overload

import torch

from syncstate.context import Context
from syncstate.definition import MISSING, Definition, Source, check_initial, define
from syncstate.errors import ConfigError, NotReady
from syncstate.handle import Shared
from syncstate.observed import Ring
from syncstate.record import Info, Record
from syncstate.schedule import Schedule, whole
from syncstate.spec import TensorSpec

__all__ = ["SharedState"]

T = TypeVar("T")


class SharedState(Mapping[str, Any]):
    """A read-only mapping from names to the values that every rank holds. Reading never communicates.

    Iteration, `len` and `in` know the values that are ready; `names` lists all. Values are each rank's own: treat them
    as read-only.

    Args:
        values: Sources by name, each added with the engine's schedule.
        allow_pickle: Let values travel by pickle that nothing else can carry. Only among ranks that trust each other.
        observe_capacity: How many of the newest observed numbers each value keeps on each rank.

    Raises:
        ConfigError: A capacity below 1, or what `add` refuses.

    Example::

        state = SharedState()

        @state.shared(every=Every(steps=100), initial=0.2)
        def threshold(ctx: Context) -> float:      # runs on the main process only
            return min(1.0, 0.2 + ctx.step / 10_000)

        state.add("seed", Seed(base=1234), every=Every(epochs=1))
        threshold.value, state["seed"]
    """

    def __init__(
        self, values: Mapping[str, Any] | None = None, *, allow_pickle: bool = False, observe_capacity: int = 65536
    ) -> None:
        self.allow_pickle = bool(allow_pickle)
        self._capacity = whole("SharedState", "observe_capacity", observe_capacity, 1)
        self._definitions: dict[str, Definition] = {}
        self._values: dict[str, Any] = {}
        self._records: dict[str, Record] = {}
        self._observed: dict[str, Ring] = {}
        self._user: weakref.ref[object] | None = None
        for name, source in (values or {}).items():
            self.add(name, source)

    @overload
    def add(
        self,
        name: str,
        source: Callable[[Context], T],
        *,
        every: Schedule | None = ...,
        collect: Any = ...,
        reduce: str = ...,
        deliver: str = ...,
        apply: Callable[[Any, Context], object] | None = ...,
        spec: TensorSpec | type | None = ...,
        device: Any = ...,
        initial: Any = ...,
        async_op: bool | None = ...,
        lag: int | None = ...,
        scope: str | None = ...,
        timeout: float | timedelta | None = ...,
        checkpoint: bool | None = ...,
    ) -> Shared[T]: ...

    @overload
    def add(
        self,
        name: str,
        source: Source[T],
        *,
        every: Schedule | None = ...,
        collect: Any = ...,
        reduce: str = ...,
        deliver: str = ...,
        apply: Callable[[Any, Context], object] | None = ...,
        spec: TensorSpec | type | None = ...,
        device: Any = ...,
        initial: Any = ...,
        async_op: bool | None = ...,
        lag: int | None = ...,
        scope: str | None = ...,
        timeout: float | timedelta | None = ...,
        checkpoint: bool | None = ...,
    ) -> Shared[T]: ...

    def add(
        self,
        name: str,
        source: Any,
        *,
        every: Schedule | None = None,
        collect: Any = None,
        reduce: str = "list",
        deliver: str = "broadcast",
        apply: Callable[[Any, Context], object] | None = None,
        spec: TensorSpec | type | None = None,
        device: Any = None,
        initial: Any = MISSING,
        async_op: bool | None = None,
        lag: int | None = None,
        scope: str | None = None,
        timeout: float | timedelta | None = None,
        checkpoint: bool | None = None,
    ) -> Shared[Any]:
        """Declare a shared value. Every rank declares the same ones; the order does not matter.

        Args:
            name: Its name, new in this state.
            source: A callable `source(ctx) -> value`, or an object with `compute(ctx)`. Runs on the main process only.
            every: When it is refreshed; None takes the engine's.
            collect: `collect(ctx)`, run on every rank before the computation, which finds the results in
                `ctx.collected`; or `"observed"`: what each rank has observed under this name since the last sync, as a
                1-D float tensor.
            reduce: What `ctx.collected` is: `"list"`, all results in rank order, or `"mean"`, `"sum"`, `"min"`,
                `"max"`, `"any"`, `"all"` over the ranks, each counting once. None is no result, also over nothing.
            deliver: `"broadcast"`, or `"scatter"`: the source returns a sequence with an item for each rank.
            apply: `apply(value, ctx)`, run on every rank when a value comes into force.
            spec: A `TensorSpec` or a type that every value (or item) must have; another one is an error on all ranks.
            device: Where tensors are put when a value comes into force; None leaves them on the CPU.
            initial: The value before the first sync, the same on all ranks.
            async_op: Let training go on while the value travels; None takes the engine's.
            lag: Steps from the step at which it is computed to the step at which it comes into force, on every rank.
                None takes the engine's. The first value is in force at once.
            scope: `"world"`, or `"node"`: computed and shared on each node by itself. None takes the engine's.
            timeout: Seconds (or a `timedelta`) that a sync of this value may take; None takes the engine's.
            checkpoint: False: recomputed at the start of a resumed run instead of restored. None is true; with
                `scope="node"` it is false, and true is refused.

        Returns:
            A handle with `.value` and `.info`, callable like the source.

        Raises:
            ConfigError: An impossible setting, a name given twice, or an engine that has started.
        """
        if self._in_use():
            raise ConfigError(f"value {name!r}: an engine that uses this state has started; add values before")
        if name in self._definitions:
            raise ConfigError(f"value {name!r} is already in this state; names must differ")
        definition = define(
            name, source, every=every, collect=collect, reduce=reduce, deliver=deliver, apply=apply, spec=spec,
            device=device, initial=initial, async_op=async_op, lag=lag, scope=scope, timeout=timeout,
            checkpoint=checkpoint,
        )  # fmt: skip
        if definition.initial is not MISSING:
            self._values[name] = check_initial(name, definition.initial, allow_pickle=self.allow_pickle)
        self._definitions[name] = definition
        self._records[name] = Record()
        return Shared(self, name, source)

    def shared(self, name: str | None = None, **options: Any) -> Callable[[Callable[[Context], T]], Shared[T]]:
        """The decorator form of `add`: takes its options; the name is the function's unless given."""

        def declare(source: Callable[[Context], T]) -> Shared[T]:
            return self.add(name if name is not None else source.__name__, source, **options)

        if callable(name):
            raise ConfigError("write @state.shared() with parentheses")
        return declare

    @property
    def names(self) -> tuple[str, ...]:
        """All values, ready or not, in the order in which they were added."""
        return tuple(self._definitions)

    def __getitem__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            pass
        raise self._absent(name)

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in self._definitions if name in self._values])

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __repr__(self) -> str:
        return "SharedState(" + ", ".join(f"{name}: {self.text(name)}" for name in self.names) + ")"

    def _absent(self, name: str) -> KeyError:
        definition = self._definitions.get(name)
        if definition is None:
            return KeyError(f"no shared value {name!r}; there are {', '.join(self.names) or 'none'}")
        when = "by the engine's schedule" if definition.every is None else str(definition.every)
        return NotReady(
            f"value {name!r} has no value yet: it is computed {when}, and no sync has reached it. Start the engine "
            f"before reading it, or give state.add({name!r}, ..., initial=...) a value to hold until then"
        )

    def chosen(self, call: str, names: tuple[str, ...]) -> tuple[str, ...]:
        """The names that a user gave to a call, or all. Raises ConfigError for one that was never added."""
        for name in names:
            if name not in self._definitions:
                raise ConfigError(f"{call}: no shared value {name!r}; there are {', '.join(self.names) or 'none'}")
        return names or self.names

    def text(self, name: str) -> str:
        """Version and step of a value in a few words, for messages."""
        record = self.record(name)
        if record.version:
            return f"version {record.version} of step {record.steps[0]}"
        return "initial value" if name in self._values else "not ready"

    def info(self, name: str) -> Info:
        """Version, steps and size of a value. Raises KeyError for a name that was never added."""
        return self.record(name).info(self.allow_pickle)

    def observe(self, name: str, value: Any) -> None:
        """Keep numbers of this rank under the name of a value, for its source. Does not wait for the device.

        Args:
            name: A value of this state.
            value: A tensor of any shape, or a number. Detached and copied; the newest `observe_capacity` numbers stay.

        Raises:
            KeyError: No such value.
        """
        if name not in self._definitions:
            raise self._absent(name)
        self._observed.setdefault(name, Ring(self._capacity)).push(value)

    def observed(self, name: str) -> torch.Tensor:
        """What this rank observed under a name, oldest first: 1-D floats on the CPU, at most `observe_capacity`."""
        if name not in self._definitions:
            raise self._absent(name)
        ring = self._observed.get(name)
        return torch.empty(0) if ring is None else ring.numbers()

    def definition(self, name: str) -> Definition:
        """What was declared under a name."""
        return self._definitions[name]

    def record(self, name: str) -> Record:
        """What the engine keeps of a value. Raises KeyError for a name that was never added."""
        record = self._records.get(name)
        if record is None:
            raise self._absent(name)
        return record

    def _take_observed(self, name: str) -> torch.Tensor:
        """What was observed since the last time, for the engine."""
        ring = self._observed.get(name)
        return torch.empty(0) if ring is None else ring.take()

    def _return_observed(self, name: str, numbers: torch.Tensor) -> None:
        """Nobody has received them: keep them for the next sync."""
        self._observed.setdefault(name, Ring(self._capacity)).give_back(numbers)

    def _claim(self, user: object) -> None:
        """A run of an engine takes the state; nothing is added while one has it."""
        if self._in_use():
            raise ConfigError("another engine uses this state; close it first, or give each engine a state of its own")
        self._user = weakref.ref(user)

    def _release(self, user: object) -> None:
        """A run gives the state back, if it has it."""
        if self._user is not None and self._user() is user:
            self._user = None

    def _in_use(self) -> bool:
        """Whether a run has the state; one that nobody refers to any more has it no longer."""
        return self._user is not None and self._user() is not None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_user": None}

    def _forget(self, name: str) -> None:
        self._records[name].put(None, (None, None), 0)
        self._values.pop(name, None)
        if self._definitions[name].initial is not MISSING:
            self._values[name] = self._definitions[name].initial

    def _update(self, names: Iterable[str], values: Iterable[Any]) -> None:
        """The engine's door: values come into force. Other threads see the old or the new one, never a part."""
        self._values.update(zip(names, values, strict=True))
