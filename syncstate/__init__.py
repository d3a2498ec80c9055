"""Shared state for distributed training: computed on the main process, the same on every rank from the same step on.

Names are loaded when they are first used, so that composing a config needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from syncstate.context import Context
    from syncstate.engine import SyncEngine
    from syncstate.resync import ParameterResync
    from syncstate.schedule import At, Every, Once
    from syncstate.spec import TensorSpec
    from syncstate.state import SharedState

__version__ = "0.1.0"
__all__ = ["At", "Context", "Every", "Once", "ParameterResync", "SharedState", "SyncEngine", "TensorSpec"]

_HOME = {
    "At": "schedule",
    "Context": "context",
    "Every": "schedule",
    "Once": "schedule",
    "ParameterResync": "resync",
    "SharedState": "state",
    "SyncEngine": "engine",
    "TensorSpec": "spec",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'syncstate' has no attribute {name!r}")
    value = getattr(import_module(f"syncstate.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
