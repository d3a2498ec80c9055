"""Trainings of a project that was changed by nothing but the arguments of its command line."""

import json
from pathlib import Path

import hydra
import pytest
from hydra.errors import InstantiationException
from hydra_project import compose_in, run_in, write_project
from run_script import run_script

from syncstate.lightning import SyncStateCallback

CALLBACK = "callbacks=[default,syncstate]"
SEED = "syncstate/values=[seed]"


def test_a_training_of_one_process_shares_values_by_one_argument(tmp_path: Path) -> None:
    project = write_project(tmp_path)
    arguments = (CALLBACK, SEED, "syncstate.schedule.steps=4", "syncstate.values.seed.source.base=0")
    (done,) = run_script(project, project / "src" / "train.py", *arguments)
    assert done.returncode == 0, done.stderr
    seen = json.loads((project / "rank0.json").read_text())["seen"]
    assert [step for step, _ in seen] == list(range(16))
    changes = [step for (step, seed), (_, before) in zip(seen[1:], seen, strict=False) if seed != before]
    assert changes == [4, 8, 12]


def test_ranks_of_lightnings_launcher_share_values_and_one_directory(tmp_path: Path) -> None:
    project = write_project(tmp_path)
    done = run_in(project, "src/train.py", CALLBACK, SEED, "trainer=ddp", env={"RUN_ID": "night"}, timeout=90)
    assert done.returncode == 0, done.stderr
    told = [json.loads((project / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert told[0]["seen"] == told[1]["seen"]
    assert len(told[0]["seen"]) == 8
    assert {t["output_dir"] for t in told} == {str(project / "logs" / "night")}


def test_an_impossible_setting_fails_before_there_is_a_trainer(tmp_path: Path) -> None:
    project = write_project(tmp_path)
    good, bad = (compose_in(project, CALLBACK, f"syncstate.schedule.steps={steps}").callbacks for steps in (1, 0))
    assert isinstance(hydra.utils.instantiate(good.syncstate), SyncStateCallback)
    with pytest.raises(InstantiationException, match="steps must be a whole number of at least 1, got 0"):
        hydra.utils.instantiate(bad.syncstate)
