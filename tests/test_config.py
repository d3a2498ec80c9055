"""Hydra configs compose as a user expects, or fail with the key that is wrong."""

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import hydra
import pytest
from hydra.errors import ConfigCompositionException
from hydra_project import compose_in, importable, run_in, write_project
from omegaconf import DictConfig, OmegaConf

from syncstate import At, Context, Every, Once, SyncEngine
from syncstate.config import build
from syncstate.errors import ConfigError

CALLBACK = "callbacks=[default,syncstate]"
SEED = "syncstate/values=[seed]"
SEED_EVERY = "syncstate/schedule@syncstate.values.seed.every"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with importable(write_project(tmp_path_factory.mktemp("project"))) as folder:
        yield folder


@pytest.fixture
def composed(project: Path) -> Callable[..., DictConfig]:
    """Compose the project's config with the callback and return its syncstate node."""
    return lambda *overrides: compose_in(project, CALLBACK, *overrides).syncstate


# What composes


def test_a_lightning_project_gets_the_callback_by_one_argument(project: Path) -> None:
    cfg = compose_in(project, CALLBACK)
    assert list(cfg.callbacks) == ["model_checkpoint", "early_stopping", "syncstate"]
    assert OmegaConf.to_container(cfg.callbacks.syncstate, resolve=False) == {
        "_target_": "syncstate.lightning.SyncStateCallback.from_config",
        "_convert_": "all",
        "_recursive_": False,
        "config": "${syncstate}",
    }
    assert cfg.callbacks.syncstate.config == cfg.syncstate
    assert cfg.callbacks.early_stopping.monitor == "loss"


def test_without_the_argument_nothing_is_added(project: Path) -> None:
    assert "syncstate" not in compose_in(project)


def test_a_project_without_callbacks_adds_the_node_alone(project: Path) -> None:
    cfg = compose_in(project, "+syncstate=default", SEED)
    assert list(cfg.callbacks) == ["model_checkpoint", "early_stopping"]
    state, options = build(cfg.syncstate)
    assert state.names == ("seed",)
    assert options["every"] == Every(steps=100)


def test_the_defaults_are_those_of_the_constructors(composed: Callable[..., DictConfig]) -> None:
    state, options = build(composed())
    assert state.names == ()
    defaults = {name: p.default for name, p in inspect.signature(SyncEngine).parameters.items()}
    assert options == {**{name: defaults[name] for name in options}, "every": Every(steps=100)}
    SyncEngine(state, **options)


def test_the_period_is_one_key(composed: Callable[..., DictConfig]) -> None:
    assert build(composed("syncstate.schedule.steps=50"))[1]["every"] == Every(steps=50)


@pytest.mark.parametrize(
    ("option", "node", "schedule"),
    [
        ("every_n_steps", {"_target_": "syncstate.Every", "steps": 100, "start": 0, "stop": None}, Every(steps=100)),
        ("every_n_epochs", {"_target_": "syncstate.Every", "epochs": 1, "start": 0, "stop": None}, Every(epochs=1)),
        ("at_steps", {"_target_": "syncstate.At", "steps": [0]}, At([0])),
        ("once", {"_target_": "syncstate.Once"}, Once()),
    ],
)
def test_another_schedule_leaves_no_key_of_the_other_unit(
    composed: Callable[..., DictConfig], option: str, node: dict[str, Any], schedule: object
) -> None:
    cfg = composed(f"syncstate/schedule={option}")
    assert cfg.schedule == node
    assert build(cfg)[1]["every"] == schedule


def test_values_are_chosen_as_a_list(composed: Callable[..., DictConfig]) -> None:
    cfg = composed("syncstate/values=[seed,indices]", "syncstate.values.indices.source.population=64")
    state, _ = build(cfg)
    assert state.names == ("seed", "indices")
    assert state._definitions["seed"].every is None


def test_a_value_takes_a_schedule_of_its_own_by_group(composed: Callable[..., DictConfig]) -> None:
    cfg = composed(SEED, f"{SEED_EVERY}=every_n_steps", "syncstate.values.seed.every.steps=7")
    state, options = build(cfg)
    assert state._definitions["seed"].every == Every(steps=7)
    assert options["every"] == Every(steps=100)
    assert build(composed(SEED, f"{SEED_EVERY}=once"))[0]._definitions["seed"].every == Once()


def test_a_projects_own_values_stand_beside_ours(composed: Callable[..., DictConfig]) -> None:
    own = "syncstate/schedule@syncstate.values.hard.every"
    cfg = composed("syncstate/values=[seed,hard]", f"{own}=at_steps", "syncstate.values.hard.every.steps=[3,9]")
    state, _ = build(cfg)
    assert state.names == ("seed", "hard")
    assert state._definitions["hard"].every == At([3, 9])
    assert state._definitions["hard"].source(Context(step=5)) == 5


def test_an_experiment_chooses_everything(project: Path) -> None:
    state, options = build(compose_in(project, "experiment=epochs").syncstate)
    assert state.names == ("seed", "hard")
    assert options["every"] == Every(epochs=3)


def test_options_are_keys_of_the_engine_and_the_state(composed: Callable[..., DictConfig]) -> None:
    state, options = build(
        composed(
            "syncstate.seed=7", "syncstate.transport.timeout=12", "syncstate.transport.frame_bytes=32768",
            "syncstate.on_error=keep", "syncstate.verify_values=true", "syncstate.allow_pickle=true",
            "syncstate.config=${data}",
        )
    )  # fmt: skip
    assert state.allow_pickle is True
    assert (options["seed"], options["timeout"], options["frame_bytes"]) == (7, 12.0, 32768)
    assert (options["on_error"], options["verify_values"], options["config"]["size"]) == ("keep", True, 16)


def test_null_stands_for_the_constructors_default(composed: Callable[..., DictConfig]) -> None:
    cfg = composed("syncstate.seed=null", "syncstate.transport.timeout=null", "syncstate.schedule.stop=null")
    options = build(cfg)[1]
    assert "seed" not in options
    assert "timeout" not in options


def test_the_initial_value_is_a_key_and_may_be_built(composed: Callable[..., DictConfig]) -> None:
    values = "syncstate/values=[seed,hard]"
    assert dict(build(composed(values))[0]) == {}
    assert dict(build(composed(values, "syncstate.values.hard.initial=4"))[0]) == {"hard": 4}
    path = "syncstate.values.hard.initial={_target_: pathlib.PurePosixPath, _args_: [a, b]}"
    assert dict(build(composed(values, path))[0]) == {"hard": PurePosixPath("a/b")}


def test_a_tree_that_hydra_instantiated_builds_the_same(composed: Callable[..., DictConfig]) -> None:
    cfg = composed(SEED, "syncstate/schedule=once")
    tree = hydra.utils.instantiate(cfg, _convert_="all")
    state, options = build(tree)
    assert (state.names, options["every"]) == (("seed",), Once())
    assert state._definitions["seed"].source is tree["values"]["seed"]["source"]


# What does not


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["syncstate.schedule.steps=abc"], ["syncstate.schedule.steps", "'abc'", "Integer"]),
        (["syncstate.schedule.steps=2.5"], ["syncstate.schedule.steps", "2.5", "Integer"]),
        (["syncstate.schedule.steps=null"], ["syncstate.schedule.steps"]),
        (["syncstate.schedule.epochs=2"], ["syncstate.schedule.epochs"]),
        (["syncstate/schedule=at_steps", "syncstate.schedule.steps=[1,x]"], ["syncstate.schedule.steps", "'x'"]),
        (["syncstate.transport.timeout=soon"], ["syncstate.transport.timeout", "'soon'", "Float"]),
        (["syncstate.verify_values=perhaps"], ["syncstate.verify_values", "'perhaps'", "bool"]),
        (["syncstate.sede=1"], ["syncstate.sede"]),
        ([SEED, "syncstate.values.seed.evry=1"], ["syncstate.values.seed.evry"]),
        ([SEED, "syncstate.values.seed.source.base=x"], ["syncstate.values.seed.source.base", "'x'", "Integer"]),
        ([SEED, "syncstate.values.seed.source.bass=1"], ["syncstate.values.seed.source.bass"]),
    ],
)
def test_wrong_types_and_unknown_keys_fail_while_composing(
    composed: Callable[..., DictConfig], overrides: list[str], named: list[str]
) -> None:
    with pytest.raises(ConfigCompositionException) as caught:
        composed(*overrides)
    text = f"{caught.value}\n{caught.value.__cause__}"
    assert [word for word in named if word not in text] == []


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["syncstate.schedule.steps=0"], ["syncstate.schedule.steps=0", "at least 1"]),
        (["syncstate.schedule.start=-1"], ["syncstate.schedule.start=-1", "at least 0"]),
        (["+syncstate.schedule.epochs=2"], ["syncstate.schedule.steps=100", "schedule.epochs=2", "exactly one"]),
        (["+syncstate.schedule.stpes=2"], ["syncstate.schedule.stpes", "allowed are steps, epochs"]),
        (["syncstate/schedule=once", "+syncstate.schedule.steps=2"], ["syncstate.schedule.steps", "allowed are none"]),
        (["+syncstate.transprot=1"], ["syncstate.transprot", "allowed are schedule, transport"]),
        (["+syncstate.transport.log=1"], ["syncstate.transport.log", "allowed are async_op, lag"]),
        (["+syncstate.resync.mode=check"], ["syncstate.resync", "not available yet"]),
        ([SEED, "+syncstate.values.seed.evry=1"], ["syncstate.values.seed.evry", "allowed are source, every"]),
        ([SEED, "+syncstate.values.seed.source.bass=1"], ["syncstate.values.seed.source", "bass"]),
        (["syncstate/values=[indices]"], ["syncstate.values.indices.source.population has no value"]),
        (
            [SEED, f"{SEED_EVERY}=every_n_steps", "syncstate.values.seed.every.steps=0"],
            ["syncstate.values.seed.every.steps=0", "at least 1"],
        ),
        ([SEED, "+syncstate.values.seed.every={steps: 2, epochs: 1}"], ["values.seed.every.steps=2", "epochs=1"]),
    ],
)
def test_build_names_the_key_what_was_given_and_what_is_allowed(
    composed: Callable[..., DictConfig], overrides: list[str], named: list[str]
) -> None:
    node = composed(*overrides)
    with pytest.raises(ConfigError) as caught:
        build(node)
    assert [word for word in named if word not in str(caught.value)] == []


# The command line


def test_the_command_line_composes_without_torch(project: Path) -> None:
    script = (
        "import sys, hydra, json\n"
        "@hydra.main(version_base='1.3', config_path='configs', config_name='train')\n"
        "def main(cfg):\n"
        "    print(json.dumps([cfg.syncstate.schedule.steps, list(cfg.syncstate['values']), 'torch' in sys.modules]))\n"
        "main()\n"
    )
    (project / "app.py").write_text(script)
    sweep = run_in(project, "app.py", "-m", "hydra/job_logging=none", "hydra/hydra_logging=none", CALLBACK, SEED,
                   "syncstate.schedule.steps=10,20")  # fmt: skip
    assert [json.loads(line) for line in sweep.stdout.splitlines()] == [[10, ["seed"], False], [20, ["seed"], False]]


def test_a_wrong_type_on_the_command_line_ends_the_program_with_the_key(project: Path) -> None:
    done = run_in(project, "src/train.py", CALLBACK, "syncstate.schedule.steps=abc")
    assert done.returncode == 1
    assert "full_key: syncstate.schedule.steps" in done.stderr
    assert "Value 'abc' of type 'str' could not be converted to Integer" in done.stderr
