"""A sampler goes on in mid-epoch where it was saved: with the same list, the same rest, on any number of ranks."""

import io
import itertools
from typing import Any

import pytest
import torch
from expect import refuses
from hypothesis import given
from hypothesis import strategies as st

from syncstate import Context, Every, SharedState, SyncEngine
from syncstate.samplers import SharedIndexSampler

worlds = st.integers(1, 7)


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


def a_list(n: int) -> list[int]:
    """Different indices that are not their own positions."""
    return [1000 - 3 * i for i in range(n)]


def through_disk(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


@given(n=st.integers(1, 40), world_size=worlds, shuffle=st.booleans(), drop_last=st.booleans(), data=st.data())
def test_a_resumed_epoch_deals_what_the_unbroken_one_had_left(
    n: int, world_size: int, shuffle: bool, drop_last: bool, data: st.DataObject
) -> None:
    options = {"shuffle": shuffle, "drop_last": drop_last}
    unbroken = samplers(a_list(n), world_size, **options)
    for sampler in unbroken:
        sampler.set_epoch(3)
    done = data.draw(st.integers(0, len(unbroken[0])))
    for sampler, resumed in zip(unbroken, samplers(a_list(n), world_size, **options), strict=True):
        walk = iter(sampler)
        for _ in range(done):
            next(walk)
        resumed.load_state_dict(through_disk(sampler.state_dict()))
        resumed.set_epoch(3)
        # Known also before the first index is asked for.
        assert resumed.state_dict() == sampler.state_dict()
        assert list(resumed) == list(walk)
        # Only that epoch is continued; the next one is dealt whole.
        sampler.set_epoch(4)
        resumed.set_epoch(4)
        assert list(resumed) == list(sampler)
        assert len(list(resumed)) == len(resumed)


@given(n=st.integers(1, 40), before=worlds, after=worlds, shuffle=st.booleans(), data=st.data())
def test_another_number_of_ranks_goes_on_with_the_rest(
    n: int, before: int, after: int, shuffle: bool, data: st.DataObject
) -> None:
    first = samplers(a_list(n), before, shuffle=shuffle)
    done = data.draw(st.integers(0, len(first[0])))
    head = interleaved([list(itertools.islice(sampler, done)) for sampler in first])
    then = samplers(a_list(n), after, shuffle=shuffle)
    for sampler in then:
        sampler.load_state_dict(first[0].state_dict())
    rest = interleaved(dealt(then))
    assert {*head, *rest} == set(a_list(n))
    twice = len(head) + len(rest) - n
    assert 0 <= twice < max(before, after)
    # Interrupted once more, with the first number of ranks again.
    middle = interleaved([list(itertools.islice(sampler, 1)) for sampler in resumed_from(then, first[0])])
    last = samplers(a_list(n), before, shuffle=shuffle)
    for sampler in last:
        sampler.load_state_dict(then[0].state_dict())
    assert {*head, *middle, *interleaved(dealt(last))} == set(a_list(n))


def resumed_from(ranks: list[SharedIndexSampler], saved: SharedIndexSampler) -> list[SharedIndexSampler]:
    for sampler in ranks:
        sampler.load_state_dict(saved.state_dict())
    return ranks


def test_a_state_between_epochs_is_the_beginning_of_one() -> None:
    (sampler,) = samplers(a_list(5), 1)
    assert sampler.state_dict() == {"epoch": 0, "consumed": 0}
    assert list(sampler) == a_list(5)
    assert sampler.state_dict() == {"epoch": 0, "consumed": 0}
    next(iter(sampler))
    sampler.set_epoch(1)
    assert sampler.state_dict() == {"epoch": 1, "consumed": 0}
    (resumed,) = samplers(a_list(5), 1)
    resumed.load_state_dict(sampler.state_dict())
    assert (resumed.epoch, list(resumed)) == (1, a_list(5))


def test_another_epoch_than_the_saved_one_is_dealt_whole() -> None:
    (sampler, resumed) = samplers(a_list(6), 1)[0], samplers(a_list(6), 1)[0]
    walk = iter(sampler)
    next(walk)
    resumed.load_state_dict(sampler.state_dict())
    resumed.set_epoch(1)
    assert list(resumed) == a_list(6)


def test_a_loader_that_fetches_ahead_is_told_how_far_training_is() -> None:
    (sampler, resumed) = samplers(a_list(12), 2)[0], samplers(a_list(12), 2)[0]
    expected = list(sampler)
    walk = iter(sampler)
    for _ in range(5):
        next(walk)
    resumed.load_state_dict(sampler.state_dict(position=2))
    assert list(resumed) == expected[2:]
    # Counted from the last iteration, also in a resumed epoch and after the loader has fetched everything.
    again = samplers(a_list(12), 2)[0]
    again.load_state_dict(resumed.state_dict(position=3))
    assert list(again) == expected[5:]


def test_a_position_is_a_whole_number() -> None:
    (sampler,) = samplers(a_list(5), 1)
    next(iter(sampler))
    with refuses("SharedIndexSampler: position must be a whole number of at least 0, got -1"):
        sampler.state_dict(position=-1)


def lists_by_step() -> tuple[SharedState, SharedIndexSampler]:
    state = SharedState()
    state.add("list", lambda ctx: [100 * ctx.step + i for i in range(6)], every=Every(steps=1))
    return state, SharedIndexSampler(state, "list")


def test_a_refresh_in_mid_epoch_shows_in_the_next_epoch_also_after_a_resume() -> None:
    state, sampler = lists_by_step()
    with SyncEngine(state) as engine:
        engine.start()
        walk = iter(sampler)
        assert [next(walk), next(walk)] == [0, 1]
        engine.step(1)
        saved = through_disk({"sampler": sampler.state_dict(), "engine": engine.state_dict()})
        assert list(walk) == [2, 3, 4, 5]
        assert list(sampler) == [100, 101, 102, 103, 104, 105]
    state, resumed = lists_by_step()
    with SyncEngine(state) as engine:
        engine.load_state_dict(saved["engine"])
        engine.start(1)
        resumed.load_state_dict(saved["sampler"])
        assert list(resumed) == [2, 3, 4, 5]
        assert list(resumed) == [100, 101, 102, 103, 104, 105]


def test_a_saved_place_is_not_looked_for_in_another_list() -> None:
    (sampler, other) = samplers([1, 2, 3], 1)[0], samplers([1, 3, 2], 1)[0]
    walk = iter(sampler)
    next(walk)
    other.load_state_dict(sampler.state_dict())
    with refuses(
        "SharedIndexSampler: the saved place is in another list than value 'list' (initial value) holds now; restore "
        "the engine's state too, before the loader is iterated"
    ):
        iter(other)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "the saved state has no epoch and no consumed"),
        ({"epoch": 1}, "the saved state has no consumed"),
        ({"epoch": -1, "consumed": 0}, "epoch must be a whole number of at least 0, got -1"),
        ({"epoch": 0, "consumed": 1.5}, "consumed must be a whole number of at least 0, got 1.5"),
    ],
)
def test_what_is_no_state_of_a_sampler_is_refused(state: dict[str, Any], message: str) -> None:
    (sampler,) = samplers(a_list(5), 1)
    with refuses(f"SharedIndexSampler: {message}"):
        sampler.load_state_dict(state)
