"""What both recipes need and what has nothing to do with training: one run directory, ranks, and a table to look at.

`RunInfo` will take over the run directory; until then a launcher's ranks agree on its name here.
"""

import os
import socket
import sys
import time
import zlib
from collections.abc import Callable, Sized
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from syncstate import SharedState
from syncstate.wire import decode, encode

__all__ = ["agreement", "is_rank", "join_run", "lacks_ranks", "leave_run", "start_ranks"]

# Where launchers write the rank: torchrun and `accelerate launch`, then mpirun of three makes.
_RANK = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")


def is_rank() -> bool:
    """Whether a launcher, or `start_ranks`, started this process as one of the ranks."""
    return any(name in os.environ for name in _RANK)


def lacks_ranks() -> bool:
    """Whether this is the one process that `accelerate launch --cpu --num_processes N` starts, whatever N is.

    It sets the address at which the ranks are to meet, and leaves starting the others to mpirun.
    """
    asked = "MASTER_PORT" in os.environ and os.environ.get("ACCELERATE_USE_CPU") == "True"
    return asked and not is_rank()


def join_run() -> None:
    """Name the run before Hydra makes its directory, by the same name on every rank. Call it before the main function.

    The configs put `RUN_ID` into `hydra.run.dir`. Left to itself each rank would read its own clock there, and two
    ranks that start a second apart would write to two directories. Ranks above 0 write no `.hydra` and no log file.
    """
    if "RUN_ID" not in os.environ:
        os.environ["RUN_ID"] = _agreed(time.strftime("%Y-%m-%d_%H-%M-%S"))
    if next((os.environ[name] for name in _RANK if name in os.environ), "0") != "0":
        sys.argv += ["hydra.output_subdir=null", "hydra/job_logging=stdout"]


def leave_run() -> None:
    """Close the process group, after the last of the runs of a sweep."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _agreed(name: str) -> str:
    """The name that the first of the ranks proposes."""
    if not is_rank():
        return name
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        sys.exit(
            "this launcher has no store in which its ranks could agree on a run directory: set RUN_ID for all ranks"
        )
    # The store of torchrun, which `accelerate launch` uses too. It is up before the ranks are, and outlives them.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return store.compare_set("run_id", "", name).decode()  # sets it if nobody has


def start_ranks(function: Callable[..., None], ranks: int, *args: Any) -> None:
    """Run `function(*args)` in this many new processes, the ranks of one group, and wait; an error in one ends all.

    The arguments carry the composed config and the run directory, so that the ranks neither read the command line nor
    ask Hydra. Lightning's own launcher runs the command line again, and with `--multirun` every rank would sweep again.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.start_processes(_run_rank, (ranks, port, function, args), nprocs=ranks, start_method="spawn")


def _run_rank(rank: int, ranks: int, port: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    function(*args)
    leave_run()


def agreement(state: SharedState) -> tuple[bool, str]:
    """Whether all ranks hold the same values in the same versions, and a table of rank x value. Every rank calls it.

    The rows travel over the default group, not over that of syncstate: the check does not rest on what it checks.
    """
    mine = {name: (encode(state[name]), state.info(name).version) for name in state}
    rows: list[Any] = [mine]
    if dist.is_initialized():
        rows = [None] * dist.get_world_size()
        dist.all_gather_object(rows, mine)
    lines = [["rank", *mine]]
    for rank, row in enumerate(rows):
        lines.append([str(rank), *(f"{_short(value)} (v{version})" for value, version in row.values())])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = "\n".join("  " + "   ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    return all(row == rows[0] for row in rows), text


def _short(encoded: bytes) -> str:
    """A number as it is; anything larger by its length and a checksum of all its bytes."""
    value = decode(encoded)
    if isinstance(value, Sized):
        return f"{len(value)} items #{zlib.crc32(encoded):08x}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
