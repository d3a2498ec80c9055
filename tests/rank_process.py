"""A rank's side of `ranks.run_ranks`: call the function, tell what became of it, stay until dismissed."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

IN_SERVER = "SYNCSTATE_TESTS_FORKSERVER"


@dataclasses.dataclass(frozen=True)
class Job:
    """What a rank is told; ``call`` is the function and its arguments, pickled."""

    rank: int
    world_size: int
    call: bytes
    env: dict[str, str]
    folder: str
    store: str | None  # None: no process group
    group_timeout: float

    def file(self, name: str) -> Path:
        return Path(self.folder, f"{name}.{self.rank}")


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the one that made it ends, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if os.environ.pop(IN_SERVER, None):
    die_with_parent()


def rank_main(job: Job, pipe: Connection) -> None:
    die_with_parent()
    os.setsid()
    output = os.open(job.file("output"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    stacks = job.file("stacks").open("w")
    faulthandler.enable(all_threads=True)  # an abort inside a backend leaves its stack in the output
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(job.env)
    try:
        value = _call(job, pipe)
        report: dict[str, Any] = {"status": "returned", "pickled": pickle.dumps(value)}
        _leave(pipe, report, 0)
    except BaseException as error:
        # Left from inside the handler: when a traceback's frames go, their process groups go too, and that can block.
        _leave(pipe, _describe(error), 1)


def _call(job: Job, pipe: Connection) -> Any:
    import numpy as np
    import torch

    fn, args = pickle.loads(job.call)
    np.random.seed()  # forked ranks would all draw alike here, which launched ones do not
    torch.set_num_threads(1)
    if job.store is not None:
        _initialise(job, pipe)
    pipe.send(("ready", None))
    if pipe.recv() != "go":
        os._exit(1)  # another rank failed before fn
    return fn(job.rank, *args)


def _initialise(job: Job, pipe: Connection) -> None:
    import torch.distributed as dist

    store: dist.Store
    timeout = datetime.timedelta(seconds=job.group_timeout)
    if job.store == "file":
        store = dist.FileStore(str(Path(job.folder, "store")), job.world_size)
    elif job.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        pipe.send(("port", store.port))
        os.environ["MASTER_PORT"] = str(store.port)
    else:
        port = pipe.recv()
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timeout)
        os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world_size, timeout=timeout)


def _describe(error: BaseException) -> dict[str, Any]:
    cls = type(error)
    try:
        message = str(error)
    except Exception as second:
        message = f"<str() of the exception failed: {second!r}>"
    text = "".join(traceback.format_exception(error))
    names = [c.__name__ for c in cls.__mro__]
    return {"status": "raised", "error": cls.__name__, "mro": names, "message": message, "traceback": text}


def _leave(pipe: Connection, report: dict[str, Any], code: int) -> None:
    """Report, stay until all others have reported, and go without any teardown that could hang or fail."""
    ended = time.monotonic()  # one clock for all processes of a machine
    with contextlib.suppress(EOFError, OSError):
        pipe.send(("done", (report, ended)))
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.recv()
    os._exit(code)
