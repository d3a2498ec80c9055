"""Ranks for the benchmark: processes of this machine in one gloo group, which know nothing of Hydra."""

import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

__all__ = ["run_on_ranks"]


def run_on_ranks(
    function: Callable[..., Any], ranks: int, *args: Any, threads: int, timeout: float, preload: Sequence[str] = ()
) -> Any:
    """Call a function of a module on every rank of a new group, and return what it returned on rank 0.

    Args:
        function: Called with `args`. The default group is initialised and torchrun's variables are set.
        ranks: How many.
        args: What the ranks get, by pickle.
        threads: Threads of torch in each rank.
        timeout: Seconds until the ranks are ended.
        preload: Modules that are slow to import, imported once for all calls; one that is not installed is left out.

    Raises:
        torch.multiprocessing.ProcessException: A rank failed; has its traceback. The others are ended.
        TimeoutError: The ranks were not done in time.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)  # read when a rank's libraries start their threads
    # Ranks come from a server without threads, which has imported what is slow to import, and not by running this
    # command once more: a rank loads the main script as a module, so what stands under `if __name__ == "__main__"`
    # does not run there, and Hydra is not entered again.
    multiprocessing.set_forkserver_preload(["torch.distributed", *preload])
    # This process keeps the store, on a port that the system chose: none is guessed, and no rank has to outlive others.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer")
        job = (ranks, store.port, threads, timeout, answer, function, args)
        context: Any = mp.start_processes(_rank, job, nprocs=ranks, join=False, start_method="forkserver")
        deadline = time.monotonic() + timeout
        try:
            while not context.join(max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{ranks} ranks were not done within {timeout:g} s")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return pickle.loads(answer.read_bytes())  # noqa: S301  # our own, and nobody else can write there


def _rank(
    rank: int,
    ranks: int,
    port: int,
    threads: int,
    timeout: float,
    answer: Path,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(threads)
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    result = function(*args)
    if rank == 0:
        answer.write_bytes(pickle.dumps(result))
    dist.barrier()  # a rank that left earlier would look like one that died
    dist.destroy_process_group()
