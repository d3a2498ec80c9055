"""A stamped index is the index with values on it, and the dataset and the collate function see them."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from expect import refuses
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from syncstate.samplers import SharedDataset
from syncstate.samplers.stamps import Stamp, StampedKey, find_stamp, stamp_index, stamp_indices, unwrap
from syncstate.wire.codec import encode


def a_stamp(**values: Any) -> Stamp:
    return Stamp(encode(values))


STAMP = a_stamp(max_len=7)


# Indices


@pytest.mark.parametrize("index", [5, -1, 2**70, "clip/7", (3, "crop")])
def test_a_stamped_index_is_used_as_the_index_that_it_was(index: Any) -> None:
    stamped = stamp_index(index, STAMP)
    assert isinstance(stamped, type(index))
    assert stamped == index
    assert (hash(stamped), repr(stamped), {index: "found"}[stamped]) == (hash(index), repr(index), "found")
    assert stamped.shared["max_len"] == 7
    assert unwrap(stamped) is stamped


def test_numbers_of_numpy_become_whole_numbers() -> None:
    stamped = stamp_index(np.int64(5), STAMP)
    assert (stamped, isinstance(stamped, int), stamped.shared) == (5, True, STAMP)


@pytest.mark.parametrize("index", [None, True, 0.5, frozenset({1}), slice(2, 5), range(3)])
def test_any_other_index_is_wrapped(index: Any) -> None:
    stamped = stamp_index(index, STAMP)
    assert type(stamped) is StampedKey
    assert (stamped.index, stamped.shared, unwrap(stamped)) == (index, STAMP, index)


def test_a_stamped_index_finds_its_sample_in_lists_tensors_and_arrays() -> None:
    index, numbers = stamp_index(2, STAMP), [10, 11, 12, 13]
    assert numbers[index] == torch.tensor(numbers)[index] == np.array(numbers)[index] == 12
    assert torch.tensor(numbers)[stamp_indices([3, 1], STAMP)].tolist() == [13, 11]
    assert TensorDataset(torch.tensor(numbers))[index] == (torch.tensor(12),)


@pytest.mark.parametrize("index", [5, "clip/7", (3, "crop"), slice(2, 5)])
def test_stamped_indices_survive_pickle_and_copies(index: Any) -> None:
    stamped = stamp_index(index, STAMP)
    for again in (pickle.loads(pickle.dumps(stamped)), copy.copy(stamped), copy.deepcopy(stamped)):
        assert type(again) is type(stamped)
        assert (unwrap(again), dict(again.shared)) == (index, {"max_len": 7})


def test_the_values_travel_once_a_batch() -> None:
    stamp = a_stamp(text="x" * 10_000)
    batch = stamp_indices(range(1000), stamp)
    data = pickle.dumps(batch)
    assert data.count(b"x" * 10_000) == 1
    assert len(data) < 14_000
    again = pickle.loads(data)
    assert again == list(range(1000))
    assert {id(index.shared) for index in again} == {id(again[0].shared)}
    # Also where a host has made a list of its own.
    assert pickle.dumps(batch[::2]).count(b"x" * 10_000) == 1


def test_a_list_of_several_batches_keeps_all_their_stamps() -> None:
    batch = stamp_indices([1, 2], a_stamp(v=1))
    batch += stamp_indices([3], a_stamp(v=2))
    again = pickle.loads(pickle.dumps(batch))
    assert [(index, index.shared["v"]) for index in again] == [(1, 1), (2, 1), (3, 2)]
    stamp = find_stamp(again)
    assert stamp is not None
    assert stamp["v"] == 1


def test_an_index_that_was_changed_has_no_stamp() -> None:
    stamped = stamp_index(5, STAMP)
    assert type(stamped + 1) is int
    assert find_stamp([stamped + 1, "a"]) is None


# Values


def test_the_values_are_a_mapping_that_cannot_be_written_to() -> None:
    stamp = a_stamp(a=1, b=[1, (2, None)])
    assert (list(stamp), len(stamp), stamp["b"], "a" in stamp, "c" in stamp) == (
        ["a", "b"],
        2,
        [1, (2, None)],
        True,
        False,
    )
    assert (dict(stamp), repr(stamp)) == ({"a": 1, "b": [1, (2, None)]}, "Stamp({'a': 1, 'b': [1, (2, None)]})")
    with pytest.raises(TypeError):
        stamp["a"] = 2  # type: ignore[index]
    with pytest.raises(KeyError, match="no shared value 'c' on this batch; SharedBatchSampler gave it a, b"):
        stamp["c"]


def test_what_a_worker_does_to_a_tensor_does_not_reach_the_next_batch() -> None:
    stamp = a_stamp(weights=torch.zeros(3))
    one, two = (pickle.loads(pickle.dumps(stamp)) for _ in range(2))
    one["weights"].add_(1)
    assert (one["weights"].tolist(), two["weights"].tolist(), stamp["weights"].tolist()) == (
        [1.0] * 3,
        [0.0] * 3,
        [0.0] * 3,
    )


# The dataset


class Words(Dataset[Any]):
    """Samples by any kind of index, with what the index carried."""

    language = "en"

    def __getitem__(self, index: Any) -> Any:
        return index, dict(getattr(index, "shared", {}))

    def describe(self) -> str:
        return "words"


class Batched(Words):
    def __getitems__(self, indices: list[Any]) -> list[Any]:
        return [("together", self[index]) for index in indices]

    def __len__(self) -> int:
        return 9


@pytest.mark.parametrize("index", [5, "clip/7", (3, "crop")])
def test_the_dataset_sees_the_values_on_its_index(index: Any) -> None:
    dataset = SharedDataset(Words())
    assert dataset[stamp_index(index, STAMP)] == (index, {"max_len": 7})
    assert dataset[index] == (index, {})


def test_the_dataset_is_given_other_indices_bare() -> None:
    assert SharedDataset(Words())[stamp_index(slice(2, 5), STAMP)] == (slice(2, 5), {})


def test_the_samples_of_a_batch_are_a_list_with_the_values() -> None:
    batch = SharedDataset(Words()).__getitems__(stamp_indices([1, "a", None], STAMP))
    assert batch == [(1, {"max_len": 7}), ("a", {"max_len": 7}), (None, {})]
    assert isinstance(batch, list)
    assert batch.shared["max_len"] == 7
    assert pickle.loads(pickle.dumps(batch)).shared["max_len"] == 7


def test_a_dataset_that_gives_whole_batches_is_asked_for_them() -> None:
    batch = SharedDataset(Batched()).__getitems__(stamp_indices([1, 2], STAMP))
    assert batch == [("together", (1, {"max_len": 7})), ("together", (2, {"max_len": 7}))]
    assert batch.shared["max_len"] == 7
    subset = SharedDataset(Subset(Words(), [4, 5, 6])).__getitems__(stamp_indices([2, 0], STAMP))
    assert (subset, subset.shared["max_len"]) == ([(6, {}), (4, {})], 7)


def test_a_batch_without_values_says_where_they_would_come_from() -> None:
    batch = SharedDataset(Words()).__getitems__([1, 2])
    assert batch == [(1, {}), (2, {})]
    assert not hasattr(batch, "shared")
    with pytest.raises(AttributeError, match="give the DataLoader batch_sampler=SharedBatchSampler"):
        batch.shared  # noqa: B018


def test_a_dataset_that_is_asked_for_a_list_of_indices_finds_the_values_on_it() -> None:
    loader: DataLoader[Any] = DataLoader(
        SharedDataset(Words()),
        sampler=[stamp_indices([1, 2], STAMP)],
        batch_size=None,
        collate_fn=lambda sample: sample,
    )
    assert list(loader) == [([1, 2], {"max_len": 7})]


def test_everything_else_is_the_datasets_own() -> None:
    dataset = SharedDataset(Batched())
    assert (len(dataset), dataset.language, dataset.describe(), dataset.dataset.language) == (9, "en", "words", "en")
    with pytest.raises(TypeError, match="has no len"):
        len(SharedDataset(Words()))
    with pytest.raises(AttributeError, match="'Words' object has no attribute 'missing'"):
        SharedDataset(Words()).missing  # noqa: B018


def test_a_shared_dataset_survives_pickle_and_copies() -> None:
    for again in (pickle.loads(pickle.dumps(SharedDataset(Batched()))), copy.deepcopy(SharedDataset(Batched()))):
        assert (len(again), again.language, again[2]) == (9, "en", (2, {}))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter([1])


@pytest.mark.parametrize(("dataset", "kind"), [(Stream(), "Stream"), (iter([1]), "list_iterator"), (7, "int")])
def test_what_cannot_be_indexed_is_refused(dataset: Any, kind: str) -> None:
    with refuses(
        f"SharedDataset: dataset must be map-style (have __getitem__), got {kind}; an iterable dataset is given no "
        "indices that could carry values: send them as part of its samples"
    ):
        SharedDataset(dataset)
