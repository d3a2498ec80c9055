"""Nothing is left behind: no thread, no descriptor, no store key, no process; and workers do not hide a dead rank."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from ranks import returned, run_ranks
from torch.utils.data import DataLoader, Dataset

from syncstate import Context, Every, SharedState, SyncEngine
from syncstate.errors import PeerError, SyncStateError


def _engine(**options: Any) -> SyncEngine:
    state = SharedState()
    state.add("x", lambda ctx: ctx.step, every=Every(steps=1), apply=lambda value, ctx: None)
    state.add("large", lambda ctx: torch.full((9000,), ctx.step), every=Every(steps=2))
    return SyncEngine(state, timeout=20.0, **options)


def _held() -> tuple[int, int]:
    """Descriptors and native threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _keys() -> list[str]:
    store: Any = dist.distributed_c10d._get_default_store()
    return [key for key in store.list_keys() if "syncstate" in key]


def _open_and_close(rank: int, fails: bool) -> Any:
    dist.barrier()
    before = _held()
    for _ in range(3):
        try:
            with _engine() as engine:
                for step in range(4):
                    engine.step(step)
                if fails and rank == 1:
                    raise LookupError("no data")
                if fails:
                    while True:
                        step += 1
                        engine.step(step)
        except (LookupError, SyncStateError):
            pass
        dist.barrier()
    end = time.monotonic() + 5.0  # the backend's threads end a moment after their group
    while _held() != before and time.monotonic() < end:
        time.sleep(0.01)
    dist.barrier()
    return before, _held(), _keys(), threading.active_count()


def test_engines_that_were_closed_leave_no_descriptor_thread_or_key() -> None:
    for before, after, keys, threads in returned(run_ranks(_open_and_close, 3, False)):
        assert after == before
        assert keys == []
        assert threads == 1


def test_engines_that_failed_leave_no_descriptor_thread_or_key() -> None:
    for before, after, keys, threads in returned(run_ranks(_open_and_close, 3, True)):
        assert after == before
        assert keys == []
        assert threads == 1


class _Slow(Dataset[int]):
    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> int:
        time.sleep(0.01)
        return index


def _killed_with_workers(rank: int, who: int) -> Any:
    """A rank dies while its forked data loader workers live on for a while."""
    with _engine() as engine:
        engine.start()
        batches: Iterator[Any] = iter(DataLoader(_Slow(), batch_size=2, num_workers=2, persistent_workers=True))
        next(batches)
        if rank == who:
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        try:
            for step in range(1, 100):
                next(batches)
                engine.step(step)
        except PeerError as error:
            return str(error), time.monotonic() - begun
    return None


def test_a_rank_that_dies_is_noticed_although_its_workers_live_on() -> None:
    for who in (0, 2):
        for outcome in run_ranks(_killed_with_workers, 3, who, timeout=30.0):
            if outcome.rank == who:
                assert outcome.status == "died"
            else:
                assert outcome.status == "returned", outcome
                assert f"rank {who} did not report" in outcome.value[0]


def _forked_child(rank: int) -> Any:
    """A forked child neither holds the connections nor disturbs the engine when it ends."""
    with _engine() as engine:
        engine.start()
        child = os.fork()
        if child == 0:
            os._exit(0)
        _, status = os.waitpid(child, 0)
        for step in range(1, 5):
            engine.step(step)
        return status, engine.state["x"], int(engine.state["large"][0])


def test_a_forked_child_that_ends_leaves_the_engine_working() -> None:
    assert returned(run_ranks(_forked_child, 2)) == [(0, 4, 4), (0, 4, 4)]


def _interrupted_source(ctx: Context) -> int:
    if ctx.step == 2:
        raise SystemExit(3)
    return ctx.step


def _exits_in_a_source(rank: int) -> Any:
    state = SharedState()
    state.add("x", _interrupted_source, every=Every(steps=1))
    try:
        with SyncEngine(state, timeout=20.0) as engine:
            for step in range(5):
                engine.step(step)
    except BaseException as error:
        return type(error).__name__, str(error)
    return None


def test_a_source_that_ends_the_process_ends_the_engine_on_all_ranks() -> None:
    first, *others = returned(run_ranks(_exits_in_a_source, 3))
    assert first == ("SystemExit", "3")
    assert others == [("PeerError", "rank 0 failed at step 2: SystemExit: 3")] * 2
