"""A threshold by quantile: of what all ranks observed together, whoever saw it."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncstate import Context
from syncstate.values import CurriculumThreshold

numbers = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=60)


def of(collected: Any, quantile: float = 0.9, **fields: Any) -> float:
    value = CurriculumThreshold(quantile=quantile).compute(Context(collected=collected, **fields))
    assert type(value) is float
    return value


def test_it_collects_what_was_observed_and_a_schedule_collects_nothing() -> None:
    assert CurriculumThreshold(quantile=0.9).collect == "observed"
    assert CurriculumThreshold(start=0, end=1, steps=1).collect is None


@given(numbers=numbers, quantile=st.floats(0, 1), world_size=st.integers(1, 4), seed=st.integers(0, 99))
def test_the_same_numbers_give_the_same_threshold_whichever_ranks_saw_them(
    numbers: list[float], quantile: float, world_size: int, seed: int
) -> None:
    whole = of([torch.tensor(numbers)], quantile)
    random.Random(seed).shuffle(numbers)
    dealt = [torch.tensor(numbers[rank::world_size]) for rank in range(world_size)]
    assert of(dealt, quantile) == whole


@given(numbers=numbers, quantile=st.floats(0, 1))
def test_it_is_numpys_quantile(numbers: list[float], quantile: float) -> None:
    assert of([torch.tensor(numbers)], quantile) == pytest.approx(np.quantile(numbers, quantile), rel=1e-9, abs=1e-9)


def test_ends_middle_and_between() -> None:
    ranks = [torch.tensor([5.0, 1.0]), torch.tensor([4.0, 2.0, 3.0])]
    assert [of(ranks, q) for q in (0, 0.25, 0.5, 0.6, 1)] == pytest.approx([1, 2, 3, 3.4, 5])
    assert of([torch.tensor([7.0])], 0.3) == 7
    assert of([[1.0], (3.0,), np.array([2.0])], 0.5) == 2  # what a source of one's own may hand on


def test_float64_counts_to_the_last_bit() -> None:
    exact = 0.1 + 2**-50
    assert of([torch.tensor([exact], dtype=torch.float64), torch.empty(0)]) == exact


def test_nan_does_not_count_and_infinity_does() -> None:
    nan, inf = math.nan, math.inf
    assert of([torch.tensor([nan, 1.0, nan, 3.0])], 0.5) == 2
    assert of([torch.tensor([1.0, inf])], 1) == inf
    assert of([torch.tensor([1.0, inf])], 0) == 1
    # No number lies between them: the nearer one.
    assert [of([torch.tensor([1.0, inf])], q) for q in (0.4, 0.6)] == [1, inf]
    assert [of([torch.tensor([-inf, inf])], q) for q in (0.4, 0.6)] == [-inf, inf]
    assert of([torch.tensor([-inf, 2.0, 4.0])], 0.75) == 3
    assert of([torch.tensor([nan])]) == inf  # nothing was observed


@pytest.mark.parametrize("collected", [None, [], [torch.empty(0), torch.empty(0)]])
def test_where_nothing_was_observed_it_stays_as_it_was(collected: Any) -> None:
    assert of(collected) == math.inf
    assert of(collected, previous=0.25) == 0.25
    assert CurriculumThreshold(quantile=0.9, initial=3).compute(Context(collected=collected)) == 3
    assert CurriculumThreshold(quantile=0.9, initial=-math.inf).compute(Context(collected=collected)) == -math.inf


def test_during_the_warmup_it_stays_as_it_was() -> None:
    source = CurriculumThreshold(quantile=0.5, warmup=10)
    seen = torch.tensor([1.0, 2.0, 3.0])
    assert source.compute(Context(step=9, collected=[seen])) == math.inf
    assert source.compute(Context(step=9, collected=[seen], previous=7.0)) == 7
    assert source.compute(Context(step=10, collected=[seen], previous=7.0)) == 2


def test_smoothing_is_a_moving_average_that_begins_with_the_first_number() -> None:
    source = CurriculumThreshold(quantile=0.5, smoothing=0.75)
    previous: Any = None
    found = []
    for number in (8.0, 4.0, 0.0):
        previous = source.compute(Context(collected=[torch.tensor([number])], previous=previous))
        found.append(previous)
    assert found == [8, 7, 5.25]
    assert source.compute(Context(collected=[torch.tensor([3.0])], previous=math.inf)) == 3
    assert source.compute(Context(collected=[torch.empty(0)], previous=5.25)) == 5.25
