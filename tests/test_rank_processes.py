"""The processes behind `run_ranks`: their environment, how long they live, and that nothing outlives a test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import returned, run_ranks
from torch.utils.data import DataLoader


def test_the_environment_names_the_rank_and_takes_additions() -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "EXTRA")
    assert returned(run_ranks(look_up, 2, names, env={"EXTRA": "x"})) == [
        ["0", "2", "0", "2", "1", "x"],
        ["1", "2", "1", "2", "1", "x"],
    ]


def test_the_environment_can_differ_by_rank_and_lack_a_variable() -> None:
    env: list[dict[str, str | None]] = [
        {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": None},
        {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    ]
    assert returned(run_ranks(look_up, 2, ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), env=env)) == [["0", None], ["0", "1"]]


def look_up(rank: int, names: tuple[str, ...]) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def test_the_environment_of_the_test_is_that_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_BY_THE_TEST", "yes")
    assert returned(run_ranks(look_up, 1, ("SET_BY_THE_TEST",))) == [["yes"]]


def test_ranks_draw_differently_from_an_unseeded_numpy() -> None:
    first, second = returned(run_ranks(draw, 2))
    assert first != second


def draw(rank: int) -> list[float]:
    import numpy as np

    return [float(x) for x in np.random.random(4)]


def test_a_finished_rank_stays_until_the_last_has_reported() -> None:
    _, last = returned(run_ranks(is_the_other_there, 2))
    assert last is True


def is_the_other_there(rank: int) -> bool:
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        return True
    time.sleep(0.3)  # long enough for rank 0 to have gone, if it did not stay
    os.kill(pids[0], 0)
    return True


def test_output_of_a_rank_is_kept() -> None:
    outcomes = run_ranks(talk, 2)
    assert [o.stderr for o in outcomes] == ["out 0\nerr 0\n", "out 1\nerr 1\n"]


def talk(rank: int) -> None:
    print("out", rank, flush=True)
    print("err", rank, file=sys.stderr)


def test_what_a_rank_started_is_ended_with_it() -> None:
    (pid,) = returned(run_ranks(start_a_child, 1))
    wait_until(lambda: not alive(pid))


def start_a_child(rank: int) -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_data_loader_workers_run_inside_a_rank() -> None:
    assert returned(run_ranks(load, 2)) == [[0, 1, 2, 3]] * 2


def load(rank: int) -> list[int]:
    loader: DataLoader[Any] = DataLoader(range(4), num_workers=1, batch_size=None)  # type: ignore[arg-type]
    return [int(x) for x in loader]


def test_ranks_die_with_the_process_that_runs_them(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    tests = str(Path(__file__).parent)
    code = f"import test_rank_processes as t; t.run_ranks(t.note_and_wait, 2, {str(note)!r})"
    runner = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": tests})
    try:
        wait_until(lambda: note.exists() and len(note.read_text().split()) == 2)
    finally:
        runner.kill()
        runner.wait()
    pids = [int(p) for p in note.read_text().split()]
    wait_until(lambda: not any(alive(p) for p in pids))


def note_and_wait(rank: int, note: str) -> None:
    with open(note, "a") as f:
        f.write(f"{os.getpid()}\n")
    threading.Event().wait()


def wait_until(condition: Any) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("the condition did not come true within 30 s")


LEAKY = """
import os, subprocess, threading
import torch.distributed as dist

stop = threading.Event()

def test_variable():
    os.environ["LEAKED"] = "1"

def test_thread():
    threading.Thread(target=stop.wait, name="leaked-thread").start()

def test_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def test_process():
    subprocess.Popen(["sleep", "600"])

def test_nothing_is_left_of_all_that():
    stop.set()
    assert "LEAKED" not in os.environ
    assert not dist.is_initialized()
"""


def test_a_test_that_leaves_something_behind_fails_and_spares_the_next(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    (tmp_path / "test_leaky.py").write_text(LEAKY)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    # Where pytest believes itself in CI, it says everything twice.
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "BUILD_NUMBER")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert "5 passed, 4 errors" in done.stdout
    assert [re.sub(r"\d+", "N", line) for line in done.stdout.splitlines() if line.startswith("  ")] == [
        "  environment variable LEAKED: None -> 'N'",
        "  thread 'leaked-thread'",
        "  an initialised default process group",
        "  process N: sleep N",
    ]
