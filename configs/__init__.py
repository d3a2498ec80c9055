"""Types of the configs, registered with Hydra when it builds its search path.

A yaml file holds the keys, their defaults and a comment on each; its schema here holds their types, so that a wrong
type or an unknown key fails while composing. Nothing here imports torch.

The schemas have a group of their own, ``syncstate_schema``, so that they are not offered as options of the real groups.
"""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

__all__ = [
    "AtSteps",
    "CurriculumSource",
    "DecisionSource",
    "EveryNEpochs",
    "EveryNSeconds",
    "EveryNSteps",
    "IndicesSource",
    "OnceAtStart",
    "Overhead",
    "Resync",
    "RunInfoSource",
    "SeedSource",
    "SharedValue",
    "SyncState",
    "Transport",
    "register",
]


# One schema for each unit: a merge of two of them cannot keep the keys of both.
@dataclass
class EveryNSteps:
    """``syncstate/schedule=every_n_steps``."""

    _target_: str = MISSING
    steps: int = MISSING
    start: int = MISSING
    stop: int | None = MISSING


@dataclass
class EveryNEpochs:
    """``syncstate/schedule=every_n_epochs``."""

    _target_: str = MISSING
    epochs: int = MISSING
    start: int = MISSING
    stop: int | None = MISSING


@dataclass
class EveryNSeconds:
    """``syncstate/schedule=every_n_seconds``."""

    _target_: str = MISSING
    seconds: float = MISSING
    start: int = MISSING
    stop: int | None = MISSING


@dataclass
class Overhead:
    """``syncstate/schedule=overhead``."""

    _target_: str = MISSING
    overhead: float = MISSING
    start: int = MISSING
    stop: int | None = MISSING


@dataclass
class AtSteps:
    """``syncstate/schedule=at_steps``."""

    _target_: str = MISSING
    steps: list[int] = MISSING


@dataclass
class OnceAtStart:
    """``syncstate/schedule=once``."""

    _target_: str = MISSING


@dataclass
class Transport:
    """``syncstate/transport``: the same keys in every option, so that sweeps over options compose."""

    async_op: bool | None = MISSING
    lag: int | None = MISSING
    timeout: float | None = MISSING
    frame_bytes: int | None = MISSING
    max_bytes: int | None = MISSING


@dataclass
class SeedSource:
    """``syncstate/values=[seed]``."""

    _target_: str = MISSING
    base: int | None = MISSING
    per_rank: bool = MISSING
    apply: list[str] = MISSING


@dataclass
class IndicesSource:
    """``syncstate/values=[indices]``."""

    _target_: str = MISSING
    population: Any = MISSING
    k: int | None = MISSING
    weights: Any = MISSING
    replacement: bool = MISSING
    send: str = MISSING


@dataclass
class CurriculumSource:
    """``syncstate/values=[curriculum]`` and ``[curriculum_quantile]``."""

    _target_: str = MISSING
    schedule: str = MISSING
    start: float | None = MISSING
    end: float | None = MISSING
    steps: int | None = MISSING
    degree: float = MISSING
    milestones: Any = MISSING
    multiple: float | None = MISSING
    quantile: float | None = MISSING
    warmup: int = MISSING
    smoothing: float = MISSING
    initial: float | None = MISSING


@dataclass
class DecisionSource:
    """``syncstate/values=[stop]``."""

    _target_: str = MISSING
    predicate: Any = MISSING
    reduce: Any = MISSING
    stop_host: bool = MISSING


@dataclass
class RunInfoSource:
    """``syncstate/values=[run_info]``."""

    _target_: str = MISSING
    _recursive_: bool = MISSING
    run_dir: Any = MISSING
    extra: Any = MISSING


@dataclass
class Resync:
    """``syncstate/resync``: the same keys in every option."""

    _target_: str = MISSING
    every: Any = None
    mode: str = MISSING
    source: str = MISSING
    include: list[str] = MISSING
    exclude: list[Any] = MISSING
    bucket_bytes: int = MISSING
    on_drift: Any = MISSING


@dataclass
class SharedValue:
    """One entry of ``syncstate.values``: the keywords of ``SharedState.add``. Null stands for its default."""

    source: Any = MISSING
    every: Any = None
    collect: Any = None
    reduce: str | None = "list"
    deliver: str | None = "broadcast"
    apply: Any = None
    spec: Any = None
    device: str | None = None
    initial: Any = None
    async_op: bool | None = None
    lag: int | None = None
    scope: str | None = None
    timeout: float | None = None
    checkpoint: bool | None = None


@dataclass
class SyncState:
    """The ``syncstate`` node: groups, values, and the options of the engine and the state."""

    schedule: Any = None
    transport: Any = None
    resync: Any = None
    values: dict[str, SharedValue] = field(default_factory=dict)
    seed: int | None = MISSING
    scope: str | None = MISSING
    main: int | None = MISSING
    group: str | None = MISSING
    on_error: str | None = MISSING
    verify_values: bool | None = MISSING
    events: Any = MISSING
    config: Any = MISSING
    allow_pickle: bool | None = MISSING
    observe_capacity: int | None = MISSING


def register() -> None:
    """Put the schemas into Hydra's config store; once more does no harm."""
    schemas = {
        "every_n_steps": EveryNSteps,
        "every_n_epochs": EveryNEpochs,
        "every_n_seconds": EveryNSeconds,
        "overhead": Overhead,
        "at_steps": AtSteps,
        "once": OnceAtStart,
        "transport": Transport,
        "seed": SeedSource,
        "indices": IndicesSource,
        "curriculum": CurriculumSource,
        "decision": DecisionSource,
        "run_info": RunInfoSource,
        "resync": Resync,
        "syncstate": SyncState,
    }
    for name, schema in schemas.items():
        ConfigStore.instance().store(group="syncstate_schema", name=name, node=schema, provider="syncstate")


register()
