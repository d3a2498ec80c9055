"""Indices are drawn from the value's own stream, with exactly the probabilities that were asked for."""

import itertools
import math
import pickle
import random
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from exact import identical
from expect import refuses
from hypothesis import given
from hypothesis import strategies as st

from syncstate import Context
from syncstate.context import generator
from syncstate.errors import ConfigError
from syncstate.values import SampledIndices, indices
from syncstate.wire import encode


def at(version: int, **fields: Any) -> Context:
    """A context as the engine makes it for a version."""
    return Context(rng=generator(0, "x", version), **fields)


@given(n=st.integers(1, 200), data=st.data())
def test_indices_are_int64_in_range_and_different_without_replacement(n: int, data: st.DataObject) -> None:
    k = data.draw(st.none() | st.integers(1, n))
    drawn = SampledIndices(n, k).compute(Context())
    assert (drawn.dtype, drawn.shape) == (torch.int64, (n if k is None else k,))
    assert len(set(drawn.tolist())) == len(drawn)
    assert set(drawn.tolist()) <= set(range(n))


@given(n=st.integers(1, 50), k=st.none() | st.integers(1, 200))
def test_with_replacement_more_may_be_drawn_than_there_are(n: int, k: int | None) -> None:
    drawn = SampledIndices(n, k, replacement=True).compute(Context())
    assert (drawn.dtype, drawn.shape) == (torch.int64, (n if k is None else k,))
    assert set(drawn.tolist()) <= set(range(n))


@given(weights=st.lists(st.floats(0, 1e300) | st.just(0.0), min_size=1, max_size=40).filter(any), data=st.data())
def test_weight_zero_is_never_drawn(weights: list[float], data: st.DataObject) -> None:
    likely = {i for i, weight in enumerate(weights) if weight > 0}
    k = data.draw(st.integers(1, len(likely)))
    drawn = SampledIndices(len(weights), k, weights=weights).compute(Context()).tolist()
    assert len(set(drawn)) == k
    assert set(drawn) <= likely
    repeated = SampledIndices(len(weights), 99, weights=weights, replacement=True).compute(Context())
    assert set(repeated.tolist()) <= likely


@pytest.mark.parametrize(
    "options", [{}, {"k": 7}, {"k": 30, "replacement": True}, {"weights": [1.0, 2.0] * 10, "k": 5}]
)
def test_a_draw_repeats_for_its_version_and_changes_with_it(options: dict[str, Any]) -> None:
    source = SampledIndices(20, **options)
    assert torch.equal(source.compute(at(1)), source.compute(at(1)))
    assert not torch.equal(source.compute(at(1)), source.compute(at(2)))


def test_sampling_leaves_the_global_generators_alone() -> None:
    before = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    for options in ({}, {"k": 3}, {"replacement": True}, {"weights": [1.0] * 10}):
        SampledIndices(10, **options).compute(Context())
    assert random.getstate() == before[0]
    np.testing.assert_equal(np.random.get_state(legacy=False), before[1])
    assert torch.equal(torch.get_rng_state(), before[2])


def check_frequencies(source: SampledIndices, expected: Mapping[Any, float]) -> None:
    """Pearson's chi-square against the exact probabilities of all outcomes; with a fixed stream nothing flickers."""
    ctx, n = Context(rng=generator(0, "frequencies", 1)), 12_000
    seen = Counter(tuple(source.compute(ctx).tolist()) for _ in range(n))
    assert seen.keys() <= expected.keys()
    assert sum(expected.values()) == pytest.approx(1)
    statistic = sum((seen[outcome] - n * p) ** 2 / (n * p) for outcome, p in expected.items())
    freedom = len(expected) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_every_permutation_is_equally_likely() -> None:
    check_frequencies(SampledIndices(4), dict.fromkeys(itertools.permutations(range(4)), 1 / 24))


def test_every_ordered_choice_is_equally_likely() -> None:
    check_frequencies(SampledIndices(5, 2), dict.fromkeys(itertools.permutations(range(5), 2), 1 / 20))


def test_weighted_draws_without_replacement_are_successive_draws_from_what_is_left() -> None:
    weights = [1.0, 0.0, 2.0, 5.0]
    total = sum(weights)
    expected = {
        (i, j): weights[i] / total * weights[j] / (total - weights[i]) for i, j in itertools.permutations((0, 2, 3), 2)
    }
    check_frequencies(SampledIndices(4, 2, weights=weights), expected)


def test_weighted_draws_with_replacement_are_independent() -> None:
    weights = [1.0, 3.0]
    expected = {(i, j): weights[i] * weights[j] / 16 for i in range(2) for j in range(2)}
    check_frequencies(SampledIndices(2, 2, weights=weights, replacement=True), expected)


def test_weights_of_any_scale_and_kind_do() -> None:
    plain = SampledIndices(3, 2, weights=[1.0, 2.0, 4.0]).compute(at(1))
    for weights in (torch.tensor([1.0, 2.0, 4.0]), np.array([1, 2, 4]), (2e307, 4e307, 8e307), [1e-9, 2e-9, 4e-9]):
        assert torch.equal(SampledIndices(3, 2, weights=weights).compute(at(1)), plain)


# The population


def test_the_population_may_be_anything_with_a_length() -> None:
    assert SampledIndices(np.int64(4)).population == 4  # type: ignore[arg-type]
    assert SampledIndices(torch.utils.data.TensorDataset(torch.zeros(5))).population == 5


def test_a_population_that_grows_or_shrinks_is_asked_at_each_draw() -> None:
    data = ["a", "b", "c"]
    asked = SampledIndices(data), SampledIndices(data.__len__), SampledIndices(lambda: len(data))
    for size in (3, 4, 2):
        data[:] = ["x"] * size
        for source in asked:
            assert sorted(source.compute(Context()).tolist()) == list(range(size))
            assert source.population == size


def test_a_function_is_not_asked_before_the_first_draw() -> None:
    def unknown_here() -> int:
        raise RuntimeError("only main knows")

    with pytest.raises(RuntimeError, match="only main knows"):
        SampledIndices(unknown_here, k=3).compute(Context())


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (0, {}, "population is an empty list; nothing can be drawn"),
        (3, {"k": 4}, "cannot draw 4 different indices from a population of 3; give a smaller k or replacement=True"),
        (
            5,
            {"weights": [1.0] * 4},
            "weights must be one number for each of the population, shape [5], got shape [4]",
        ),
    ],
)
def test_a_population_that_no_longer_fits_is_an_error_of_the_draw(
    size: int, options: dict[str, Any], message: str
) -> None:
    data = [0] * 4
    source = SampledIndices(data, **options)
    data[:] = [0] * size
    with refuses(f"SampledIndices: {message}"):
        source.compute(Context())


@pytest.mark.parametrize("returned", [2.5, None, -1])
def test_a_function_must_return_a_whole_number(returned: Any) -> None:
    with pytest.raises(ConfigError, match="the population that the function returned must be a whole number"):
        SampledIndices(lambda: returned).compute(Context())


def test_a_function_that_finds_nothing_is_an_error_of_the_draw() -> None:
    with refuses("SampledIndices: population is 0; nothing can be drawn"):
        SampledIndices(lambda: 0).compute(Context())


# Sent, or drawn by each rank


WAYS: list[dict[str, Any]] = [
    {},
    {"k": 7},
    {"k": 300, "replacement": True},
    {"k": 5, "weights": [1.0, 0.0, 2.0, 3.0] * 50},
    {"k": 300, "weights": [1.0, 0.0, 2.0, 3.0] * 50, "replacement": True},
]


@pytest.mark.parametrize("options", WAYS)
def test_what_each_rank_draws_is_to_the_bit_what_main_would_send(options: dict[str, Any]) -> None:
    sent = SampledIndices(200, send="indices", **options)
    drawn = SampledIndices(200, send="seed", **options)
    assert sent.derive is None
    for version in (1, 2, 3):
        message = drawn.compute(at(version))
        assert len(encode(message)) < 400
        for rank in range(3):
            derive = pickle.loads(pickle.dumps(drawn)).derive
            assert derive is not None
            assert identical(derive(message, Context(rank=rank)), sent.compute(at(version)))


def test_main_decides_the_size_k_and_replacement_of_what_others_draw() -> None:
    here, there = SampledIndices([0] * 30, k=40, replacement=True, send="seed"), SampledIndices(5, send="seed")
    assert here.derive is not None
    assert there.derive is not None
    message = here.compute(at(1))
    assert identical(there.derive(message, Context(rank=1)), here.derive(message, Context()))


def test_the_seed_is_sent_above_65536_indices_unless_there_are_weights() -> None:
    assert SampledIndices(65536).send == "indices"
    assert SampledIndices(65537).send == "seed"
    assert SampledIndices(10**9, 100).send == "indices"
    assert SampledIndices(10, 65537, replacement=True).send == "seed"
    assert SampledIndices(np.zeros(65537)).send == "seed"
    assert SampledIndices(lambda: 10**9).send == "indices"
    assert SampledIndices(65537, weights=[1.0] * 65537).send == "indices"
    assert SampledIndices(65537, send="indices").send == "indices"


def test_a_checkpoint_with_indices_is_held_by_a_run_that_sends_seeds() -> None:
    derive = SampledIndices(5, send="seed").derive
    assert derive is not None
    assert derive(torch.tensor([3, 1]), Context()).tolist() == [3, 1]


def test_other_weights_or_another_numpy_are_an_error_and_not_another_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    main, peer = (SampledIndices(3, weights=weights, send="seed") for weights in ([1.0, 1.0, 2.0], [1.0, 1.0, 3.0]))
    assert peer.derive is not None
    with pytest.raises(ConfigError, match="the weights on rank 1 are not those of main"):
        peer.derive(main.compute(at(1)), Context(rank=1))
    message = SampledIndices(3, send="seed").compute(at(1))
    derive = SampledIndices(3, send="seed").derive
    assert derive is not None
    derive(message, Context())
    monkeypatch.setattr(indices, "_fingerprint", lambda: b"another")
    with pytest.raises(ConfigError, match=rf"NumPy {re.escape(np.__version__)} on rank 1 draws otherwise"):
        derive(message, Context(rank=1))


@pytest.mark.parametrize(
    ("population", "options", "message"),
    [
        (0, {}, "population must be a whole number of at least 1, got 0"),
        (-3, {}, "population must be a whole number of at least 1, got -3"),
        (True, {}, "population must be a whole number of at least 1, got True"),
        (
            2.5,
            {},
            "population must be a whole number, something with a length or a function, got 2.5",
        ),
        (
            None,
            {},
            "population must be a whole number, something with a length or a function, got None",
        ),
        (
            "10",
            {},
            "population must be a whole number, something with a length or a function, got '10'",
        ),
        ([], {}, "population is an empty list; nothing can be drawn"),
        (5, {"k": 0}, "k must be a whole number of at least 1, got 0"),
        (5, {"k": 2.0}, "k must be a whole number of at least 1, got 2.0"),
        (5, {"send": "all"}, "send must be one of auto, indices, seed, got 'all'"),
        (5, {"replacement": "no"}, "replacement must be true or false, got 'no'"),
        (
            5,
            {"k": 6},
            "cannot draw 6 different indices from a population of 5; give a smaller k or replacement=True",
        ),
        (
            3,
            {"k": 3, "weights": [1.0, 0.0, 1.0]},
            "cannot draw 3 different indices from a population of 3 with 2 weights above 0; give a smaller k or "
            "replacement=True",
        ),
        (
            3,
            {"weights": [1.0, 2.0]},
            "weights must be one number for each of the population, shape [3], got shape [2]",
        ),
        (
            2,
            {"weights": [[1.0, 2.0]]},
            "weights must be one number for each of the population, a list, got shape [1, 2]",
        ),
        (2, {"weights": [1.0, -2.0]}, "weights must be finite and at least 0, got -2.0 at index 1"),
        (2, {"weights": [math.nan, 1.0]}, "weights must be finite and at least 0, got nan at index 0"),
        (2, {"weights": [math.inf, 1.0]}, "weights must be finite and at least 0, got inf at index 0"),
        (2, {"weights": [0.0, 0.0]}, "at least one weight must be above 0, all are 0"),
        (2, {"weights": ["a", "b"]}, "weights must be numbers, got list"),
        (2, {"weights": [[1.0], [1.0, 2.0]]}, "weights must be numbers, got list"),
    ],
)
def test_sampled_indices_refuse(population: Any, options: dict[str, Any], message: str) -> None:
    with refuses(f"SampledIndices: {message}"):
        SampledIndices(population, **options)
