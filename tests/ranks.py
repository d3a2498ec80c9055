"""Run a function on real ranks and look at what each of them did.

The tests folder is on ``sys.path`` (``pythonpath`` in ``pyproject.toml``) of pytest and of every rank. So a test module
writes::

    from ranks import returned, run_ranks

    def total(rank: int, factor: int) -> float:
        x = torch.tensor(float(rank * factor))
        dist.all_reduce(x)
        return x.item()

    def test_all_ranks_see_the_sum() -> None:
        assert returned(run_ranks(total, 2, 10)) == [10.0, 10.0]

The function is module-level, is called as ``fn(rank, *args)`` and runs in a process of its own. Values come back by
pickle, errors as text, so that an exception that cannot be rebuilt elsewhere cannot hide what happened.

Ranks are forked from a server that has torch loaded already: a run takes some tens of milliseconds. Two things follow.
All ranks have the same ``hash()`` of strings, unlike separately launched ones. And the libraries that the tests had
imported before the first run are loaded in every rank. `rank_starter.py` and `rank_process.py` hold the two sides,
`rank_server.py` is for the server.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import random
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rank_process import IN_SERVER, Job
from rank_starter import Rank, wait_for_reports

__all__ = ["Outcome", "ensure_server", "returned", "run_ranks"]

Env = Mapping[str, str | None]
Status = Literal["returned", "raised", "died", "hung"]

# Loaded once in the server. A rank's first optimizer or DDP module loads torch's compiler: 2 s of each rank's time.
_ALWAYS = ("ranks", "torch", "torch.distributed", "torch._dynamo", "numpy")
# Likewise, if the test session uses them. Not loaded for their own sake.
_HEAVY = (
    *("pytest", "hypothesis", "lightning", "lightning.pytorch", "accelerate", "hydra", "omegaconf", "transformers"),
    *("sklearn", "matplotlib"),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one rank.

    Attributes:
        rank: Its number.
        status: ``"returned"``, ``"raised"`` (an exception left fn, SystemExit too), ``"died"`` (ended without a report:
            by a signal, by ``os._exit``) or ``"hung"`` (still running at the deadline, then killed).
        value: What fn returned.
        error: The exception's class name.
        mro: The names of that class and its bases, in order.
        message: ``str()`` of the exception.
        traceback: Its traceback as text, causes included.
        exitcode: 0 after a return, 1 after an exception, what the system says of a rank that died (-9 for SIGKILL),
            None if it hung.
        stacks: The stacks of all threads at the deadline, for a rank that hung.
        stderr: The end of what the rank wrote to stderr and stdout.
        seconds: From the moment when all ranks entered fn until this one had left it (or was seen dead, or killed); 0
            if fn was never entered.
    """

    rank: int
    status: Status
    value: Any = None
    error: str = ""
    mro: list[str] = dataclasses.field(default_factory=list)
    message: str = ""
    traceback: str = ""
    exitcode: int | None = None
    stacks: str = ""
    stderr: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        """All that is known, for a failing test's report."""
        head = f"rank {self.rank} {self.status} after {self.seconds:.2f} s"
        if self.status == "returned":
            head += f": {self.value!r}"[:500]
        elif self.status == "raised":
            head += f": {self.error}: {self.message}"
        elif self.status == "died":
            head += f" with exit code {self.exitcode}"
        for name in ("traceback", "stacks", "stderr"):
            if text := getattr(self, name):
                head += f"\n--- {name} of rank {self.rank}\n{text.rstrip()}"
        return head


def run_ranks(
    fn: Callable[..., Any],
    world_size: int = 2,
    *args: Any,
    timeout: float = 60.0,
    env: Env | Sequence[Env] | None = None,
    store: Literal["file", "tcp"] = "file",
    init: bool = True,
    group_timeout: float = 60.0,
) -> list[Outcome]:
    """Call ``fn(rank, *args)`` in ``world_size`` processes and return one outcome a rank, in rank order.

    Never raises for what a rank does and never leaves a process behind: each rank, and what it started, is ended before
    this returns. A rank that is done stays until all have reported, so that nobody fails because a peer had finished.

    Args:
        fn: A module-level function.
        world_size: Number of ranks.
        *args: Further arguments of ``fn``; pickled.
        timeout: Seconds from the moment all ranks enter ``fn``; whoever still runs then is "hung".
        env: Variables for the environment of all ranks, or a list with one mapping a rank. The value None removes one.
            They come on top of this process's environment and of RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
            MASTER_ADDR and MASTER_PORT.
        store: What the default group meets over: ``"file"``, or ``"tcp"``, hosted by rank 0.
        init: Initialise the default process group (gloo). If False nothing is initialised, and MASTER_PORT is free.
        group_timeout: The default group's timeout in seconds.
    """
    if world_size < 1 or store not in ("file", "tcp"):
        raise ValueError(f"world_size must be at least 1 and store 'file' or 'tcp', got {world_size!r} and {store!r}")
    envs = list(env) if isinstance(env, Sequence) else [env or {}] * world_size
    if len(envs) != world_size:
        raise ValueError(f"env has {len(envs)} mappings for {world_size} ranks")
    call = pickle.dumps((fn, args))
    ensure_server()
    port = _free_port() if not init else 0
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder:
        ranks: list[Rank] = []
        try:
            for rank in range(world_size):
                variables = _environment(rank, world_size, port, envs[rank])
                job = Job(rank, world_size, call, variables, folder, store if init else None, group_timeout)
                ranks.append(Rank(job))
            wait_for_reports(ranks, timeout)
        finally:
            for r in ranks:
                r.dismiss()
            for r in ranks:
                r.end()
        return [Outcome(**r.found()) for r in ranks]


def returned(outcomes: Sequence[Outcome]) -> list[Any]:
    """The values of all ranks, in rank order.

    Raises:
        AssertionError: A rank did not return; the text holds every rank's outcome, traceback, stacks and output.
    """
    __tracebackhide__ = True
    bad = [o.rank for o in outcomes if o.status != "returned"]
    if bad:
        raise AssertionError(f"ranks {bad} of {len(outcomes)} did not return\n\n" + "\n\n".join(map(str, outcomes)))
    return [o.value for o in outcomes]


def _environment(rank: int, world_size: int, port: int, extra: Env) -> dict[str, str]:
    merged: dict[str, str | None] = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    if sys.platform == "linux":
        # Gloo otherwise looks up the machine's own name, which some machines cannot resolve.
        merged.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # TCPStore looks up the name of ::ffff:127.0.0.1; where the name server is silent, that takes 5 s now and then.
    merged.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    merged.update(extra)
    return {name: value for name, value in merged.items() if value is not None}


def _free_port() -> int:
    """A free port below the ephemeral range, so that no outgoing connection takes it before rank 0 listens there."""
    for _ in range(1000):
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port between 20000 and 32000")


def ensure_server() -> None:
    """Start the process that ranks are forked from, once, and before anybody starts one that has nothing loaded."""
    mine = [name for name in sys.modules if name.split(".")[0] == "syncstate"]
    used = [name for name in _HEAVY if name in sys.modules]
    multiprocessing.set_forkserver_preload([*_ALWAYS, *used, *sorted(mine), "rank_server"])
    # The server takes its environment from here. On Python 3.11 it ignores the sys.path it is given.
    held = {name: os.environ.get(name) for name in ("PYTHONPATH", "OMP_NUM_THREADS", IN_SERVER)}
    os.environ.update({"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1", IN_SERVER: "1"})
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for name, value in held.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
