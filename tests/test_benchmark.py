"""The benchmark recipe measures, tells and draws. What it finds on this machine is no matter of tests."""

import functools
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
from run_script import run_script

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
sys.path.insert(0, str(RECIPES))  # where scripts find their neighbours, as when they are run
from bench_lab import Lab, Operation, Reading, Settings  # noqa: E402
from bench_link import ASYNCHRONOUS, BARE, BLOCKING, NONE, Block, Link, Trace, run_link  # noqa: E402
from bench_link_rows import link_readings  # noqa: E402
from bench_namespaces import NoLink, run_on_two_hosts  # noqa: E402
from bench_peers import raw  # noqa: E402
from bench_report import Machine, combine, table  # noqa: E402
from benchmark import check  # noqa: E402

TINY = [
    *("world_sizes=[2]", "runs=1", "repetitions=3", "peer_repetitions=2", "calls=10", "blocks=2", "indices=5000"),
    *("link.steps=2", "link.rounds=1", "link.milliseconds=5", "resync=500"),
]
SETTINGS = Settings(repetitions=3, peers=True, peer_repetitions=2, small=4, indices=5000, calls=10, blocks=2)
MACHINE = Machine("now", 2, "Linux x86_64", "3.11", {"syncstate": "0", "torch": "2"}, 0.0, 0.0, 1.0)


def run_python(folder: Path, *command: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env={**os.environ, **env},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


@functools.cache
def has_link() -> bool:
    """Whether this user may make two hosts on this machine."""
    try:
        run_on_two_hosts(["cat"], ["", ""], mbit=200, timeout=20, env={})
    except NoLink:
        return False
    return True


# ---------------------------------------------------------------- the whole


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> "tuple[subprocess.CompletedProcess[str], Path]":
    folder = tmp_path_factory.mktemp("benchmark")
    return run_python(folder, str(RECIPES / "benchmark.py"), f"hydra.run.dir={folder}", *TINY), folder


@pytest.mark.timeout(240)  # many processes that import much, one after the other
def test_every_row_is_measured_and_told(finished: Any) -> None:
    done, folder = finished
    assert done.returncode == 0, done.stderr
    content = json.loads((folder / "benchmark.json").read_text())
    assert set(content) == {"machine", "config", "rows", "figures"}
    assert content["config"]["world_sizes"] == [2]
    assert list(content["rows"]) == [
        *("scalars", "tensors", "indices", "idle", "collectives", "training"),
        *("resync_equal", "resync_one", "resync_copy", "resync_average"),
        *("link", "link_wait", "link_busy"),
    ]
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
        ("collectives", "syncstate, with collect"),
        ("collectives", "syncstate, with a large collect"),
        ("collectives", "syncstate, scatter"),
        ("collectives", "syncstate, a large scatter"),
        ("training", "syncstate"),
        ("resync_equal", "syncstate"),
        ("resync_one", "syncstate"),
        ("resync_copy", "syncstate"),
        ("resync_copy", "syncstate, all differ"),
        ("resync_average", "syncstate"),
        *([("link", "syncstate, idle processor"), ("link_wait", "syncstate"), ("link_busy", "syncstate")] * has_link()),
    ]
    assert all(len(figure["runs"]) == 1 for figure in found.values())
    assert all(figure["value"] > 0 for figure in found.values() if figure["unit"] != "%")
    assert (folder / "benchmark_link.png").exists() == has_link()
    assert ("is left out" in done.stdout) != has_link()
    assert [contender for _, contender in found if contender not in done.stdout] == []
    assert (folder / "benchmark.txt").read_text().strip() in done.stdout


def test_a_sync_takes_one_collective_and_a_second_above_the_frame(finished: Any) -> None:
    figures = json.loads((finished[1] / "benchmark.json").read_text())["figures"]
    assert {figure["contender"]: figure["value"] for figure in figures if figure["row"] == "collectives"} == {
        "syncstate, 20 small tensors": 1,
        "syncstate, more than a frame": 2,
        "syncstate, with collect": 2,
        "syncstate, with a large collect": 3,
        "syncstate, scatter": 1,
        "syncstate, a large scatter": 2,
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
    assert len(np.unique(pixels[::3, ::3].reshape(-1, pixels.shape[2]), axis=0)) > 50


def config(*overrides: str) -> DictConfig:
    defaults = OmegaConf.load(RECIPES.parent / "configs" / "experiment" / "benchmark.yaml")
    merged = OmegaConf.merge(defaults, OmegaConf.from_dotlist(list(overrides)))
    assert isinstance(merged, DictConfig)
    return merged


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "rows=[scalars,scalar]",
            "rows: no row 'scalar'; there are scalars, tensors, indices, idle, collectives, "
            "training, resync_equal, resync_one, resync_copy, resync_average, link, link_wait, link_busy",
        ),
        ("runs=0", "runs must be at least 1, got 0"),
        ("world_sizes=[2,1]", "world_sizes must be at least 2, got 1"),
        ("link.lag=0", "link: steps, rounds and lag must be at least 1, got 0"),
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


# ---------------------------------------------------------------- two hosts


def on_two_hosts(script: str, messages: tuple[str, str], mbit: float = 200.0, timeout: float = 20.0) -> None:
    if not has_link():
        pytest.skip("two hosts cannot be made here")
    run_on_two_hosts(["sh", "-c", script], messages, mbit=mbit, timeout=timeout, env={})


def test_a_host_sees_nothing_but_the_link(tmp_path: Path) -> None:
    paths = tmp_path / "0", tmp_path / "1"
    script = "read path; grep -o '^ *[a-z0-9]*:' /proc/self/net/dev > $path"
    on_two_hosts(script, (f"{paths[0]}\n", f"{paths[1]}\n"))
    assert [sorted(path.read_text().split()) for path in paths] == [["lo:", "slow0:"]] * 2


def test_a_host_that_fails_ends_the_other_one() -> None:
    with pytest.raises(RuntimeError, match="host 1 failed"):
        on_two_hosts("read what; exec $what", ("sleep 100\n", "false\n"), timeout=100)


def test_hosts_are_ended_when_the_time_is_over() -> None:
    with pytest.raises(TimeoutError, match=r"not done within 0\.2 s"):
        on_two_hosts("exec sleep 100", ("", ""), timeout=0.2)


def test_without_the_commands_there_is_no_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoLink, match="there is no command 'unshare'"):
        run_on_two_hosts(["cat"], ["", ""], mbit=200, timeout=20, env={})


def test_a_row_that_needs_a_link_is_left_out_where_there_is_none(tmp_path: Path) -> None:
    options = (f"hydra.run.dir={tmp_path}", "rows=[link]", *TINY)
    (done,) = run_script(tmp_path, RECIPES / "benchmark.py", *options, env={"PATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "what needs a slow link is left out: there is no command 'unshare' (util-linux)" in done.stdout
    assert json.loads((tmp_path / "benchmark.json").read_text())["figures"] == []


def test_both_ranks_hold_each_value_at_its_step_and_take_turns_alike() -> None:
    if not has_link():
        pytest.skip("two hosts cannot be made here")
    # A rank that holds another value than that of its step, or half of one, fails.
    traces = run_link(Link(mbit=200, nbytes=40_000, milliseconds=3, lag=2, steps=3, rounds=2), timeout=60)
    ways = {kind: [[block.way for block in getattr(trace, kind)] for trace in traces] for kind in ("idle", "busy")}
    for first, second in ways.values():
        assert first == second
        assert sorted(first[:4]) == sorted(first[4:]) == sorted([NONE, BLOCKING, ASYNCHRONOUS, BARE])
    assert traces[0].wire == traces[1].wire
    blocks = [block for trace in traces for block in trace.idle + trace.busy]
    assert {(len(block.seconds), len(block.waits)) for block in blocks} == {(3, 3)}


def a_trace(**added: float) -> Trace:
    """A run of two rounds, with steps of 30 ms and what each way adds to them, in ms on average."""

    def block(way: str, added: float) -> Block:
        return Block(way, [0.030, 0.030 + 2 * added / 1000], [0.0, 2 * added / 1000])

    ways = {NONE: 0.0, BLOCKING: 10.0, ASYNCHRONOUS: added["later"], BARE: added["bare"]}
    return Trace(0.010, *([block(way, more) for _ in range(2) for way, more in ways.items()] for _ in range(2)))


def test_what_a_way_adds_is_told_for_the_slowest_rank() -> None:
    found = link_readings([a_trace(later=0.1, bare=0.6), a_trace(later=0.4, bare=0.2)])
    told = {row: [(r.contender, round(r.value, 6), r.target) for r in readings] for row, readings in found.items()}
    assert told == {
        "link": [
            ("syncstate, idle processor", 4.0, 5.0),
            ("bare async_op, idle processor", 6.0, None),
            ("syncstate, computing", 4.0, None),
            ("bare async_op, computing", 6.0, None),
        ],
        "link_wait": [("syncstate", 4.0, 5.0), ("bare async_op", 6.0, None)],
        "link_busy": [
            ("syncstate", round(30.4 / 30.6, 6), 1.1),
            ("syncstate, blocking", round(40 / 30.6, 6), None),
            ("no sync", round(30 / 30.6, 6), None),
        ],
    }


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
    lab.ratio("itself", raw(sent), over=raw(sent), want=list(sent), excess=True)
    lab.collectives("two", Operation(lambda: [dist.barrier(), dist.barrier()], list))
    lab.microseconds("nothing", lambda calls: None)
    return lab.readings


def test_every_rank_has_the_same_readings_those_of_the_slowest() -> None:
    first, second, third = returned(run_ranks(measure_a_broadcast, 3))
    assert first == second == third
    ratio, excess, count, calls = first
    assert ratio.contender == "itself"
    assert ratio.target == 7.0  # set for two ranks and more
    assert ratio.low <= ratio.value <= ratio.high
    assert ratio.seconds is not None
    assert ratio.baseline is not None
    assert ratio.value == pytest.approx(ratio.seconds / ratio.baseline)
    assert excess.seconds is not None
    assert excess.baseline is not None
    assert excess.value == pytest.approx(100 * (excess.seconds / excess.baseline - 1))
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
