"""Values in the workers of a data loader: the same on every rank, whatever the pace, and the same after a resume."""

from __future__ import annotations

import io
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from ranks import ensure_server, returned, run_ranks
from torch.utils.data import BatchSampler, DataLoader, Dataset

from syncstate import Every, SharedState, SyncEngine
from syncstate.samplers import SharedBatchSampler, SharedDataset, SharedIndexSampler
from syncstate.values import SampledIndices

# The default of a script on Linux. A rank of these tests would start another server of processes instead.
FORK: dict[str, Any] = {"multiprocessing_context": "fork"}

# A small machine is enough for them.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Slow(Dataset[Any]):
    """Samples that take a while on some ranks; each is its index and the value that the dataset saw."""

    def __init__(self, size: int, seconds: float = 0.0) -> None:
        self.size, self.seconds = size, seconds

    def __getitem__(self, index: Any) -> tuple[int, int]:
        if self.seconds and index % 3 == 0:
            time.sleep(self.seconds)
        return int(index), index.shared["length"]

    def __len__(self) -> int:
        return self.size


def collate(samples: Any) -> tuple[list[int], int]:
    """The indices, and the value of the batch, which each sample saw too."""
    length = samples.shared["length"]
    assert {seen for _, seen in samples} <= {length}
    return [index for index, _ in samples], length


class Run:
    """A training of which each batch is a step. `length` is the step at which it was last refreshed.

    Attributes:
        read: (indices, length) of each batch that was trained on, over all epochs.
    """

    def __init__(self, *, size: int, every: int, seconds: float = 0.0, batch_size: int = 2, **loader: Any) -> None:
        self.state = SharedState()
        self.state.add("length", lambda ctx: ctx.step, every=Every(steps=every))
        self.state.add("order", SampledIndices(size), every=Every(epochs=1))
        sampler = SharedIndexSampler(self.state, "order")
        self.batches = SharedBatchSampler(BatchSampler(sampler, batch_size, False), self.state, ["length"])
        self.loader: DataLoader[Any] = DataLoader(
            SharedDataset(Slow(size, seconds)), batch_sampler=self.batches, collate_fn=collate, **loader
        )
        self.engine = SyncEngine(self.state)
        self.step = self.epoch = 0
        self.read: list[tuple[list[int], int]] = []

    def train(self, epochs: int = 1, *, pause: float = 0.0, stop_at: int | None = None) -> Run:
        with self.engine:
            for epoch in range(self.epoch, epochs):
                self.epoch = epoch
                self.engine.step(self.step, epoch)
                self.batches.set_epoch(epoch)
                for batch in self.loader:
                    time.sleep(pause)
                    self.read.append(batch)
                    self.step += 1
                    self.engine.step(self.step, epoch)
                    if self.step == stop_at:
                        return self
        return self

    def save(self) -> bytes:
        content = {
            "engine": self.engine.state_dict(),
            "batches": self.batches.state_dict(),
            "at": [self.step, self.epoch],
        }
        file = io.BytesIO()
        torch.save(content, file)
        return file.getvalue()

    def load(self, saved: bytes) -> Run:
        content = torch.load(io.BytesIO(saved), weights_only=True)
        self.step, self.epoch = content["at"]
        self.engine.load_state_dict(content["engine"])
        self.engine.start(self.step, self.epoch)
        self.batches.load_state_dict(content["batches"])
        return self


def lengths(ahead: int, batches: int, every: int, first: int = 0) -> list[int]:
    """What the batches of an epoch carry: batch k is drawn when batch k - ahead is fetched, `first` steps later."""
    steps = [first + max(0, k - ahead) for k in range(batches)]
    return [step - step % every for step in steps]


# One process and its workers


@pytest.mark.parametrize(("workers", "prefetch"), [(0, None), (1, 1), (1, 4), (2, 2), (3, 1)])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_batch_carries_the_values_of_the_step_at_which_it_is_drawn(
    workers: int, prefetch: int | None, persistent: bool
) -> None:
    loader: dict[str, Any] = {**FORK, "persistent_workers": persistent, "prefetch_factor": prefetch} if workers else {}
    run = Run(size=20, every=2, num_workers=workers, **loader).train(3)
    ahead = workers * (prefetch or 0)
    assert [length for _, length in run.read] == [
        length for epoch in range(3) for length in lengths(ahead, 10, 2, first=10 * epoch)
    ]
    for epoch in range(3):
        assert sorted(index for batch, _ in run.read[10 * epoch : 10 * epoch + 10] for index in batch) == list(
            range(20)
        )


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_of_every_kind_get_the_values(context: str) -> None:
    ensure_server()  # there is one for this process, and ranks need it
    loader: dict[str, Any] = {"multiprocessing_context": context, "num_workers": 1, "prefetch_factor": 1}
    run = Run(size=8, every=1, **loader).train()
    assert [length for _, length in run.read] == lengths(1, 4, 1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("done", [1, 4, 9, 10, 14])
def test_a_resumed_run_repeats_what_was_drawn_in_advance(workers: int, persistent: bool, done: int) -> None:
    loader: dict[str, Any] = {**FORK, "num_workers": workers, "persistent_workers": persistent} if workers else {}
    unbroken = Run(size=20, every=1, **loader).train(2).read
    saved = Run(size=20, every=1, **loader).train(2, stop_at=done).save()
    assert Run(size=20, every=1, **loader).load(saved).train(2).read == unbroken[done:]


def test_a_run_may_be_interrupted_many_times() -> None:
    loader: dict[str, Any] = {**FORK, "num_workers": 2, "prefetch_factor": 1}
    unbroken = Run(size=20, every=1, **loader).train(2).read
    run = Run(size=20, every=1, **loader).train(2, stop_at=3)
    read = run.read
    for stop_at in (4, 5, 11, 17, None):
        run = Run(size=20, every=1, **loader).load(run.save()).train(2, stop_at=stop_at)
        read += run.read
    assert read == unbroken


def test_a_loader_that_is_not_finished_leaves_its_place() -> None:
    run = Run(size=20, every=1, **FORK, num_workers=2)
    with run.engine:
        run.engine.start()
        walk: Iterator[Any] | None = iter(run.loader)
        assert walk is not None
        first = [next(walk) for _ in range(3)]
        walk = None  # and its workers are gone
        assert (run.batches.state_dict()["batches"], run.batches.state_dict()["drawn"]) == (3, 7)
        assert [length for _, length in first] == [0, 0, 0]


def test_a_loader_may_be_given_whole_batches_as_a_sampler() -> None:
    state = SharedState()
    state.add("length", lambda ctx: 0, initial=0)
    batches = SharedBatchSampler([[0, 1], [2]], state, ["length"])
    loader: DataLoader[Any] = DataLoader(
        SharedDataset(Lists()),
        sampler=batches,
        batch_size=None,
        collate_fn=same,
        num_workers=1,
        **FORK,
    )
    assert list(loader) == [([0, 1], 0), ([2], 0)]


class Lists(Dataset[Any]):
    def __getitem__(self, indices: Any) -> Any:
        return list(indices), indices.shared["length"]


def same(sample: Any) -> Any:
    return sample


def test_an_index_sampler_that_gives_whole_lists_resumes_with_workers_too() -> None:
    state = SharedState()
    state.add("order", SampledIndices(8), initial=list(range(8)))
    sampler = SharedIndexSampler(state, "order", num_replicas=1, rank=0)
    walk = iter(sampler)
    assert [next(walk), next(walk)] == [0, 1]
    resumed = SharedIndexSampler(state, "order", num_replicas=1, rank=0)
    resumed.load_state_dict(sampler.state_dict())
    # Such a loader makes two iterators of its sampler and uses the second.
    loader: DataLoader[int] = DataLoader(
        torch.arange(8),  # type: ignore[arg-type]
        sampler=resumed,
        batch_size=None,
        num_workers=1,
        **FORK,
    )
    assert [int(index) for index in loader] == [2, 3, 4, 5, 6, 7]
    assert list(resumed) == list(range(8))


def read_live(state: SharedState) -> Any:
    class Reading(Dataset[Any]):
        def __getitem__(self, index: int) -> int:
            length: int = state["length"]
            return length

        def __len__(self) -> int:
            return 12

    return Reading()


def test_a_live_state_in_a_worker_is_the_copy_of_its_start() -> None:
    """Why values are stamped: this one is never refreshed, and with another start of the workers it is another."""
    state = SharedState()
    state.add("length", lambda ctx: ctx.step, every=Every(steps=1))
    loader: DataLoader[Any] = DataLoader(read_live(state), num_workers=1, persistent_workers=True, **FORK)
    with SyncEngine(state) as engine:
        engine.start()
        seen = []
        for step, batch in enumerate(loader, 1):
            seen.append(int(batch))
            engine.step(step)
        seen += [int(batch) for batch in loader]
    assert seen == [0] * 24


# Real ranks


def paced(rank: int, size: int, every: int, workers: int, done: int) -> tuple[Any, Any]:
    """All that a slow or fast rank trains on, and what it trains on when it resumes after `done` batches."""
    loader: dict[str, Any] = {**FORK, "num_workers": workers, "persistent_workers": True}
    slow = 0.004 * rank
    unbroken = Run(size=size, every=every, seconds=slow, **loader).train(2, pause=0.003 * (1 - rank)).read
    saved = Run(size=size, every=every, seconds=slow, **loader).train(2, stop_at=done).save()
    # The other rank is the slow one now.
    resumed = Run(size=size, every=every, seconds=0.004 * (1 - rank), **loader).load(saved).train(2, pause=0.002 * rank)
    return unbroken, resumed.read


def test_two_ranks_of_different_speed_see_the_same_values_in_the_same_batches() -> None:
    ranks = returned(run_ranks(paced, 2, 240, 20, 4, 33))
    values = [[length for _, length in unbroken] for unbroken, _ in ranks]
    assert values[0] == values[1] == lengths(8, 60, 20) + lengths(8, 60, 20, first=60)
    for unbroken, resumed in ranks:
        assert resumed == unbroken[33:]
    for epoch in range(2):
        dealt = [
            index for unbroken, _ in ranks for batch, _ in unbroken[60 * epoch : 60 * epoch + 60] for index in batch
        ]
        assert sorted(dealt) == list(range(240))


# DeepSpeed#8405: the curriculum sampler saved the state of a generator from which it did not draw.


def generators() -> list[Any]:
    return [random.getstate(), [str(part) for part in np.random.get_state()], torch.get_rng_state().tolist()]


def ten_draws(rank: int, saved: bytes | None, stop_at: int | None) -> tuple[Any, bytes, bool]:
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    before = generators()
    # A loader draws the seed of its workers from torch's global generator unless it has another.
    run = Run(size=20, every=1, batch_size=1, generator=torch.Generator())
    run = (run.load(saved) if saved else run).train(stop_at=stop_at)
    return run.read, run.save(), generators() == before


def test_draws_after_a_reload_in_a_fresh_process_are_those_of_the_unbroken_run() -> None:
    unbroken = returned(run_ranks(ten_draws, 2, None, None))
    first = returned(run_ranks(ten_draws, 2, None, 4))
    # From the checkpoint of rank 0, as hosts hand it to all.
    then = returned(run_ranks(ten_draws, 2, first[0][1], None))
    for rank in range(2):
        assert len(unbroken[rank][0]) == 10
        assert first[rank][0] + then[rank][0] == unbroken[rank][0]
        assert unbroken[rank][2]
        assert first[rank][2]
        assert then[rank][2]


# speechbrain#2506: the local rank taken for the rank, so that two nodes trained on the same half.


def a_shard(rank: int) -> list[int]:
    run = Run(size=24, every=1).train()
    return [index for batch, _ in run.read for index in batch]


def test_shards_follow_the_rank_and_not_the_local_rank() -> None:
    env = [{"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": str(rank // 2)} for rank in range(4)]
    shards = returned(run_ranks(a_shard, 4, env=env))
    assert [len(shard) for shard in shards] == [6] * 4
    assert sorted(index for shard in shards for index in shard) == list(range(24))
