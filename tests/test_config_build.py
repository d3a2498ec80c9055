"""`build` makes of a config what it says; its keys are those of the constructors."""

import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import hydra
import pytest
import torch
from hydra_project import importable, write_project
from omegaconf import OmegaConf

import syncstate.config
import syncstate.configs
from syncstate import At, Context, Every, Once, ParameterResync, SharedState, SyncEngine, TensorSpec
from syncstate.config import build
from syncstate.errors import ConfigError

CONFIGS = Path(str(syncstate.configs.__file__)).parent


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with importable(write_project(tmp_path_factory.mktemp("project"))) as folder:
        yield folder


@pytest.fixture
def hard(project: Path) -> ModuleType:
    """The project's module of sources."""
    return importlib.import_module("src.hard")


@pytest.mark.parametrize(
    ("node", "named"),
    [
        ("default", ["syncstate is the string 'default'", "hydra.searchpath=[pkg://syncstate.configs]"]),
        ({"schedule": "every_n_epochs"}, ["syncstate.schedule is the string", "syncstate/schedule=every_n_epochs"]),
        ({"values": ["seed"]}, ["syncstate.values must be a config with keys", "['seed']"]),
        ({"values": {"seed": "seed"}}, ["syncstate.values.seed is the string 'seed'"]),
        (
            {"values": {"seed": {"source": hash, "every": "once"}}},
            ["syncstate/schedule@syncstate.values.seed.every=once"],
        ),
        (None, ["syncstate must be a config with keys, got None"]),
    ],
)
def test_a_string_where_a_config_was_expected_says_what_to_do(node: Any, named: list[str]) -> None:
    with pytest.raises(TypeError) as caught:
        build(node)
    assert [word for word in named if word not in str(caught.value)] == []


# Sources


def one(source: Any, **keys: Any) -> Any:
    """The definition of a value with this source."""
    return build({"values": {"x": {"source": source, **keys}}})[0]._definitions["x"]


def test_a_source_is_a_dotted_name(hard: ModuleType) -> None:
    assert one("src.hard.hardest").source is hard.hardest


def test_a_source_is_a_target_with_plain_arguments(hard: ModuleType) -> None:
    source = one({"_target_": "src.hard.Hardest", "k": 3, "scores": [1, 2]}).source
    assert source.compute(Context(step=4)) == 12
    assert type(source.scores) is list


def test_a_partial_is_called_without_hydra_in_between(hard: ModuleType) -> None:
    given = {"_target_": "src.hard.offset", "_partial_": True, "by": 5}
    for node in (given, hydra.utils.instantiate(given)):
        source = one(node).source
        assert type(source) is functools.partial
        assert (source.func, source.keywords) == (hard.offset, {"by": 5})
        assert source(Context(step=4)) == 9
    assert one({"_target_": "src.hard.hardest", "_partial_": True}).source is hard.hardest


def test_built_objects_pass_through(hard: ModuleType) -> None:
    built = hard.Hardest(2)
    parts = {"source": built, "every": Every(steps=5), "apply": hard.watch, "spec": int, "initial": 0}
    for node in (
        {"values": {"x": parts}, "schedule": Once()},
        OmegaConf.create({"values": {"x": {"source": built, "apply": hard.watch}}}, flags={"allow_objects": True}),
    ):
        definition = build(node)[0]._definitions["x"]
        assert definition.source is built
    definition = one(**parts)
    assert (definition.every, definition.spec, definition.initial) == (Every(steps=5), int, 0)
    assert one({"_target_": "src.hard.Hardest", "k": 1, "scores": built}).source.scores is built
    assert one(hard.hardest).source is hard.hardest


def test_apply_and_spec_are_named_as_well(hard: ModuleType) -> None:
    assert one("src.hard.hardest", spec="float").spec is float
    assert one("src.hard.hardest", spec="torch.Tensor").spec is torch.Tensor
    shape = {"shape": [2, 3], "dtype": "torch.int64"}
    for spec in (shape, {"_target_": "syncstate.TensorSpec", **shape}):
        assert one("src.hard.hardest", spec=spec).spec == TensorSpec((2, 3), torch.int64)
    assert one("src.hard.hardest", apply="src.hard.watch").apply is hard.watch


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("src.hard.hradest", ["syncstate.values.x.source", "'src.hard.hradest'", "src.module.function"]),
        ("nowhere.hardest", ["syncstate.values.x.source", "'nowhere.hardest'"]),
        ("src.hard.Hardest", ["syncstate.values.x.source", "is a class", "_target_: src.hard.Hardest"]),
        ({"_target_": "src.hard.Hardest"}, ["syncstate.values.x.source", "'k'"]),
        ({"_target_": "src.hard.Hardest", "k": "???"}, ["syncstate.values.x.source.k has no value"]),
        ({"k": 1}, ["syncstate.values.x.source", "'k'", "no _target_"]),
        ("???", ["syncstate.values.x.source has no value"]),
        (3, ["syncstate.values.x", "3"]),
    ],
)
def test_a_source_that_cannot_be_had_is_named(project: Path, source: Any, named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        one(source)
    assert [word for word in named if word not in str(caught.value)] == []


# Keys are an interface


def keys_of(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


def test_keys_are_the_argument_names_of_the_constructors() -> None:
    config = syncstate.config
    assert {*config.ENGINE, *config.TRANSPORT, "state", "every", "resync"} == keys_of(SyncEngine)
    assert {*config.STATE, "values"} == keys_of(SharedState)
    assert {*config.VALUE, "name"} == keys_of(SharedState.add)
    assert set(config.RESYNC) == keys_of(ParameterResync)
    assert {kind: set(keys) for kind, keys in config.SCHEDULES.items()} == {k: keys_of(k) for k in (Every, At, Once)}


def yaml_of(path: Path) -> dict[str, Any]:
    node = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items() if key != "defaults"}


def keys_in(path: Path) -> dict[str, Any]:
    """What a file sets of the thing that it builds, on top of what the option sets that it begins with."""
    node = yaml_of(path)
    if path.parent.name != "values":
        return node
    ((name, value),) = node.items()
    first = path.stem.removesuffix("_quantile")  # a second option for one value
    assert (name, list(value)) == (first, ["source"])
    below = {} if first == path.stem else keys_in(path.with_stem(first))
    return {**below, **value["source"]}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("syncstate/**/*.yaml")), ids=lambda p: str(p.relative_to(CONFIGS)))
def test_yaml_keys_and_defaults_are_those_of_what_they_build(path: Path) -> None:
    node = keys_in(path)
    target, _ = node.pop("_target_", None), node.pop("_recursive_", None)
    if target is not None:
        parameters = dict(inspect.signature(hydra.utils.get_object(target)).parameters)
    else:
        # The same keys in every transport; the engine's defaults are the blocking ones.
        parameters = {**inspect.signature(SyncEngine).parameters, **inspect.signature(SharedState).parameters}
    assert set(node) <= set(parameters)
    if path.parent.name == "values":
        assert set(node) == set(parameters)
    if path.stem in ("default", "blocking", "seed", "indices", "stop", "run_info"):
        defaults = {k: parameters[k].default for k in node if parameters[k].default is not inspect.Parameter.empty}
        assert {k: node[k] if node[k] != [] else () for k in defaults} == defaults


def test_all_transports_have_the_same_keys_and_differ_in_the_mode() -> None:
    blocking, asynchronous = (yaml_of(CONFIGS / "syncstate/transport" / f"{n}.yaml") for n in ("blocking", "async"))
    assert list(blocking) == list(asynchronous)
    assert {key for key in blocking if blocking[key] != asynchronous[key]} == {"async_op"}


def test_schedules_differ_in_their_unit_only() -> None:
    units = {
        path.stem: set(node) - {"_target_", "start", "stop"}
        for path in (CONFIGS / "syncstate/schedule").glob("*.yaml")
        if "start" in (node := yaml_of(path))
    }
    assert units == {
        "every_n_steps": {"steps"},
        "every_n_epochs": {"epochs"},
        "every_n_seconds": {"seconds"},
        "overhead": {"overhead"},
    }


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("syncstate/**/*.yaml")), ids=lambda p: str(p.relative_to(CONFIGS)))
def test_every_key_has_its_comment(path: Path) -> None:
    lines = path.read_text().split("_self_\n")[-1].splitlines()
    keys = [line for line in lines if re.match(r"\s*\w+: \S", line) and "_target_" not in line]
    assert [line for line in keys if " # " not in line] == []
