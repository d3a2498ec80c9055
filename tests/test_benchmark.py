"""The benchmark recipe measures, tells and draws. What it finds on this machine is no matter of tests."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from matplotlib import image
from omegaconf import DictConfig, OmegaConf
from ranks import returned, run_ranks

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
sys.path.insert(0, str(RECIPES))  # where scripts find their neighbours, as when they are run
from bench_lab import Lab, Operation, Reading, Settings  # noqa: E402
from bench_peers import raw  # noqa: E402
from bench_report import Machine, combine, table  # noqa: E402
from benchmark import check  # noqa: E402

TINY = ["world_sizes=[2]", "runs=1", "repetitions=3", "peer_repetitions=2", "calls=10", "blocks=2", "indices=5000"]
SETTINGS = Settings(repetitions=3, peers=True, peer_repetitions=2, small=4, indices=5000, calls=10, blocks=2)
MACHINE = Machine("now", 2, "Linux x86_64", "3.11", {"syncstate": "0", "torch": "2"}, 0.0, 0.0, 1.0)


def run_python(folder: Path, *command: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env={**os.environ, **env},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


# ---------------------------------------------------------------- the whole


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> "tuple[subprocess.CompletedProcess[str], Path]":
    folder = tmp_path_factory.mktemp("benchmark")
    return run_python(folder, str(RECIPES / "benchmark.py"), f"hydra.run.dir={folder}", *TINY), folder


def test_every_row_is_measured_and_told(finished: Any) -> None:
    done, folder = finished
    assert done.returncode == 0, done.stderr
    content = json.loads((folder / "benchmark.json").read_text())
    assert set(content) == {"machine", "config", "rows", "figures"}
    assert content["config"]["world_sizes"] == [2]
    assert list(content["rows"]) == ["scalars", "tensors", "indices", "idle", "collectives"]
    assert {"load_before", "processors", "versions"} <= set(content["machine"])
    found = {(figure["row"], figure["contender"]): figure for figure in content["figures"]}
    assert [key for key, figure in found.items() if figure["target"] is not None] == [
        ("scalars", "syncstate"),
        ("tensors", "syncstate"),
        ("indices", "syncstate"),
        ("idle", "syncstate, engine"),
        ("idle", "syncstate, Lightning callback"),
        ("idle", "syncstate, Accelerate hook"),
        ("collectives", "syncstate, 20 small tensors"),
        ("collectives", "syncstate, more than a frame"),
    ]
    assert all(figure["value"] > 0 and len(figure["runs"]) == 1 for figure in found.values())
    assert [contender for _, contender in found if contender not in done.stdout] == []
    assert (folder / "benchmark.txt").read_text().strip() in done.stdout


def test_a_sync_takes_one_collective_and_a_second_above_the_frame(finished: Any) -> None:
    figures = json.loads((finished[1] / "benchmark.json").read_text())["figures"]
    assert {figure["contender"]: figure["value"] for figure in figures if figure["row"] == "collectives"} == {
        "syncstate, 20 small tensors": 1,
        "syncstate, more than a frame": 2,
        "object list, either": 2,
        "accelerate, dict of 20": 20,
        "ignite, 20 tensors": 20,
        "shape first, then accelerate": 3,
    }


def test_the_picture_shows_something(finished: Any) -> None:
    pixels = image.imread(finished[1] / "benchmark.png")
    height, width, _ = pixels.shape
    assert width > 1000
    assert height > 800
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 50


def config(*overrides: str) -> DictConfig:
    defaults = OmegaConf.load(RECIPES.parent / "configs" / "experiment" / "benchmark.yaml")
    merged = OmegaConf.merge(defaults, OmegaConf.from_dotlist(list(overrides)))
    assert isinstance(merged, DictConfig)
    return merged


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rows=[scalars,scalar]", "rows: no row 'scalar'; there are scalars, tensors, indices, idle, collectives"),
        ("runs=0", "runs must be at least 1, got 0"),
        ("world_sizes=[2,1]", "world_sizes must be at least 2, got 1"),
    ],
)
def test_an_impossible_setting_is_refused(override: str, message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        check(config(override))
    assert caught.value.code == message


def test_the_defaults_are_no_impossible_setting() -> None:
    check(config())


# ---------------------------------------------------------------- ranks


FAILING = """\
from bench_ranks import run_on_ranks
from failing import fail_on_rank_1

if __name__ == "__main__":
    run_on_ranks(fail_on_rank_1, 2, threads=1, timeout=60)
"""


def test_a_rank_that_fails_ends_the_others_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(FAILING)
    (tmp_path / "failing.py").write_text(
        "import torch.distributed as dist\n\n\ndef fail_on_rank_1():\n"
        "    if dist.get_rank() == 1:\n        raise ValueError('out of ink')\n    dist.barrier()\n"
    )
    path = os.pathsep.join(filter(None, [str(RECIPES), os.environ.get("PYTHONPATH")]))
    done = run_python(tmp_path, "main.py", PYTHONPATH=path)
    assert done.returncode == 1
    assert "ValueError: out of ink" in done.stderr


# ---------------------------------------------------------------- measuring


def measure_a_wrong_contender(rank: int) -> str:
    lab = Lab(SETTINGS)
    sent = torch.arange(4.0)
    wrong = Operation(lambda: None, lambda: list(torch.zeros(4)))
    with pytest.raises(RuntimeError) as caught:
        lab.ratio("careless", wrong, over=raw(sent), want=list(sent))
    return str(caught.value)


def test_a_contender_that_delivers_something_else_is_not_timed() -> None:
    told = returned(run_ranks(measure_a_wrong_contender, 2))
    assert told == [f"careless: rank {rank} does not hold what rank 0 sent" for rank in (0, 1)]


def measure_a_broadcast(rank: int) -> list[Reading]:
    lab = Lab(SETTINGS)
    sent = torch.arange(4.0)
    lab.ratio("itself", raw(sent), over=raw(sent), want=list(sent), target={2: 7.0, 4: 9.0})
    lab.collectives("two", Operation(lambda: [dist.barrier(), dist.barrier()], list))
    lab.microseconds("nothing", lambda calls: None)
    return lab.readings


def test_every_rank_has_the_same_readings_those_of_the_slowest() -> None:
    first, second, third = returned(run_ranks(measure_a_broadcast, 3))
    assert first == second == third
    ratio, count, calls = first
    assert ratio.contender == "itself"
    assert ratio.target == 7.0  # set for two ranks and more
    assert ratio.low <= ratio.value <= ratio.high
    assert ratio.seconds is not None
    assert ratio.baseline is not None
    assert ratio.value == pytest.approx(ratio.seconds / ratio.baseline)
    assert (count.value, count.target) == (2.0, None)
    assert calls.value > 0


# ---------------------------------------------------------------- telling


def a_run(value: float, target: float | None = 1.15) -> dict[str, list[Reading]]:
    return {"scalars": [Reading("syncstate", value, value - 0.5, value + 0.5, target, value / 1000, 0.001)]}


def test_a_figure_is_the_median_of_the_runs() -> None:
    (figure,) = combine("scalars", 4, [a_run(1.25), a_run(1.0), a_run(5.0)])
    assert (figure.value, figure.runs, figure.ranks) == (1.25, [1.25, 1.0, 5.0], 4)
    assert (figure.low, figure.high) == (0.75, 1.75)
    assert (figure.seconds, figure.baseline) == (0.00125, 0.001)


@pytest.mark.parametrize(("value", "target", "reached"), [(1.15, 1.15, True), (1.16, 1.15, False), (9.0, None, None)])
def test_a_figure_at_most_as_large_as_its_target_is_reached(
    value: float, target: float | None, reached: bool | None
) -> None:
    (figure,) = combine("scalars", 2, [a_run(value, target)])
    assert figure.reached is reached


def test_the_table_says_beside_each_figure_what_is_to_be_reached() -> None:
    text = table([*combine("scalars", 2, [a_run(1.0)]), *combine("scalars", 4, [a_run(2.0)])], MACHINE)
    lines = [line.split() for line in text.splitlines()]
    assert lines[4][:9] == ["syncstate", "2", "1.00", "<=", "1.15", "reached", "1.00", "to", "1.00"]
    assert lines[5][:9] == ["syncstate", "4", "2.00", "<=", "1.15", "MISSED", "2.00", "to", "2.00"]
    assert "1 of 2 figures reached" in text
    assert "busy" not in text


def test_the_table_says_if_the_machine_was_busy() -> None:
    busy = Machine("now", 2, "Linux x86_64", "3.11", {"syncstate": "0", "torch": "2"}, 3.0, 3.0, 1.0)
    assert "Other programs kept this machine busy (load 3.0 before the start)" in table([], busy)
