"""A shared list of indices is dealt out to the ranks: disjoint and complete."""

import itertools
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from expect import refuses
from hypothesis import given
from hypothesis import strategies as st
from ranks import returned, run_ranks
from torch.utils.data import DataLoader, DistributedSampler

from syncstate import Context, Every, SharedState, SyncEngine
from syncstate.errors import NotReady
from syncstate.samplers import SharedIndexSampler
from syncstate.values import SampledIndices


def never(ctx: Context) -> list[int]:
    raise NotImplementedError


def holding(indices: Any) -> SharedState:
    """A state with a list that is in force without an engine."""
    state = SharedState()
    state.add("list", never, initial=indices)
    return state


def samplers(indices: Any, world_size: int, **options: Any) -> list[SharedIndexSampler]:
    """The samplers of all ranks, each with a state of its own."""
    return [
        SharedIndexSampler(holding(indices), "list", num_replicas=world_size, rank=rank, **options)
        for rank in range(world_size)
    ]


def dealt(ranks: list[SharedIndexSampler]) -> list[list[int]]:
    return [list(sampler) for sampler in ranks]


def interleaved(shards: list[list[int]]) -> list[int]:
    """The list that was dealt, put together again."""
    assert len({len(shard) for shard in shards}) == 1
    return [index for row in zip(*shards, strict=True) for index in row]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


sizes = st.integers(0, 60)
worlds = st.integers(1, 7)


def a_list(n: int) -> list[int]:
    """Different indices that are not their own positions."""
    return [1000 - 3 * i for i in range(n)]


# Dealing


@given(n=st.integers(1, 60), world_size=worlds, drop_last=st.booleans())
def test_the_shards_are_those_of_a_distributed_sampler_over_the_list(n: int, world_size: int, drop_last: bool) -> None:
    indices = a_list(n)
    for rank, sampler in enumerate(samplers(indices, world_size, drop_last=drop_last)):
        positions: DistributedSampler[int] = DistributedSampler(
            range(n),  # type: ignore[arg-type]
            num_replicas=world_size,
            rank=rank,
            shuffle=False,
            drop_last=drop_last,
        )
        assert list(sampler) == [indices[position] for position in positions]
        assert len(sampler) == len(positions)
        assert (sampler.num_samples, sampler.total_size) == (positions.num_samples, positions.total_size)


@given(n=sizes, world_size=worlds, shuffle=st.booleans())
def test_the_shards_cover_the_list_and_overlap_by_no_more_than_the_padding(
    n: int, world_size: int, shuffle: bool
) -> None:
    everything = Counter(interleaved(dealt(samplers(a_list(n), world_size, shuffle=shuffle))))
    assert everything.keys() == set(a_list(n))
    assert sum(everything.values()) - n == -n % world_size


@given(n=sizes, world_size=worlds, shuffle=st.booleans())
def test_without_the_last_ones_no_index_is_dealt_twice(n: int, world_size: int, shuffle: bool) -> None:
    everything = interleaved(dealt(samplers(a_list(n), world_size, shuffle=shuffle, drop_last=True)))
    assert len(everything) == len(set(everything)) == n - n % world_size
    assert set(everything) <= set(a_list(n))


@pytest.mark.parametrize(
    "indices",
    [
        torch.tensor([5, 3, 9]),
        torch.tensor([5, 3, 9], dtype=torch.int32),
        torch.tensor([[5, 0], [3, 0], [9, 0]])[:, 0],
        [5, 3, 9],
        (5, 3, 9),
        np.array([5, 3, 9]),
    ],
)
def test_a_list_may_be_a_tensor_or_a_sequence_and_comes_as_ints(indices: Any) -> None:
    (sampler,) = samplers(indices, 1)
    assert list(sampler) == [5, 3, 9]
    assert all(type(index) is int for index in sampler)


@pytest.mark.parametrize("indices", [[], (), torch.empty(0, dtype=torch.int64)])
def test_an_empty_list_deals_nothing(indices: Any) -> None:
    for sampler in samplers(indices, 3):
        assert list(sampler) == []
        assert len(sampler) == 0


@pytest.mark.parametrize(
    ("indices", "got"),
    [
        ([0.5, 1.0], "list"),
        ([True, False], "list"),
        ("012", "str"),
        (7, "int"),
        (None, "NoneType"),
        ({0: 1}, "dict"),
        ([[0, 1], [2, 3]], "list"),
        (torch.zeros(2, 2, dtype=torch.int64), "tensor [2, 2] torch.int64"),
        (torch.tensor(3), "tensor [] torch.int64"),
        (torch.tensor([1.0]), "tensor [1] torch.float32"),
        (torch.tensor([True]), "tensor [1] torch.bool"),
    ],
)
def test_a_value_that_is_no_list_of_indices_is_refused(indices: Any, got: str) -> None:
    (sampler,) = samplers(indices, 1)
    message = f"SharedIndexSampler: value 'list' must be a 1-D integer tensor or a list of whole numbers, got {got}"
    with refuses(message):
        iter(sampler)
    with refuses(message):
        len(sampler)


# Shuffling


def test_all_ranks_shuffle_alike_whatever_their_generators_hold() -> None:
    shards = []
    for seed, sampler in enumerate(samplers(a_list(20), 4, shuffle=True)):
        torch.manual_seed(seed)
        shards.append(list(sampler))
    order = interleaved(shards)
    assert sorted(order) == sorted(a_list(20))
    assert order != a_list(20)


def test_the_order_changes_with_the_epoch_and_the_seed_and_comes_back_with_them() -> None:
    (sampler,) = samplers(a_list(30), 1, shuffle=True)
    (other,) = samplers(a_list(30), 1, shuffle=True, seed=2**64 + 1)
    orders: dict[int, tuple[int, ...]] = {}
    for epoch in (0, 1, 2, 1):
        sampler.set_epoch(epoch)
        other.set_epoch(epoch)
        order = tuple(sampler)
        assert orders.setdefault(epoch, order) == order
        assert tuple(other) != order
    assert len(set(orders.values())) == 3


def test_shuffling_touches_no_generator_of_torch() -> None:
    before = torch.get_rng_state()
    dealt(samplers(a_list(20), 2, shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)


# A fixed number a rank


@given(n=st.integers(1, 60), world_size=worlds, num_samples=st.integers(1, 30))
def test_every_rank_gets_the_number_that_was_given(n: int, world_size: int, num_samples: int) -> None:
    ranks = samplers(a_list(n), world_size, num_samples=num_samples)
    total = world_size * num_samples
    assert [len(sampler) for sampler in ranks] == [num_samples] * world_size
    # A longer list is cut, a shorter one begins again.
    assert interleaved(dealt(ranks)) == list(itertools.islice(itertools.cycle(a_list(n)), total))


def test_a_number_that_needs_repetition_is_refused_where_nothing_may_be_dealt_twice() -> None:
    (sampler, _) = samplers(a_list(7), 2, num_samples=4, drop_last=True)
    with refuses(
        "SharedIndexSampler: num_samples=4 on 2 ranks takes 8 indices, but value 'list' (initial value) has 7; give a "
        "smaller num_samples or a longer list, or drop_last=False to deal some twice"
    ):
        iter(sampler)


def test_an_empty_list_cannot_give_a_fixed_number() -> None:
    (sampler,) = samplers([], 1, num_samples=4)
    with refuses(
        "SharedIndexSampler: num_samples=4 on 1 ranks takes 4 indices, but value 'list' (initial value) has 0; give a "
        "smaller num_samples or a longer list"
    ):
        iter(sampler)


def test_the_length_is_known_before_the_value_only_if_it_was_given() -> None:
    state = SharedState()
    state.add("order", SampledIndices(10), every=Every(epochs=1))
    assert len(SharedIndexSampler(state, "order", num_samples=3)) == 3
    sampler = SharedIndexSampler(state, "order")
    with pytest.raises(NotReady) as error:
        len(sampler)
    assert str(error.value) == (
        "the length of this sampler is that of a shared value. value 'order' has no value yet: it is computed every 1 "
        "epochs, and no sync has reached it. Start the engine before reading it, or give state.add('order', ..., "
        "initial=...) a value to hold until then. Or give the sampler num_samples=..., the indices a rank in an epoch"
    )
    with pytest.raises(NotReady, match="value 'order' has no value yet"):
        iter(sampler)


def test_the_length_follows_the_list() -> None:
    state = SharedState()
    state.add("list", lambda ctx: list(range(10 + ctx.epoch)), every=Every(epochs=1))
    sampler = SharedIndexSampler(state, "list", num_replicas=2, rank=1)
    with SyncEngine(state) as engine:
        lengths = []
        for epoch in range(4):
            engine.step(0, epoch)
            lengths.append((len(sampler), list(sampler)[-1]))
    assert lengths == [(5, 9), (6, 0), (6, 11), (7, 0)]


# Making one


def test_it_is_a_distributed_sampler_so_that_hosts_leave_it_alone() -> None:
    assert isinstance(samplers([1], 1)[0], DistributedSampler)


def test_unsharded_is_the_whole_list_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    sampler = SharedIndexSampler.unsharded(holding(a_list(5)), "list")
    assert (list(sampler), len(sampler)) == (a_list(5), 5)
    shuffled = SharedIndexSampler.unsharded(holding(a_list(5)), "list", shuffle=True, num_samples=4)
    assert len(set(shuffled)) == 4


def test_without_a_process_group_there_is_one_rank() -> None:
    sampler = SharedIndexSampler(holding(a_list(5)), "list")
    assert (sampler.rank, sampler.num_replicas, list(sampler)) == (0, 1, a_list(5))


def test_several_processes_without_a_group_are_not_several_wholes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    sampler = SharedIndexSampler(holding(a_list(5)), "list")
    with refuses(
        "SharedIndexSampler: WORLD_SIZE is 2 but torch.distributed is not initialized: call "
        "torch.distributed.init_process_group first, or give num_replicas and rank"
    ):
        iter(sampler)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "other"}, "no shared value 'other'; there are list"),
        ({"num_replicas": 0}, "num_replicas must be a whole number of at least 1, got 0"),
        ({"num_replicas": 2, "rank": 2}, "rank must be below num_replicas=2, got 2"),
        ({"rank": -1}, "rank must be a whole number of at least 0, got -1"),
        ({"rank": "0"}, "rank must be a whole number of at least 0, got '0'"),
        ({"num_samples": 0}, "num_samples must be a whole number of at least 1, got 0"),
        ({"num_samples": 2.5}, "num_samples must be a whole number of at least 1, got 2.5"),
        ({"shuffle": None}, "shuffle must be true or false, got None"),
        ({"drop_last": 1}, "drop_last must be true or false, got 1"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
    ],
)
def test_a_sampler_refuses(options: dict[str, Any], message: str) -> None:
    with refuses(f"SharedIndexSampler: {message}"):
        SharedIndexSampler(holding([1]), **{"name": "list", **options})


def test_a_rank_outside_of_the_world_is_refused_when_the_world_is_known() -> None:
    sampler = SharedIndexSampler(holding([1]), "list", rank=1)
    with refuses("SharedIndexSampler: rank must be below num_replicas=1, got 1"):
        iter(sampler)


def test_a_sampler_survives_pickle_with_its_state() -> None:
    state = SharedState()
    state.add("order", SampledIndices(4), initial=[3, 1, 2, 0])
    sampler = pickle.loads(pickle.dumps(SharedIndexSampler(state, "order", num_replicas=2, rank=1)))
    assert list(sampler) == [1, 0]


# On real ranks


def epochs_of(rank: int, shuffle: bool) -> tuple[list[list[int]], list[int]]:
    """Three epochs over 103 samples on a rank whose own generators are seeded differently."""
    state = SharedState()
    state.add("order", SampledIndices(103), every=Every(epochs=1))
    # Made before the list exists, and before the group is asked for.
    sampler = SharedIndexSampler(state, "order", shuffle=shuffle)
    loader: DataLoader[int] = DataLoader(torch.arange(103), batch_size=8, sampler=sampler)  # type: ignore[arg-type]
    torch.manual_seed(rank)
    np.random.seed(rank)
    seen, step = [], 0
    with SyncEngine(state) as engine:
        for epoch in range(3):
            engine.step(step, epoch)
            sampler.set_epoch(epoch)
            batches = []
            for batch in loader:
                batches += batch.tolist()
                step += 1
                engine.step(step, epoch)
            assert len(batches) == len(sampler)
            seen.append(batches)
    return seen, [sampler.rank, sampler.num_replicas]


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_shards_of_four_ranks_are_disjoint_and_complete_although_local_seeds_differ(shuffle: bool) -> None:
    ranks = returned(run_ranks(epochs_of, 4, shuffle))
    assert [place for _, place in ranks] == [[rank, 4] for rank in range(4)]
    orders = []
    for epoch in range(3):
        order = interleaved([seen[epoch] for seen, _ in ranks])
        assert Counter(order) == Counter(range(103)) + Counter(order[-1:])
        orders.append(tuple(order))
    assert len(set(orders)) == 3


def accelerated(rank: int) -> tuple[list[int], int]:
    """What one rank trains on when Accelerate deals the batches out."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    state = SharedState()
    state.add("order", SampledIndices(24), every=Every(epochs=1))
    loader: DataLoader[int] = DataLoader(
        torch.arange(24),  # type: ignore[arg-type]
        batch_size=3,
        sampler=SharedIndexSampler.unsharded(state, "order"),
    )
    with SyncEngine(state) as engine:
        engine.start()
        seen = [index for batch in accelerator.prepare(loader) for index in batch.tolist()]
    return seen, accelerator.num_processes


def test_accelerate_shards_an_unsharded_list_once() -> None:
    pytest.importorskip("accelerate")
    one, two = returned(run_ranks(accelerated, 2))
    assert (one[1], two[1]) == (2, 2)
    assert sorted(one[0] + two[0]) == list(range(24))


def in_a_group_of_two(rank: int) -> list[int]:
    """Ranks of a sub-group are given by hand."""
    group = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    sampler = SharedIndexSampler(
        holding(a_list(6)), "list", num_replicas=dist.get_world_size(group), rank=dist.get_rank(group)
    )
    return list(sampler)


def test_a_sub_group_deals_the_list_among_its_own() -> None:
    shards = returned(run_ranks(in_a_group_of_two, 4))
    assert interleaved([shards[0], shards[2]]) == interleaved([shards[1], shards[3]]) == a_list(6)
