"""Ready-made values in an engine: the same on every rank, and a resumed run repeats them."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import returned, run_ranks

from syncstate import Context, Every, Once, SharedState, SyncEngine
from syncstate.values import CurriculumThreshold, SampledIndices, Seed


def draws() -> dict[str, float]:
    """One number from each global generator."""
    return {"python": random.random(), "numpy": float(np.random.random()), "torch": torch.rand(1).item()}


def all_three(base: int | None = None) -> SharedState:
    state = SharedState()
    state.add("seed", Seed(base), every=Every(steps=1))
    state.add("indices", SampledIndices(100, 8), every=Every(steps=1))
    state.add("threshold", CurriculumThreshold("root", start=0.0, end=1.0, steps=20), every=Every(steps=1))
    return state


def train(state: SharedState, engine: SyncEngine, steps: range) -> list[tuple[int, list[int], float]]:
    seen = []
    for step in steps:
        engine.step(step)
        seen.append((state["seed"], state["indices"].tolist(), state["threshold"]))
    return seen


def resume(rank: int, path: Path, steps: range) -> list[tuple[int, list[int], float]]:
    state = all_three()
    with SyncEngine(state) as engine:
        engine.load_state_dict(torch.load(path, weights_only=True))
        return train(state, engine, steps)


def test_a_run_resumed_in_a_fresh_process_repeats_the_unbroken_one(tmp_path: Path) -> None:
    before = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    state = all_three()
    with SyncEngine(state) as engine:
        first = train(state, engine, range(5))
        torch.save(engine.state_dict(), tmp_path / "state.pt")
        rest = train(state, engine, range(5, 11))
    assert len({seed for seed, _, _ in first + rest}) == 11
    assert returned(run_ranks(resume, 1, tmp_path / "state.pt", range(5, 11))) == [rest]
    assert random.getstate() == before[0]
    np.testing.assert_equal(np.random.get_state(legacy=False), before[1])
    assert torch.equal(torch.get_rng_state(), before[2])


def test_refreshes_at_one_step_give_new_seeds_too() -> None:
    state = SharedState({"seed": Seed(3)})
    with SyncEngine(state) as engine:
        engine.start()
        seen = {state["seed"]}
        for _ in range(5):
            engine.sync("seed")
            seen.add(state["seed"])
    assert len(seen) == 6


def hold_seeds(rank: int, base: int | None, per_rank: bool) -> list[tuple[int, list[float]]]:
    """The seeds of four refreshes, each with what the global generators drew next."""
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    state = SharedState()
    state.add("seed", Seed(base, per_rank=per_rank, apply=["python", "numpy", "torch"]), every=Every(steps=1))
    seen = []
    with SyncEngine(state) as engine:
        for step in range(4):
            engine.step(step)
            seen.append((state["seed"], list(draws().values())))
    return seen


def expected_draws(seed: int) -> list[float]:
    return [
        random.Random(seed).random(),
        float(np.random.RandomState(seed).random_sample()),
        torch.rand(1, generator=torch.Generator().manual_seed(seed)).item(),
    ]


@pytest.mark.parametrize("base", [2**32 - 1, 19525198 * 220, None])
def test_every_rank_holds_and_applies_the_same_seed(base: int | None) -> None:
    one, two, three = returned(run_ranks(hold_seeds, 3, base, False))
    assert one == two == three
    assert len({seed for seed, _ in one}) == 4
    assert all(drawn == expected_draws(seed) for seed, drawn in one)


@pytest.mark.parametrize("base", [2**32 - 1, 19525198 * 220, None])
def test_every_rank_holds_and_applies_a_seed_of_its_own(base: int | None) -> None:
    ranks = returned(run_ranks(hold_seeds, 4, base, True))
    assert len({seed for rank in ranks for seed, _ in rank}) == 16
    assert all(drawn == expected_draws(seed) for rank in ranks for seed, drawn in rank)
    if base is not None:
        assert returned(run_ranks(hold_seeds, 4, base, True)) == ranks


def hold_own_seed(rank: int, path: Path, resumed: bool) -> tuple[int, int]:
    state = SharedState()
    state.add("seed", Seed(per_rank=True), every=Once())
    with SyncEngine(state) as engine:
        if resumed:
            engine.load_state_dict(torch.load(path, weights_only=True))
        engine.start(3)
        if not resumed and rank == 0:
            torch.save(engine.state_dict(), path)
        return state["seed"], state.info("seed").version


def test_seeds_of_ranks_come_back_on_every_rank_from_the_checkpoint_of_one(tmp_path: Path) -> None:
    first = returned(run_ranks(hold_own_seed, 3, tmp_path / "state.pt", False))
    assert len(set(first)) == 3
    assert returned(run_ranks(hold_own_seed, 3, tmp_path / "state.pt", True)) == first
    # A larger world keeps the seeds of the ranks that it had, and adds others.
    larger = returned(run_ranks(hold_own_seed, 4, tmp_path / "state.pt", True))
    assert larger[:3] == first
    assert len(set(larger)) == 4


def sample(rank: int) -> tuple[list[int], int]:
    torch.manual_seed(rank)
    np.random.seed(rank)
    calls: list[int] = []

    class Counted(SampledIndices):
        def compute(self, ctx: Context) -> Any:
            calls.append(dist.get_rank())
            return super().compute(ctx)

    state = SharedState({"chosen": Counted(64, 8)})
    with SyncEngine(state) as engine:
        engine.start()
    return state["chosen"].tolist(), len(calls)


def test_all_ranks_hold_the_indices_that_main_drew_although_their_seeds_differ() -> None:
    one, two = returned(run_ranks(sample, 2))
    assert one[0] == two[0]
    assert len(set(one[0])) == 8
    assert (one[1], two[1]) == (1, 0)
