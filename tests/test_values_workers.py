"""Workers of data loaders draw from seeds of their own, on every rank."""

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from expect import refuses
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from syncstate import Context, Every, SharedState, SyncEngine
from syncstate.values import Seed
from syncstate.values.seed import for_rank, undo_rank
from syncstate.values.worker_seeds import WorkerSeeds, worker_seed

seeds = st.integers(0, 2**32 - 1)


@given(seed=seeds, rank=st.integers(0, 2**20 - 1))
def test_taking_a_rank_out_of_a_seed_is_exact(seed: int, rank: int) -> None:
    assert for_rank(undo_rank(seed), 0) == seed
    assert undo_rank(for_rank(seed, 0)) == seed


@pytest.mark.parametrize("base", [0, 2**32 - 1, 19525198 * 220, 2**64 - 1])
@pytest.mark.parametrize("per_rank", [False, True])
def test_no_two_workers_of_4096_ranks_share_a_seed_nor_has_one_that_of_a_rank(base: int, per_rank: bool) -> None:
    source = Seed(base, per_rank=per_rank)
    value = source.compute(Context())
    derive = source.derive or (lambda value, ctx: value)
    ranks = [derive(value, Context(rank=rank)) for rank in range(4096)]
    workers = [
        worker_seed(seed, worker, 0 if per_rank else rank) for rank, seed in enumerate(ranks) for worker in range(4)
    ]
    assert len({*ranks, *workers}) == len(set(ranks)) + 4 * 4096
    assert (min(workers) >= 0, max(workers) < 2**32) == (True, True)
    for seed in workers[::2000]:
        np.random.RandomState(seed)
        torch.Generator().manual_seed(seed)


@given(seed=seeds)
def test_neighbouring_workers_share_no_pattern(seed: int) -> None:
    flips = [(worker_seed(seed, i) ^ worker_seed(seed, i + 1)).bit_count() for i in range(64)]
    assert 12 < sum(flips) / len(flips) < 20


STABLE = [1509535736, 3163041789, 398927525]


def test_the_seeds_of_workers_stay_what_they_are() -> None:
    # Published results rely on these numbers.
    assert [worker_seed(1234, 0), worker_seed(1234, 1), worker_seed(1234, 0, 1)] == STABLE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0), "worker_seed: seed must be a whole number of at least 0, got -1"),
        ((2**32, 0), "worker_seed: seed must be below 4294967296, got 4294967296"),
        ((0, 4095), "worker_seed: worker_id must be below 4095, got 4095"),
        ((0, 0, 2**20), "worker_seed: rank must be below 1048576, got 1048576"),
        ((0, 0.5), "worker_seed: worker_id must be a whole number of at least 0, got 0.5"),
    ],
)
def test_worker_seed_refuses(arguments: Any, message: str) -> None:
    with refuses(message):
        worker_seed(*arguments)


# In loaders


class Draws(Dataset[list[float]]):
    """Each sample is what the worker's generators draw first."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> list[float]:
        return [random.random(), float(np.random.random()), torch.rand(1).item()]


def first_draws(seed: int) -> list[float]:
    numpy, generator = np.random.RandomState(seed), torch.Generator().manual_seed(seed)
    return [random.Random(seed).random(), float(numpy.random_sample()), torch.rand(1, generator=generator).item()]


def test_workers_draw_from_the_seed_in_force_when_their_iterator_is_made() -> None:
    state = SharedState()
    handle = state.add("seed", Seed(5), every=Every(epochs=1))
    loader: DataLoader[list[float]] = DataLoader(
        Draws(), num_workers=2, batch_size=None, multiprocessing_context="fork",
        worker_init_fn=WorkerSeeds(handle, rank=3),
    )  # fmt: skip
    with SyncEngine(state) as engine:
        for epoch in range(2):
            engine.step(epoch, epoch)
            drawn = list(loader)
            assert drawn == [first_draws(worker_seed(state["seed"], worker, 3)) for worker in (0, 1)]


def test_what_a_spawned_worker_gets_is_the_seed_and_nothing_of_the_state() -> None:
    state = SharedState()
    handle = state.add("seed", Seed(5), every=Every(steps=1))
    with SyncEngine(state) as engine:
        engine.start()
        sent, expected = pickle.dumps(WorkerSeeds(handle, rank=1)), worker_seed(state["seed"], 0, 1)
        engine.step(1)
    assert b"SharedState" not in sent
    pickle.loads(sent)(0)
    assert torch.initial_seed() == expected


def test_a_function_gives_the_seed_as_well_and_only_what_is_asked_for_is_seeded() -> None:
    before = random.getstate()
    WorkerSeeds(lambda: 7, generators=["torch"])(1)
    assert torch.initial_seed() == worker_seed(7, 1)
    assert random.getstate() == before


def test_worker_seeds_travel_before_there_is_a_seed_too() -> None:
    state = SharedState()
    handle = state.add("seed", Seed(5))
    early = pickle.loads(pickle.dumps(WorkerSeeds(handle)))
    assert early.generators == ("python", "numpy", "torch")


@pytest.mark.parametrize(
    ("seed", "options", "message"),
    [
        (7, {}, "seed must be the handle of a Seed or a function, got 7"),
        (hash, {"generators": ["jax"]}, "generators can seed any of python, numpy, torch, cuda, got 'jax'"),
        (
            hash,
            {"generators": "torch"},
            "generators must be a list with any of python, numpy, torch, cuda, got 'torch'",
        ),
    ],
)
def test_worker_seeds_refuse(seed: Any, options: dict[str, Any], message: str) -> None:
    with refuses(f"WorkerSeeds: {message}"):
        WorkerSeeds(seed, **options)
