"""Guards around every test: what it must not leave behind. Its deadline is pytest-timeout's, see ``pyproject.toml``."""

from __future__ import annotations

import contextlib
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

# No test is timed, and a busy machine is no failure.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Set by pytest itself, or once and for all by a library when it is first imported or used.
_ALLOWED = ("PYTEST_", "HYDRA_", "KMP_", "PYTORCH_NVML", "TORCHINDUCTOR_")  # set by what tests import
_GRACE = 1.0  # seconds for threads and processes that are ending on their own


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail a test that leaves variables, threads, a process group or processes, and clean up for the next one."""
    environment = dict(os.environ)
    threads = set(threading.enumerate())
    children = _processes()
    yield
    left = [*_environment(environment), *_threads(threads), *_process_group(), *_children(children)]
    if left:
        pytest.fail("the test left behind:\n  " + "\n  ".join(left), pytrace=False)


def _environment(before: dict[str, str]) -> Iterator[str]:
    for name in sorted(set(before) | set(os.environ)):
        old, new = before.get(name), os.environ.get(name)
        if old == new or name.startswith(_ALLOWED):
            continue
        yield f"environment variable {name}: {old!r} -> {new!r}"
        if old is None:
            del os.environ[name]
        else:
            os.environ[name] = old


def _threads(before: set[threading.Thread]) -> Iterator[str]:
    deadline = time.monotonic() + _GRACE
    for thread in set(threading.enumerate()) - before:
        if not thread.daemon:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                yield f"thread {thread.name!r}"


def _process_group() -> Iterator[str]:
    # Where no test module imported torch there is no group to leave, and looking would load it.
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        yield "an initialised default process group"


def _children(before: set[int]) -> Iterator[str]:
    def new() -> set[int]:
        return _processes() - before

    _wait(lambda: not new())
    for pid in sorted(new()):
        yield f"process {pid}: {_command(pid)}"
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _GRACE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def _processes() -> set[int]:
    """This process's children and the ranks, less the two helpers that multiprocessing keeps for the whole session."""
    server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    tracker = multiprocessing.resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    mine = {os.getpid(), server} - {None}
    found: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):  # other systems have no /proc, and then nothing is found
        try:
            state, parent = stat.read_text().rsplit(")", 1)[1].split()[:2]
        except OSError:
            continue  # it has just ended
        if int(parent) in mine and state != "Z":
            found.add(int(stat.parent.name))
    return found - {server, tracker}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    except OSError:
        return "ended meanwhile"
