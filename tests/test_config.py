"""Hydra configs compose as a user expects, or fail with the key that is wrong."""

import inspect
import json
import math
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
from syncstate.values.plateau import Plateau

CALLBACK = "callbacks=[default,syncstate]"
SEED = "syncstate/values=[seed]"
SEED_EVERY = "syncstate/schedule@syncstate.values.seed.every"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with importable(write_project(tmp_path_factory.mktemp("project"))) as folder:
        yield folder


def late(ctx: Context) -> bool:
    """A vote that a config names."""
    return ctx.step >= 5


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
        (
            "every_n_seconds",
            {"_target_": "syncstate.Every", "seconds": 60.0, "start": 0, "stop": None},
            Every(seconds=60),
        ),
        (
            "overhead",
            {"_target_": "syncstate.Every", "overhead": 0.01, "start": 0, "stop": None},
            Every(overhead=0.01),
        ),
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


def test_a_transport_is_one_group_whose_keys_stay(composed: Callable[..., DictConfig]) -> None:
    overrides = ("syncstate.transport.lag=3", "syncstate.transport.timeout=12")
    for transport, async_op in (("blocking", False), ("async", True)):
        options = build(composed(f"syncstate/transport={transport}", *overrides))[1]
        assert (options["async_op"], options["lag"], options["timeout"]) == (async_op, 3, 12.0)


def test_a_curriculum_by_quantile_is_an_option_of_its_own(composed: Callable[..., DictConfig]) -> None:
    own = ("syncstate.values.curriculum.source.quantile=0.75", "syncstate.values.curriculum.source.warmup=50")
    state, _ = build(composed("syncstate/values=[curriculum_quantile]", *own))
    source = state.definition("curriculum").source
    assert (source.quantile, source.warmup, source.collect) == (0.75, 50, "observed")
    assert state["curriculum"] == math.inf
    node = composed("syncstate/values=[curriculum]", own[0])
    with pytest.raises(ConfigError, match=r"(?s)values\.curriculum\.source.*not both.*start=0\.0.*Leave these out"):
        build(node)


def test_a_curriculum_in_stairs_takes_its_milestones(composed: Callable[..., DictConfig]) -> None:
    key = "syncstate.values.curriculum.source"
    stairs = composed(
        "syncstate/values=[curriculum]", f"{key}.schedule=step", f"{key}.end=null", f"{key}.milestones={{10: 0.5}}"
    )
    source = build(stairs)[0].definition("curriculum").source
    assert [source.compute(Context(step=step)) for step in (9, 10)] == [0, 0.5]


def test_a_stop_decision_has_its_predicate_and_its_host_by_keys(composed: Callable[..., DictConfig]) -> None:
    key = "syncstate.values.stop.source"
    plateau = "{_target_: syncstate.values.plateau.Plateau, metric: loss, patience: 2}"
    state, _ = build(
        composed("syncstate/values=[stop]", f"{key}.predicate={plateau}", f"{key}.reduce=main", f"{key}.stop_host=true")
    )
    stop = state.definition("stop").source
    assert (type(stop.predicate), stop.predicate.patience, stop.rule, stop.stop_host) == (Plateau, 2, "main", True)
    method = "{_target_: hydra.utils.get_method, path: test_config.late}"
    state, _ = build(composed("syncstate/values=[stop]", f"{key}.predicate={method}", f"{key}.reduce=0.5"))
    stop = state.definition("stop").source
    assert [stop.collect(Context(step=step)) for step in (4, 5)] == [(False, 0), (True, 0)]
    assert (stop.rule, state["stop"]) == (0.5, False)


def test_the_runs_directory_and_config_are_keys(composed: Callable[..., DictConfig], tmp_path: Path) -> None:
    key = "syncstate.values.run_info.source"
    state, options = build(
        composed("syncstate/values=[run_info]", f"{key}.run_dir='{tmp_path}/{{run_id}}'", f"{key}.extra=${{data}}")
    )
    assert state.definition("run_info").every == Once()
    with SyncEngine(state, **options) as engine:
        engine.start()
    assert [str(path) for path in tmp_path.iterdir()] == [state["run_info"]["run_dir"]]
    # Told as it stands there: nothing is built from it.
    assert state["run_info"]["extra"] == {"_target_": "src.data.Numbers", "size": 16, "batch_size": 2}


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
        (
            ["syncstate/schedule=every_n_seconds", "syncstate.schedule.seconds=x"],
            ["syncstate.schedule.seconds", "Float"],
        ),
        (["syncstate/schedule=overhead", "syncstate.schedule.steps=2"], ["syncstate.schedule.steps"]),
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
        (["+syncstate.resync.mdoe=check"], ["syncstate.resync.mdoe", "allowed are _target_, module, every, mode"]),
        (["+syncstate.resync.mode=chekc"], ["syncstate.resync", "'chekc'"]),
        ([SEED, "+syncstate.values.seed.evry=1"], ["syncstate.values.seed.evry", "allowed are source, every"]),
        ([SEED, "+syncstate.values.seed.source.bass=1"], ["syncstate.values.seed.source", "bass"]),
        (
            ["syncstate/schedule=overhead", "syncstate.schedule.overhead=1"],
            ["syncstate.schedule.overhead=1", "0 and 1"],
        ),
        (["syncstate/values=[stop]", "syncstate.values.stop.source.reduce=most"], ["values.stop.source", "'most'"]),
        (["syncstate/values=[run_info]", "syncstate.values.run_info.source.run_dir='{b}'"], ["run_info.source", "{b}"]),
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
