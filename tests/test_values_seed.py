"""A seed is valid everywhere, repeatable, new at each refresh, and different on all ranks that are to differ."""

import copy
import itertools
import math
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from expect import refuses
from hypothesis import given
from hypothesis import strategies as st

from syncstate import Context
from syncstate.context import generator
from syncstate.values import Seed

BASES = [0, 1, 2**31, 2**32 - 1, 2**32, 19525198 * 220, 2**63, 2**64 - 1]
bases = st.integers(0, 2**64 - 1)
seeds = st.integers(0, 2**32 - 1)


def at(version: int, **fields: Any) -> Context:
    """A context as the engine makes it for a version."""
    return Context(rng=generator(0, "x", version), **fields)


def of_ranks(source: Seed, value: int, world_size: int) -> list[int]:
    """What the ranks hold."""
    derive = source.derive
    assert derive is not None
    return [derive(value, Context(rank=rank, world_size=world_size)) for rank in range(world_size)]


def valid(seed: int) -> bool:
    """Whether python, numpy and torch all take it."""
    random.Random(seed)
    np.random.RandomState(seed)
    torch.Generator().manual_seed(seed)
    return type(seed) is int and 0 <= seed < 2**32


@given(base=bases, step=st.integers(0, 10**9), epoch=st.integers(0, 1000))
def test_a_seed_is_valid_for_every_generator_and_repeatable(base: int, step: int, epoch: int) -> None:
    seed = Seed(base).compute(Context(step=step, epoch=epoch))
    assert valid(seed)
    assert Seed(base).compute(Context(step=step, epoch=epoch)) == seed


@pytest.mark.parametrize("base", BASES)
def test_the_seeds_of_4096_ranks_are_valid_and_distinct(base: int) -> None:
    source = Seed(base, per_rank=True)
    for version in (1, 2, 3):
        held = of_ranks(source, source.compute(at(version)), 4096)
        assert len(set(held)) == 4096
        assert (min(held) >= 0, max(held) < 2**32) == (True, True)
        assert all(map(valid, held[::500]))


@given(value=seeds, ranks=st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=50, unique=True))
def test_no_two_ranks_ever_hold_the_same_seed(value: int, ranks: list[int]) -> None:
    derive = Seed(0, per_rank=True).derive
    assert derive is not None
    assert len({derive(value, Context(rank=rank)) for rank in ranks}) == len(ranks)


@given(value=seeds)
def test_the_seeds_of_neighbouring_ranks_share_no_pattern(value: int) -> None:
    # Of 32 bits about half should differ; a plain base + rank differs in one or two.
    held = of_ranks(Seed(0, per_rank=True), value, 64)
    flips = [(one ^ two).bit_count() for one, two in itertools.pairwise(held)]
    assert 12 < sum(flips) / len(flips) < 20


def test_another_base_version_step_or_epoch_gives_another_seed() -> None:
    def seed(base: int = 7, version: int = 1, **fields: int) -> int:
        return Seed(base).compute(at(version, **fields))

    assert len({seed(), seed(base=8), seed(version=2), seed(step=1), seed(epoch=1)}) == 5
    # A step and an epoch never stand for each other.
    assert seed(step=1, epoch=11) != seed(step=11, epoch=1)


STABLE = [1615673438, 2829880882]
STABLE_OF_RANKS = [3423425485, 1478832577, 3186062026]


def test_the_seeds_stay_what_they_are() -> None:
    # Checkpoints and published results rely on these numbers.
    assert [Seed(1234).compute(at(version, step=10 * version)) for version in (1, 2)] == STABLE
    assert of_ranks(Seed(1234, per_rank=True), 5, 3) == STABLE_OF_RANKS


def test_without_a_base_one_is_drawn_once_and_kept_in_the_state() -> None:
    source, other = Seed(), Seed()
    assert source.state_dict() == {}
    first = source.compute(at(1))
    saved = source.state_dict()
    assert saved.keys() == {"base"}
    assert 0 <= saved["base"] < 2**64
    assert source.compute(at(1)) == first
    assert source.state_dict() == saved
    assert other.compute(at(1)) != first
    other.load_state_dict(saved)
    assert other.compute(at(1)) == first


def test_a_base_that_is_given_is_no_state_and_is_not_overwritten() -> None:
    source = Seed(5)
    before = source.compute(at(1))
    assert source.state_dict() == {}
    source.load_state_dict({"base": 6})
    assert source.compute(at(1)) == before


def test_a_seed_has_nothing_to_apply_or_derive_unless_asked() -> None:
    assert (Seed().apply, Seed().derive) == (None, None)
    assert (Seed(per_rank=True).apply, Seed(apply=["numpy"]).derive) == (None, None)


@pytest.fixture
def generators_kept() -> Iterator[None]:
    """Put the global generators back after a test that seeds them."""
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    torch.set_rng_state(kept[2])


def draws() -> dict[str, float]:
    """One number from each global generator."""
    return {"python": random.random(), "numpy": float(np.random.random()), "torch": torch.rand(1).item()}


@pytest.mark.usefixtures("generators_kept")
@pytest.mark.parametrize("name", ["python", "numpy", "torch"])
@pytest.mark.parametrize("value", [0, 123, 2**32 - 1])
def test_apply_seeds_the_named_generator_and_no_other(name: str, value: int) -> None:
    expected = {
        "python": random.Random(value).random(),
        "numpy": float(np.random.RandomState(value).random_sample()),
        "torch": torch.rand(1, generator=torch.Generator().manual_seed(value)).item(),
    }
    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)
    others = draws()
    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)
    apply = Seed(apply=[name]).apply
    assert apply is not None
    apply(value, Context())
    assert draws() == others | {name: expected[name]}


@pytest.mark.usefixtures("generators_kept")
def test_applying_to_cuda_is_harmless_where_there_is_none() -> None:
    before = torch.get_rng_state()
    apply = Seed(apply=("cuda",)).apply
    assert apply is not None
    apply(2**32 - 1, Context())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_survives_pickle_and_deepcopy() -> None:
    source = Seed(per_rank=True, apply=["python", "torch", "python"])
    first = source.compute(at(1))
    for twin in (pickle.loads(pickle.dumps(source)), copy.deepcopy(source)):
        assert twin.compute(at(1)) == first
        assert twin.generators == ("python", "torch")
        assert getattr(twin.apply, "__self__", None) is twin


@pytest.mark.parametrize("base", [-1, 2**64, 1.5, "7", True, math.nan])
def test_a_base_is_a_whole_number_of_64_bits(base: Any) -> None:
    with refuses(f"Seed: base must be a whole number from 0 to 2**64 - 1, or None to draw one, got {base!r}"):
        Seed(base)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"apply": "torch"}, "Seed: apply must be a list with any of python, numpy, torch, cuda, got 'torch'"),
        ({"apply": None}, "Seed: apply must be a list with any of python, numpy, torch, cuda, got None"),
        ({"apply": ["torch", "jax"]}, "Seed: apply can seed any of python, numpy, torch, cuda, got 'jax'"),
        ({"apply": [1]}, "Seed: apply can seed any of python, numpy, torch, cuda, got 1"),
        ({"per_rank": 1}, "Seed: per_rank must be true or false, got 1"),
    ],
)
def test_a_seed_refuses(options: dict[str, Any], message: str) -> None:
    with refuses(message):
        Seed(**options)
