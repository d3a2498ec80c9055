"""One directory and one name for a run, whatever the clocks and configs of the ranks say."""

import pickle
import re
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expect import refuses
from hydra.core.hydra_config import HydraConfig
from hydra_project import compose_in, write_project
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue
from ranks import returned, run_ranks

from syncstate import Context, Every, Once, SharedState, SyncEngine
from syncstate.config import build
from syncstate.errors import ComputeError, MismatchError
from syncstate.values import RunInfo

VALUES = "syncstate/values=[run_info]"
ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}")


def made(*args: Any, **options: Any) -> dict[str, Any]:
    return RunInfo(*args, **options).compute(Context())


# Directory and name


def test_main_makes_the_directory_and_says_where_it_is(tmp_path: Path) -> None:
    for given in (tmp_path / "a" / "b", str(tmp_path / "a" / "b"), lambda ctx: tmp_path / "a" / "b"):
        info = made(given)
        assert list(info) == ["run_dir", "run_id", "extra"]
        assert info["run_dir"] == str(tmp_path / "a" / "b")
        assert (tmp_path / "a" / "b").is_dir()
        assert info["extra"] is None


def test_times_and_the_name_of_the_run_are_filled_in(tmp_path: Path) -> None:
    before = datetime.now().replace(microsecond=0)
    info = made(tmp_path / "{time}_{run_id}")
    found, run_id = Path(info["run_dir"]).name.rsplit("_", 1)
    assert before <= datetime.strptime(found, "%Y-%m-%d_%H-%M-%S") <= datetime.now()
    assert run_id == info["run_id"]
    assert ID.fullmatch(run_id)
    assert made(str(tmp_path) + "/{time:%Y}/{{x}}")["run_dir"] == str(tmp_path / f"{datetime.now():%Y}" / "{x}")


def test_a_relative_path_and_a_home_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert made("runs/../x")["run_dir"] == str(tmp_path / "x")
    assert made("~/x")["run_dir"] == str(tmp_path / "home" / "x")
    assert made()["run_dir"] == str(tmp_path)


def test_the_name_comes_from_the_system_and_not_from_a_seed() -> None:
    names = set()
    for _ in range(20):
        torch.manual_seed(0)
        np.random.seed(0)
        names.add(made()["run_id"])
    assert len(names) == 20


def test_one_source_is_one_run_also_after_pickling(tmp_path: Path) -> None:
    source = RunInfo(tmp_path / "{run_id}")
    first = source.compute(Context())
    assert source.compute(Context()) == pickle.loads(pickle.dumps(source)).compute(Context()) == first
    resumed = RunInfo(tmp_path / "{run_id}")
    assert resumed.compute(Context(previous=first)) == first
    assert len(list(tmp_path.iterdir())) == 1


# What else the ranks should know


def test_a_config_arrives_resolved_as_plain_containers() -> None:
    config = OmegaConf.create({"a": 1, "b": {"c": "${a}", "d": ["${a}", None]}})
    plain = {"a": 1, "b": {"c": 1, "d": [1, None]}}
    for given in (config, lambda ctx: config):
        found = made(extra=given)["extra"]
        assert found == plain
        assert (type(found), type(found["b"]), type(found["b"]["d"])) == (dict, dict, list)
    assert made(extra={"x": (config, 1), "y": [config]})["extra"] == {"x": (plain, 1), "y": [plain]}
    with pytest.raises(MissingMandatoryValue):
        made(extra=OmegaConf.create({"a": "???"}))


def test_under_hydra_the_directory_is_the_one_that_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HydraConfig.instance(), "cfg", OmegaConf.create(
        {"hydra": {"runtime": {"output_dir": str(tmp_path / "outputs")}}}
    ))  # fmt: skip
    assert made()["run_dir"] == str(tmp_path / "outputs")
    assert made(tmp_path / "mine")["run_dir"] == str(tmp_path / "mine")


@pytest.mark.parametrize(
    ("run_dir", "message"),
    [
        (3, "run_dir must be a path, a pattern, a function that returns one, or None, got 3"),
        ("", "run_dir must be a path, a pattern, a function that returns one, or None, got ''"),
        (
            "runs/{date}",
            "run_dir='runs/{date}' cannot be filled in (KeyError: 'date'); its fields are {time}, {time:%Y%m%d} and "
            "{run_id}, and a brace that stands for itself is written twice",
        ),
        (
            "runs/{",
            "run_dir='runs/{' cannot be filled in (ValueError: Single '{' encountered in format string); its fields "
            "are {time}, {time:%Y%m%d} and {run_id}, and a brace that stands for itself is written twice",
        ),
    ],
)
def test_run_info_refuses(run_dir: Any, message: str) -> None:
    with refuses(f"RunInfo: {message}"):
        RunInfo(run_dir)
    with refuses(f"RunInfo: {message}"):
        made(lambda ctx: run_dir)


# On ranks


def start_late(rank: int, folder: Path) -> dict[str, Any]:
    """Rank 1 starts more than a second later, with a name from its own clock."""
    time.sleep(1.2 * rank)
    own = folder / datetime.now().strftime("%H-%M-%S")
    state = SharedState()
    state.add("run", RunInfo(own / "{time}", extra={"started_by": rank}), every=Once())
    with SyncEngine(state) as engine:
        engine.start()
    return dict(state["run"])


def test_ranks_that_start_at_different_seconds_share_one_directory(tmp_path: Path) -> None:
    one, two = returned(run_ranks(start_late, 2, tmp_path))
    assert one == two
    assert one["extra"] == {"started_by": 0}
    (named,) = tmp_path.iterdir()
    (timed,) = named.iterdir()
    assert one["run_dir"] == str(timed)


def compose_late(rank: int, folder: Path) -> str:
    """Each rank composes its own config, in which `now` is another time."""
    time.sleep(1.2 * rank)
    runs = f"syncstate.values.run_info.source.run_dir='{folder}/${{now:%H-%M-%S}}'"
    state, options = build(compose_in(folder.parent / "project", "+syncstate=default", VALUES, runs).syncstate)
    with SyncEngine(state, **options) as engine:
        engine.start()
    return str(state["run_info"]["run_dir"])


def test_a_directory_named_by_hydras_clock_is_the_one_of_main(tmp_path: Path) -> None:
    write_project(tmp_path / "project")
    one, two = returned(run_ranks(compose_late, 2, tmp_path / "runs"))
    assert one == two
    assert [str(path) for path in (tmp_path / "runs").iterdir()] == [one]


def run_for(rank: int, folder: Path, saved: Path | None, every: Any) -> list[Any]:
    """The run's info at each of a few steps; resumed if there is something saved."""
    state = SharedState()
    state.add("run", RunInfo(folder / "{run_id}", extra={"resumed": saved is not None}), every=every)
    found = []
    with SyncEngine(state) as engine:
        if saved is not None:
            engine.load_state_dict(torch.load(saved, weights_only=True))
        for step in range(3) if saved is None else range(3, 6):
            engine.step(step)
            found.append(state["run"])
        if saved is None and rank == 0:
            torch.save(engine.state_dict(), folder.parent / "state.pt")
    return found


@pytest.mark.parametrize("every", [Once(), Every(steps=1)])
def test_a_run_stays_itself_at_each_refresh_and_when_it_is_resumed(tmp_path: Path, every: Any) -> None:
    runs = tmp_path / "runs"
    first = returned(run_ranks(run_for, 2, runs, None, every))
    again = returned(run_ranks(run_for, 2, runs, tmp_path / "state.pt", every))
    assert [len({str(info) for ranks in (*first, *again) for info in ranks}), len(first[0] + again[1])] == [1, 6]
    assert [str(path) for path in runs.iterdir()] == [first[0][0]["run_dir"]]
    assert first[0][0]["extra"] == {"resumed": False}


def fail_beside(rank: int, folder: Path) -> tuple[list[str], str]:
    """Another value fails in the first sync."""
    tries = iter([True, False])

    def fails_once(ctx: Context) -> int:
        if next(tries):
            raise ValueError("boom")
        return 1

    state = SharedState({"other": fails_once, "run": RunInfo(folder / "{run_id}")})
    with SyncEngine(state) as engine:
        with pytest.raises(ComputeError):
            engine.start()
        engine.start()
    return [path.name for path in folder.iterdir()], state["run"]["run_id"]


def test_a_sync_that_fails_and_is_tried_again_makes_no_second_directory(tmp_path: Path) -> None:
    for names, run_id in returned(run_ranks(fail_beside, 2, tmp_path)):
        assert names == [run_id]


def compare_configs(rank: int) -> str:
    config = OmegaConf.create({"data": {"size": 16, "path": "x" if rank < 2 else "y"}, "lr": 0.1})
    state = SharedState({"run": RunInfo(extra=config)})
    with pytest.raises(MismatchError) as caught, SyncEngine(state, config=config) as engine:
        engine.start()
    return str(caught.value)


def test_configs_that_differ_in_one_key_are_an_error_that_names_it() -> None:
    for message in returned(run_ranks(compare_configs, 3)):
        assert "config.data.path: 'x' on ranks 0-1; 'y' on rank 2" in message
