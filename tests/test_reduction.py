"""What main makes of the results of the ranks, worked out without ranks."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from exact import identical

from syncstate.loop.reduction import reduce_results

NAN = math.nan


@pytest.mark.parametrize(
    ("how", "results", "expected"),
    [
        ("mean", [1, 2, 6], 3.0),
        ("sum", [1, 2, 6], 9),
        ("min", [3, 1, 2], 1),
        ("max", [3, 1, 2], 3),
        ("any", [0, 0, 2], True),
        ("all", [1, 0, 1], False),
        ("mean", [0.5, 1.0], 0.75),
        ("sum", [2**70, 1], 2**70 + 1),
        ("sum", [True, True, False], 2),
        ("mean", [True, False], 0.5),
        ("mean", [1 + 2j, 3], 2 + 1j),
        ("max", [-math.inf, -5], -5),
        ("any", [False, False], False),
        ("all", [True, True], True),
        ("any", [NAN], True),
        ("min", [7], 7),
    ],
)
def test_numbers_are_reduced_over_the_ranks(how: str, results: list[Any], expected: Any) -> None:
    assert identical(reduce_results(how, results), expected)


@pytest.mark.parametrize("how", ["mean", "sum", "min", "max"])
@pytest.mark.parametrize("make", [float, torch.tensor, np.float64])
@pytest.mark.parametrize("results", [[NAN, 1.0, 2.0], [1.0, NAN, 2.0], [1.0, 2.0, NAN]])
def test_nan_on_any_rank_is_nan_in_the_result(how: str, make: Any, results: list[float]) -> None:
    assert math.isnan(reduce_results(how, [make(result) for result in results]))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("mean", torch.tensor([2.0, 3.0])),
        ("sum", torch.tensor([4.0, 6.0])),
        ("min", torch.tensor([1.0, 2.0])),
        ("max", torch.tensor([3.0, 4.0])),
        ("any", torch.tensor([True, True])),
        ("all", torch.tensor([True, True])),
    ],
)
def test_tensors_and_arrays_are_reduced_element_by_element(how: str, expected: torch.Tensor) -> None:
    ours, theirs = torch.tensor([1.0, 4.0]), torch.tensor([3.0, 2.0])
    assert identical(reduce_results(how, [ours, theirs]), expected)
    assert identical(reduce_results(how, [ours.numpy(), theirs.numpy()]), expected.numpy())


def test_truth_values_are_counted_and_not_added_as_truth_values() -> None:
    truths = [torch.tensor([True, True]), torch.tensor([True, False])]
    assert identical(reduce_results("sum", truths), torch.tensor([2, 1]))
    assert identical(reduce_results("mean", truths), torch.tensor([1.0, 0.5]))
    assert identical(reduce_results("sum", [truth.numpy() for truth in truths]), np.array([2, 1]))
    assert identical(reduce_results("any", truths), torch.tensor([True, True]))
    assert identical(reduce_results("all", truths), torch.tensor([True, False]))


@pytest.mark.parametrize(
    ("how", "expected"), [("mean", 4.0), ("sum", 8.0), ("min", 2.0), ("max", 6.0), ("any", True), ("all", True)]
)
def test_a_rank_without_a_result_does_not_count(how: str, expected: Any) -> None:
    assert identical(reduce_results(how, [None, 2.0, None, 6.0]), expected)


@pytest.mark.parametrize("how", ["mean", "sum", "min", "max", "any", "all"])
def test_a_reduction_over_nothing_is_none(how: str) -> None:
    assert reduce_results(how, [None, None]) is None


def test_a_list_holds_all_results_as_they_are() -> None:
    results = [None, 1, "two", [3], torch.zeros(4), NAN]
    assert identical(reduce_results("list", results), results)
    assert reduce_results("list", [None, None]) == [None, None]


def test_the_results_stay_as_they_are() -> None:
    for how in ("mean", "sum", "min", "max", "any", "all"):
        results = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.0])]
        reduce_results(how, results)
        assert identical(results, [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.0])])


@pytest.mark.parametrize(
    ("results", "sent"),
    [
        ([torch.zeros(3), torch.zeros(4)], "rank 0: tensor [3] torch.float32; rank 1: tensor [4] torch.float32"),
        ([1.0, "text"], "rank 0: float; rank 1: str"),
        ([None, [1, 2]], "rank 0: NoneType; rank 1: list"),
        ([torch.zeros(1), 1.0], "rank 0: tensor [1] torch.float32; rank 1: float"),
    ],
)
def test_what_cannot_be_reduced_is_refused_with_what_each_rank_sent(results: list[Any], sent: str) -> None:
    with pytest.raises(TypeError, match=re.escape(sent)) as caught:
        reduce_results("mean", results)
    assert str(caught.value).endswith('give reduce="list" to find them as they are')
