"""What `SharedState.add` returns: one value by name, typed."""

from typing import Any, Generic, Protocol, TypeVar

from syncstate.context import Context
from syncstate.record import Info

__all__ = ["Shared"]

T = TypeVar("T")


class _State(Protocol):
    """What a handle asks its state."""

    def __getitem__(self, name: str, /) -> Any: ...
    def info(self, name: str) -> Info: ...
    def text(self, name: str) -> str: ...


class Shared(Generic[T]):
    """A handle on one value of a state: typed, and callable like the source it was made from.

    Attributes:
        name, source: What was given to `SharedState.add`.
    """

    def __init__(self, state: _State, name: str, source: Any) -> None:
        self._state = state
        self.name = name
        self.source = source
        self.__doc__ = getattr(source, "__doc__", None)
        self.__name__ = getattr(source, "__name__", name)

    @property
    def value(self) -> T:
        """The value in force on this rank. Raises `NotReady` before the first sync."""
        value: T = self._state[self.name]
        return value

    @property
    def info(self) -> Info:
        """Version, steps and size of the value in force."""
        return self._state.info(self.name)

    def __call__(self, ctx: Context) -> T:
        """Run the source itself, without sharing the result."""
        value: T = getattr(self.source, "compute", self.source)(ctx)
        return value

    def __repr__(self) -> str:
        return f"Shared({self.name!r}, {self._state.text(self.name)})"
