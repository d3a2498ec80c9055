"""From a composed Hydra config to objects. Needs hydra-core.

Every key is named as the keyword of the constructor that takes it. The schemas in `syncstate.configs` catch wrong types
and unknown keys while composing; what is checked here again reaches a config past them, by `+key`, from plain dicts or
through an interpolation.
"""

import functools
from collections.abc import Collection, Mapping
from typing import Any

import hydra
import hydra.utils
from omegaconf import DictConfig, ListConfig, OmegaConf

from syncstate.errors import ConfigError, SyncStateError
from syncstate.loop.options import Options
from syncstate.resync import ParameterResync
from syncstate.schedule import At, Every, Once, Schedule
from syncstate.spec import TensorSpec
from syncstate.state import SharedState

__all__ = ["build"]

GROUPS = ("schedule", "transport", "resync", "values")
TRANSPORT = ("async_op", "lag", "timeout", "frame_bytes", "max_bytes")
ENGINE = ("seed", "scope", "main", "group", "on_error", "verify_values", "events", "config")
STATE = ("allow_pickle", "observe_capacity")
VALUE = ("source", "every", "collect", "reduce", "deliver", "apply", "spec", "device", "initial", "async_op", "lag",
         "scope", "timeout", "checkpoint")  # fmt: skip
RESYNC = ("module", "every", "mode", "source", "include", "exclude", "optimizer", "bucket_bytes", "on_drift", "group",
          "timeout")  # fmt: skip
SCHEDULES: dict[type, tuple[str, ...]] = {
    Every: ("steps", "epochs", "seconds", "overhead", "start", "stop"),
    At: ("steps",),
    Once: (),
}

_ROOT = "syncstate"
_LEFT_OPEN = "???"  # OmegaConf's mark for a value that must still be given


def build(node: Mapping[str, Any] | DictConfig) -> tuple[SharedState, dict[str, Any]]:
    """Make the state and the options of an engine or host from the composed `syncstate` node.

    Anything in the node may be built already: a schedule, a source, or a whole tree that Hydra instantiated.

    Args:
        node: The node that `configs/syncstate/default.yaml` fills, as a `DictConfig` or plain containers.

    Returns:
        The state with its values, and keyword arguments for `SyncEngine` or a host. Options that are null are left out.

    Raises:
        ConfigError: An unknown key, or a setting that is impossible; it names the key in full.
        TypeError: A string or a list where a config was expected.

    Example::

        state, options = build(cfg.syncstate)
        with SyncEngine(state, **options) as engine:
            ...
    """
    top = _mapping(_plain(node), _ROOT)
    _known(top, _ROOT, (*GROUPS, *ENGINE, *STATE))
    state = SharedState(**_given(top, STATE, _ROOT))

    options = _given(top, ENGINE, _ROOT)
    if isinstance(options.get("events"), dict):
        options["events"] = _object(options["events"], f"{_ROOT}.events")
    transport = _mapping(_or_empty(top.get("transport")), f"{_ROOT}.transport")
    _known(transport, f"{_ROOT}.transport", TRANSPORT)
    options.update(_given(transport, TRANSPORT, f"{_ROOT}.transport"))
    if top.get("schedule") is not None:
        options["every"] = _schedule(top["schedule"], f"{_ROOT}.schedule")
    if (resync := _resync(top.get("resync"), options.get("every", Every(steps=100)))) is not None:
        options["resync"] = resync

    for option, given in options.items():
        where = f"{_ROOT}.transport" if option in TRANSPORT else _ROOT
        try:
            Options(**{option: given})
        except ConfigError as error:
            raise ConfigError(f"{where}.{option}: {error}") from error

    for name, value in _mapping(_or_empty(top.get("values")), f"{_ROOT}.values").items():
        _add(state, name, value)
    return state, options


def _add(state: SharedState, name: str, node: Any) -> None:
    """Add one entry of `values` to the state."""
    key = f"{_ROOT}.values.{name}"
    node = _mapping(node, key)
    _known(node, key, VALUE)
    kwargs = _given(node, [k for k in VALUE if k != "source"], key)
    if "every" in kwargs:
        kwargs["every"] = _schedule(kwargs["every"], f"{key}.every")
    for part in ("collect", "apply"):
        # A plain word is a keyword of `add`, such as collect="observed"; what stands in a module has a dot.
        if part in kwargs and not (isinstance(kwargs[part], str) and "." not in kwargs[part]):
            kwargs[part] = _object(kwargs[part], f"{key}.{part}")
    if isinstance(kwargs.get("initial"), dict) and "_target_" in kwargs["initial"]:
        kwargs["initial"] = _object(kwargs["initial"], f"{key}.initial")
    if "spec" in kwargs:
        kwargs["spec"] = _spec(kwargs["spec"], f"{key}.spec")
    source = _object(node.get("source", _LEFT_OPEN), f"{key}.source")
    if isinstance(source, type):
        raise ConfigError(f"{key}.source: {source.__qualname__} is a class; build it with _target_: {_dotted(source)}")
    try:
        state.add(name, source, **kwargs)
    except SyncStateError as error:
        raise ConfigError(f"{key}: {error}") from error


def _schedule(node: Any, key: str) -> Schedule:
    """A schedule from its keys; exactly one unit."""
    if isinstance(node, (Every, At, Once)):
        return node
    given = {k: v for k, v in _mapping(node, key).items() if v is not None}
    target = given.pop("_target_", None)
    if target is None:
        kind: Any = At if isinstance(given.get("steps"), list) else Every
    else:
        kind = _named(target, f"{key}._target_") if isinstance(target, str) else target
    if kind not in SCHEDULES:
        raise ConfigError(f"{key}._target_ is {target!r}; allowed are syncstate.Every, syncstate.At and syncstate.Once")
    _known(given, key, SCHEDULES[kind])
    _filled(given, key)
    try:
        schedule: Schedule = kind(**given)
    except (SyncStateError, TypeError) as error:
        said = ", ".join(f"{key}.{k}={v!r}" for k, v in given.items()) or f"{key} has no keys"
        raise ConfigError(f"{said}: {error}") from error
    return schedule


def _resync(node: Any, every: Schedule, key: str = f"{_ROOT}.resync") -> Any:
    """A resync from its keys, or several; without a schedule of its own it runs by the engine's."""
    if node is None or node == {} or callable(getattr(node, "run", None)):
        return node or None
    if isinstance(node, (list, tuple)):
        return [_resync(one, every, f"{key}.{number}") for number, one in enumerate(node)] or None
    node = _mapping(node, key)
    _known(node, key, ("_target_", *RESYNC))
    given = _given(node, RESYNC, key)
    given["every"] = _schedule(given["every"], f"{key}.every") if "every" in given else every
    for part in ("module", "optimizer", "on_drift"):
        # A plain word is a keyword, such as on_drift="raise"; what stands in a module has a dot.
        named = isinstance(given.get(part), str) and "." in given[part]
        if named or isinstance(given.get(part), dict):
            given[part] = _object(given[part], f"{key}.{part}")
    if isinstance(given.get("exclude"), list):
        given["exclude"] = [_object(e, f"{key}.exclude") if isinstance(e, dict) else e for e in given["exclude"]]
    try:
        return ParameterResync(**given)
    except SyncStateError as error:
        raise ConfigError(f"{key}: {error}") from error


def _spec(node: Any, key: str) -> Any:
    """A type by its name, or a `TensorSpec` whose dtype may be a name."""
    if isinstance(node, str) and "." not in node:
        return _named(f"builtins.{node}", key)
    if isinstance(node, dict) and ("_target_" not in node or str(node["_target_"]).endswith(".TensorSpec")):
        given = {k: v for k, v in node.items() if k != "_target_"}
        _known(given, key, ("shape", "dtype"))
        if isinstance(given.get("dtype"), str):
            given["dtype"] = _named(given["dtype"], f"{key}.dtype")
        try:
            return TensorSpec(**given)
        except (SyncStateError, TypeError) as error:
            raise ConfigError(f"{key}: {error}") from error
    return _object(node, key)


def _object(node: Any, key: str) -> Any:
    """An object from a dotted name, a `_target_`, a Hydra partial, or as it is."""
    if isinstance(node, str) and node != _LEFT_OPEN:
        return _named(node, key)
    _filled(node, key)
    if isinstance(node, dict):
        if "_target_" not in node:
            raise ConfigError(
                f"{key} has the keys {', '.join(map(repr, node)) or 'none'} and no _target_; allowed are a config with "
                "_target_, a dotted name such as src.module.function, or an object"
            )
        try:
            node = hydra.utils.instantiate({"_convert_": "all", **node})
        except hydra.errors.InstantiationException as error:
            raise ConfigError(f"{key}: {error}") from error
    # Hydra's partial checks its policy anew at each call, which costs more than a sync of twenty numbers is allowed to.
    while isinstance(node, functools.partial) and type(node) is not functools.partial:
        node = functools.partial(node.func, *node.args, **node.keywords) if node.args or node.keywords else node.func
    return node


def _named(name: str, key: str) -> Any:
    """The object that a dotted name stands for."""
    try:
        return hydra.utils.get_object(name)
    except Exception as error:
        raise ConfigError(
            f"{key}: found no object named {name!r} ({error}); give the dotted name of something that can be imported, "
            "such as src.module.function"
        ) from error


def _plain(node: Any) -> Any:
    """Dicts and lists all the way down, interpolations resolved; other objects as they are."""
    if isinstance(node, (DictConfig, ListConfig)):
        return OmegaConf.to_container(node, resolve=True, throw_on_missing=False)
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_plain(value) for value in node]
    return node


def _mapping(node: Any, key: str) -> dict[str, Any]:
    """The node, if it is a config; otherwise a TypeError that says what to do."""
    if isinstance(node, dict):
        return node
    if not isinstance(node, str):
        raise TypeError(f"{key} must be a config with keys, got {node!r} of type {type(node).__name__}")
    group = key.replace(".", "/") if key == _ROOT or key.removeprefix(f"{_ROOT}.") in GROUPS else None
    if key.endswith(".every"):
        group = f"{_ROOT}/schedule@{key}"
    hint = f"; an option of a group is chosen with a slash: {group}={node}" if group else ""
    raise TypeError(
        f"{key} is the string {node!r} where a config with keys was expected{hint}. Hydra also writes a string when it "
        f"does not find the group: then install syncstate in the environment that runs this, which puts its configs on "
        "the search path, or start with --config-dir or hydra.searchpath=[pkg://syncstate.configs]"
    )


def _known(node: Mapping[str, Any], key: str, allowed: Collection[str]) -> None:
    for unknown in node:
        if unknown not in allowed:
            raise ConfigError(f"unknown key {key}.{unknown}; allowed are {', '.join(allowed) or 'none'}")


def _filled(node: Any, key: str) -> None:
    """Raise for the first value that was left open."""
    if isinstance(node, str) and node == _LEFT_OPEN:
        raise ConfigError(f"{key} has no value; it has no default: give one, for example {key}=... on the command line")
    if isinstance(node, (dict, list)):
        for part, value in node.items() if isinstance(node, dict) else enumerate(node):
            _filled(value, f"{key}.{part}")


def _given(node: Mapping[str, Any], keys: Collection[str], key: str) -> dict[str, Any]:
    """What is set to something; null stands for the default."""
    given = {k: node[k] for k in keys if node.get(k) is not None}
    for k, value in given.items():
        if isinstance(value, str):
            _filled(value, f"{key}.{k}")
    return given


def _or_empty(node: Any) -> Any:
    return {} if node is None else node


def _dotted(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
