"""What a user chose for a resync, checked once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from syncstate.errors import ConfigError, DriftError
from syncstate.resync.modes import MODES, SOURCES
from syncstate.resync.optimizer import check_optimizers
from syncstate.resync.report import DriftReport
from syncstate.resync.tensors import check_exclude, check_include
from syncstate.schedule import At, Every, Once, Schedule, whole

__all__ = ["Choice", "choose"]


@dataclass(frozen=True, eq=False)
class Choice:
    """The arguments of `ParameterResync`, where they are explained.

    Attributes:
        plan: What must be the same on all ranks.
    """

    every: Schedule
    mode: str
    source: str
    include: tuple[str, ...]
    exclude: tuple[str | type[nn.Module], ...]
    optimizers: tuple[Any, ...]
    bucket_bytes: int
    on_drift: str | Callable[..., object]

    @property
    def plan(self) -> dict[str, Any]:
        return {
            "every": str(self.every),
            "mode": self.mode,
            "source": self.source,
            "include": list(self.include),
            "exclude": [entry if isinstance(entry, str) else entry.__qualname__ for entry in self.exclude],
            "optimizers": len(self.optimizers),
            "bucket_bytes": self.bucket_bytes,
            "on_drift": self.on_drift if isinstance(self.on_drift, str) else "callable",
        }

    def heeds(self, report: DriftReport) -> bool:
        """Do with drift what the user chose; whether it is to be logged.

        Raises:
            DriftError: `on_drift` is `"raise"`.
        """
        if callable(self.on_drift):
            self.on_drift(report)
            return False
        if self.on_drift == "raise":
            raise DriftError(str(report), report)
        return True

    def check_world(self, world_size: int) -> None:
        """Raise where a group of this size cannot do what was chosen."""
        if self.source == "majority" and world_size < 3:
            raise ConfigError(f"resync: source='majority' needs at least 3 ranks, the group has {world_size}")


def choose(
    *,
    module: Any,
    every: Any,
    mode: Any,
    source: Any,
    include: Any,
    exclude: Any,
    optimizer: Any,
    bucket_bytes: Any,
    on_drift: Any,
) -> Choice:
    """Check what a user gave.

    Raises:
        ConfigError: An impossible setting.
    """
    if not isinstance(every, (Every, At, Once)):
        raise ConfigError(f"resync: every must be Every(...), At([...]) or Once(), got {every!r}")
    _one_of("mode", mode, MODES)
    _one_of("source", source, SOURCES)
    if source == "majority" and mode not in ("check", "repair"):
        raise ConfigError(f"resync: source='majority' compares, so mode must be 'check' or 'repair', got {mode!r}")
    if not callable(on_drift):
        _one_of("on_drift", on_drift, ("warn", "raise"))
    if module is not None and not isinstance(module, (nn.Module, Mapping)):
        raise ConfigError(f"resync: module must be a torch.nn.Module or a mapping of tensors, got {module!r}")
    size = whole("resync", "bucket_bytes", bucket_bytes, 16)
    chosen = (check_include(include), check_exclude(exclude), check_optimizers(optimizer))
    return Choice(every, mode, source, *chosen, size, on_drift)


def _one_of(key: str, given: Any, allowed: Sequence[str]) -> None:
    if not isinstance(given, str) or given not in allowed:
        also = " or a callable" if key == "on_drift" else ""
        raise ConfigError(f"resync: {key} must be {' or '.join(map(repr, allowed))}{also}, got {given!r}")
