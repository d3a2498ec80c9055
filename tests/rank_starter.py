"""The starter's side of `ranks.run_ranks`: one object a rank, which starts it, listens to it and ends it."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

from rank_process import Job, rank_main

_STARTUP = 60.0  # seconds for the processes and the process group; a run's own timeout counts from fn's start
_GRACE = 2.0  # seconds that the others get to report when one failed before fn
_TAIL = 20_000  # characters of a rank's output that are kept


class Rank:
    """A rank as its starter sees it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.report: dict[str, Any] | None = None
        self.stacks = ""
        self.ready = False
        self.deaf = False  # its end of the pipe is closed: it is ending, or has ended
        self.seconds = 0.0
        context = multiprocessing.get_context("forkserver")
        self.pipe, theirs = context.Pipe()
        # Not a daemon: such a process may have no children, and some tests run DataLoader workers.
        self.process = context.Process(target=rank_main, args=(job, theirs), daemon=False)
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid
        theirs.close()

    @property
    def pending(self) -> bool:
        return self.report is None

    def tell(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # it has died; its sentinel tells
            self.pipe.send(message)

    def hear(self) -> Any:
        """The next message, or None if there is none now."""
        try:
            return self.pipe.recv() if not self.deaf and self.pipe.poll() else None
        except (EOFError, OSError):
            self.deaf = True
            return None

    def died(self) -> bool:
        return self.process.exitcode is not None

    def set_died(self) -> None:
        self.report = {"status": "died", "exitcode": self.process.exitcode}

    def signal(self, number: int) -> None:
        if not self.died():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def dismiss(self) -> None:
        """Let it leave if it is done, kill it otherwise."""
        if self.report is None or self.report["status"] == "hung":
            self.signal(signal.SIGKILL)
        self.tell("leave")

    def end(self) -> None:
        """Wait until it has gone, and end what it had started as well."""
        self.process.join(10.0)
        if self.process.exitcode is None:
            self.signal(signal.SIGKILL)
            self.process.join()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # the rank leads a group of its own
        self.pipe.close()
        if self.report is not None and self.report["status"] in ("returned", "raised"):
            self.report["exitcode"] = self.process.exitcode
        self.process.close()

    def found(self) -> dict[str, Any]:
        """The fields of its outcome."""
        report = dict(self.report or {"status": "hung"})
        if "pickled" in report:
            report["value"] = pickle.loads(report.pop("pickled"))
        output = _read(self.job.file("output"))[-_TAIL:]
        return {**report, "rank": self.job.rank, "stacks": self.stacks, "stderr": output, "seconds": self.seconds}


def wait_for_reports(ranks: list[Rank], timeout: float) -> None:
    """Lead all ranks into fn at once, take their reports until the deadline, and the stacks of those who missed it."""
    began: float | None = None
    deadline = time.monotonic() + _STARTUP
    while any(r.pending for r in ranks):
        _listen(ranks, deadline - time.monotonic(), began)
        now = time.monotonic()
        if began is None:
            if not all(r.pending for r in ranks):
                # One failed before fn. The others have the same trouble, or wait for it in init_process_group.
                deadline = min(deadline, now + _GRACE)
            elif all(r.ready for r in ranks):
                began, deadline = now, now + timeout
                for r in ranks:
                    r.tell("go")
        if now >= deadline:
            break
    hung = [r for r in ranks if r.pending]
    for r in hung:
        r.signal(signal.SIGUSR1)
    for r in hung:
        r.stacks = _settled(r.job.file("stacks"))
        r.report = {"status": "hung"}
        r.seconds = time.monotonic() - began if began is not None else 0.0


def _listen(ranks: list[Rank], seconds: float, began: float | None) -> None:
    """Take what the ranks say within the next seconds, returning after the first news."""
    waiting: list[Any] = [r.process.sentinel for r in ranks if r.pending]
    waiting += [r.pipe for r in ranks if r.pending and not r.deaf]
    multiprocessing.connection.wait(waiting, max(0.0, seconds))
    for r in ranks:
        gone = r.pending and r.died()  # asked before listening: what it still said then comes first
        while r.pending and (message := r.hear()) is not None:
            kind, content = message
            if kind == "port":
                for other in ranks:
                    if other is not r:
                        other.tell(content)
            elif kind == "ready":
                r.ready = True
            else:
                r.report, ended = content
                r.seconds = max(0.0, ended - began) if began is not None else 0.0
        if gone and r.pending:
            r.set_died()
            r.seconds = time.monotonic() - began if began is not None else 0.0


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _settled(path: Path) -> str:
    """The stacks that the signal handler is writing, once they are complete; "" if none come within two seconds."""
    text = _read(path)
    for _ in range(100):
        time.sleep(0.02)
        before, text = text, _read(path)
        if text and text == before:
            break
    return text
