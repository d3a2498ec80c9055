"""Batches are stamped with the values in force when they are drawn, and a resumed run repeats the stamps."""

import io
import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from expect import refuses
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from syncstate import Context, Every, SharedState, SyncEngine
from syncstate.errors import NotReady
from syncstate.samplers import SharedBatchSampler, SharedIndexSampler
from syncstate.values import SampledIndices


def state_of_steps(**more: Any) -> SharedState:
    """`step` is the step at which it was computed, every step; `even` is true every second step."""
    state = SharedState()
    state.add("step", lambda ctx: ctx.step, every=Every(steps=1), **more)
    state.add("even", lambda ctx: ctx.step % 4 == 0, every=Every(steps=2), **more)
    return state


def never(ctx: Context) -> Any:
    raise NotImplementedError


def sequence(n: int, size: int = 2, drop_last: bool = False) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(n)), size, drop_last)


def trained(batches: SharedBatchSampler, engine: SyncEngine, count: int | None = None, name: str = "step") -> list[Any]:
    """Train on so many batches, or on all: (indices, the value on them) of each. A batch is a step."""
    seen: list[Any] = []
    walk = iter(batches)
    while count is None or len(seen) < count:
        batch = next(walk, None)
        if batch is None:
            break
        assert {id(index.shared) for index in batch} == {id(batch[0].shared)}
        seen.append((list(batch), batch[0].shared[name]))
        engine.step(engine.seen[0] + 1, engine.seen[1])
    return seen


def through_disk(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


# Stamping


def test_a_batch_carries_the_values_in_force_when_it_is_drawn() -> None:
    state = state_of_steps()
    with SyncEngine(state) as engine:
        engine.start()
        assert trained(SharedBatchSampler(sequence(7), state, ["step"]), engine) == [
            ([0, 1], 0), ([2, 3], 1), ([4, 5], 2), ([6], 3),
        ]  # fmt: skip


def test_all_names_are_stamped_and_no_other() -> None:
    state = state_of_steps()
    with SyncEngine(state) as engine:
        engine.start()
        (batch,) = SharedBatchSampler(sequence(2), state, ["even", "step"])
        assert dict(batch[1].shared) == {"even": True, "step": 0}
        (batch,) = SharedBatchSampler(sequence(2), state, "even")  # one name is not a list of letters
        assert dict(batch[1].shared) == {"even": True}


def test_a_stamp_does_not_follow_the_value() -> None:
    state = SharedState()
    state.add("weights", lambda ctx: torch.full((2,), float(ctx.step)), every=Every(steps=1))
    with SyncEngine(state) as engine:
        engine.start()
        walk = iter(SharedBatchSampler(sequence(4), state, ["weights"]))
        first = next(walk)
        engine.step(1)
        state["weights"].fill_(9)  # which nobody should do
        second = next(walk)
    assert (first[0].shared["weights"].tolist(), second[0].shared["weights"].tolist()) == ([0.0, 0.0], [9.0, 9.0])


def test_a_value_is_encoded_once_for_all_batches_that_carry_it() -> None:
    state = state_of_steps()
    stamps = []
    with SyncEngine(state) as engine:
        engine.start()
        for step, batch in enumerate(SharedBatchSampler(sequence(12), state, ["even"]), 1):
            stamps.append(batch[0].shared)
            engine.step(step)
    assert [stamp["even"] for stamp in stamps] == [True, True, False, False, True, True]
    assert len({id(stamp.packed) for stamp in stamps}) == 3


def test_what_a_dataset_does_to_a_value_stays_in_its_batch() -> None:
    state = SharedState()
    state.add("weights", never, initial=torch.zeros(2))
    first, second = SharedBatchSampler(sequence(4), state, ["weights"])
    first[0].shared["weights"].add_(1)
    assert first[1].shared["weights"].tolist() == [1.0, 1.0]
    assert second[0].shared["weights"].tolist() == state["weights"].tolist() == [0.0, 0.0]


class OddBatches:
    """Neither a class of torch nor of one size, and its indices are of all kinds."""

    def __iter__(self) -> Iterator[Any]:
        return iter([["a", "b"], ((1, 2), (3, 4)), torch.tensor([5, 6]), []])


def test_any_iterable_of_lists_of_any_indices_will_do() -> None:
    state = state_of_steps(initial=0)
    found = list(SharedBatchSampler(OddBatches(), state, ["step"]))
    assert found[:2] == [["a", "b"], [(1, 2), (3, 4)]]
    assert [int(key.index) for key in found[2]] == [5, 6]
    assert found[3] == []
    assert {index.shared["step"] for batch in found for index in batch} == {0}


@pytest.mark.parametrize("batches", [[1, 2], ["ab"], [None]])
def test_what_yields_single_indices_is_refused(batches: list[Any]) -> None:
    with refuses(
        f"SharedBatchSampler: batch_sampler must yield lists of indices, got {batches[0]!r}; put a sampler of single "
        "indices into torch.utils.data.BatchSampler(sampler, batch_size, drop_last) first"
    ):
        next(iter(SharedBatchSampler(batches, state_of_steps(initial=0), ["step"])))


def test_a_value_that_is_not_ready_is_missed_when_the_first_batch_is_drawn() -> None:
    walk = iter(SharedBatchSampler(sequence(4), state_of_steps(), ["step"]))
    with pytest.raises(NotReady, match="value 'step' has no value yet"):
        next(walk)


# Making one


def test_length_and_attributes_are_those_of_the_batch_sampler() -> None:
    inner = sequence(7, 3, drop_last=True)
    batches = SharedBatchSampler(inner, state_of_steps(), ["step"])
    assert (len(batches), batches.batch_size, batches.drop_last, batches.sampler) == (2, 3, True, inner.sampler)
    assert not hasattr(SharedBatchSampler(OddBatches(), state_of_steps(), ["step"]), "sampler")
    with pytest.raises(AttributeError, match="'BatchSampler' object has no attribute 'missing'"):
        batches.missing  # noqa: B018
    # As Accelerate does, to make all ranks shuffle alike.
    batches.sampler = SequentialSampler(range(4))
    assert len(batches) == 1
    assert inner.sampler is batches.sampler


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"names": ["step", "other"]}, "no shared value 'other'; there are step, even"),
        (
            {"sampler": SequentialSampler(range(4))},
            "sampler is for Lightning; give batch_sampler the sampler to draw from",
        ),
        ({"state": {"step": 1}}, "state must be a SharedState, got {'step': 1}"),
        (
            {"batch_sampler": 7},
            "batch_sampler must yield lists of indices, as torch.utils.data.BatchSampler does, and not stamped ones, "
            "got int",
        ),
    ],
)
def test_a_batch_sampler_refuses(change: dict[str, Any], message: str) -> None:
    with refuses(f"SharedBatchSampler: {message}"):
        SharedBatchSampler(**{"batch_sampler": sequence(4), "state": state_of_steps(), "names": ["step"], **change})


def test_batches_are_not_stamped_twice() -> None:
    state = state_of_steps()
    with refuses(
        "SharedBatchSampler: batch_sampler must yield lists of indices, as torch.utils.data.BatchSampler does, and not "
        "stamped ones, got SharedBatchSampler"
    ):
        SharedBatchSampler(SharedBatchSampler(sequence(4), state, ["step"]), state, ["even"])


def test_a_batch_sampler_survives_pickle_with_its_state_also_in_mid_epoch() -> None:
    state = SharedState()
    state.add("order", SampledIndices(4), initial=[3, 1, 2, 0])
    batches = SharedBatchSampler(BatchSampler(SharedIndexSampler(state, "order"), 2, False), state, ["order"])
    next(iter(batches))
    again = pickle.loads(pickle.dumps(batches))
    assert [(list(batch), batch[0].shared["order"]) for batch in again] == [
        ([3, 1], [3, 1, 2, 0]),
        ([2, 0], [3, 1, 2, 0]),
    ]


def test_without_names_it_knows_the_place_only() -> None:
    batches = SharedBatchSampler(sequence(6), state_of_steps(), [])
    walk = iter(batches)
    assert dict(next(walk)[0].shared) == {}
    again = SharedBatchSampler(sequence(6), state_of_steps(), [])
    again.load_state_dict(batches.state_dict())
    assert list(again) == [[2, 3], [4, 5]]


# Epochs


def test_the_epoch_is_that_of_the_sampler_below() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(range(8), num_replicas=1, rank=0)  # type: ignore[arg-type]
    batches = SharedBatchSampler(BatchSampler(sampler, 2, False), state_of_steps(initial=0), ["step"])
    batches.set_epoch(3)
    assert (sampler.epoch, batches.epoch, batches.state_dict()["epoch"]) == (3, 3, 3)
    sampler.set_epoch(4)  # as Lightning and Accelerate do
    assert (batches.epoch, batches.state_dict()["epoch"]) == (4, 4)
    plain = SharedBatchSampler(sequence(4), state_of_steps(initial=0), ["step"])
    plain.set_epoch(2)
    assert (plain.epoch, plain.state_dict()["epoch"]) == (2, 2)


# Checkpoints


def making(kind: str, n: int, size: int, drop_last: bool) -> tuple[SharedState, SharedBatchSampler]:
    state = state_of_steps()
    state.add("order", SampledIndices(n), every=Every(epochs=1))
    samplers: dict[str, Iterable[int]] = {
        "sequential": SequentialSampler(range(n)),
        "distributed": DistributedSampler(range(n), num_replicas=2, rank=1),  # type: ignore[arg-type]
        "shared": SharedIndexSampler(state, "order", num_replicas=2, rank=1),
        "shuffled": SharedIndexSampler(state, "order", shuffle=True),
    }
    return state, SharedBatchSampler(BatchSampler(samplers[kind], size, drop_last), state, ["step", "even"])


@given(
    kind=st.sampled_from(["sequential", "distributed", "shared", "shuffled"]),
    n=st.integers(1, 30),
    size=st.integers(1, 5),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_a_resumed_epoch_has_the_batches_and_the_stamps_of_the_unbroken_one(
    kind: str, n: int, size: int, drop_last: bool, data: st.DataObject
) -> None:
    state, batches = making(kind, n, size, drop_last)
    with SyncEngine(state) as engine:
        engine.start(0, 1)
        batches.set_epoch(1)
        done = data.draw(st.integers(0, len(batches)))
        trained(batches, engine, done)
        saved = through_disk({"batches": batches.state_dict(), "engine": engine.state_dict()})
    state, batches = making(kind, n, size, drop_last)
    with SyncEngine(state) as engine:
        engine.start(0, 1)
        batches.set_epoch(1)
        unbroken = trained(batches, engine)
        engine.step(len(unbroken), 2)
        batches.set_epoch(2)
        next_epoch = trained(batches, engine)
    state, batches = making(kind, n, size, drop_last)
    with SyncEngine(state) as engine:
        engine.load_state_dict(saved["engine"])
        engine.start(done, 1)
        batches.load_state_dict(saved["batches"])
        assert batches.epoch == 1
        batches.set_epoch(1)
        # Known also before the first batch is asked for, and still there when the same is saved once more.
        again = batches.state_dict()
        assert {**again, "stamps": []} == {**saved["batches"], "stamps": []}
        batches.load_state_dict(again)
        assert trained(batches, engine) == unbroken[done:]
        engine.step(len(unbroken), 2)
        batches.set_epoch(2)
        assert trained(batches, engine) == next_epoch


def drawn_ahead(ahead: int, train: int) -> tuple[SharedState, SharedBatchSampler, dict[str, Any], list[Any]]:
    """Train so many batches while more are drawn in advance; the place is told by hand."""
    state = state_of_steps()
    batches = SharedBatchSampler(sequence(20), state, ["step"])
    with SyncEngine(state) as engine:
        engine.start()
        walk = iter(batches)
        queue = [next(walk) for _ in range(ahead)]
        seen = []
        for step in range(1, 11):
            queue += [batch] if (batch := next(walk, None)) is not None else []
            seen.append((list(queue[0]), queue.pop(0)[0].shared["step"]))
            engine.step(step)
            if step == train:
                saved = {"batches": batches.state_dict(position=train), "engine": engine.state_dict()}
    return state, batches, through_disk(saved), seen


@pytest.mark.parametrize("train", [1, 4, 7, 10])
def test_batches_that_were_drawn_in_advance_keep_their_stamps(train: int) -> None:
    _, _, saved, unbroken = drawn_ahead(3, train)
    assert [value for _, value in unbroken] == [0, 0, 0, 0, 1, 2, 3, 4, 5, 6]
    kept = saved["batches"]
    assert (kept["batches"], kept["drawn"]) == (train, min(10, train + 3))
    # Where a new value begins; of what has been trained on, nothing is kept.
    assert [number for number, _ in kept["stamps"]] == {1: [1], 4: [4, 5, 6], 7: [7, 8, 9], 10: []}[train]
    state = state_of_steps()
    batches = SharedBatchSampler(sequence(20), state, ["step"])
    with SyncEngine(state) as engine:
        engine.load_state_dict(saved["engine"])
        engine.start(train)
        batches.load_state_dict(kept)
        walk = iter(batches)
        queue = [batch for _ in range(3) if (batch := next(walk, None)) is not None]
        for step in range(train + 1, 11):
            queue += [batch] if (batch := next(walk, None)) is not None else []
            assert (list(queue[0]), queue.pop(0)[0].shared["step"]) == unbroken[step - 1]
            engine.step(step)


def test_another_epoch_than_the_saved_one_begins_anew_with_new_stamps() -> None:
    _, _, saved, _ = drawn_ahead(3, 4)
    state = state_of_steps()
    batches = SharedBatchSampler(sequence(20), state, ["step"])
    with SyncEngine(state) as engine:
        engine.load_state_dict(saved["engine"])
        engine.start(4)
        batches.load_state_dict(saved["batches"])
        batches.set_epoch(1)
        assert batches.state_dict() == {"epoch": 1, "batches": 0, "drawn": 0, "stamps": []}
        assert trained(batches, engine, 2) == [([0, 1], 4), ([2, 3], 5)]


def test_a_state_between_epochs_is_the_beginning_of_one_unless_epochs_are_told() -> None:
    state = state_of_steps(initial=0)
    batches = SharedBatchSampler(sequence(4), state, ["step"])
    assert len(list(batches)) == 2
    assert batches.state_dict() == {"epoch": 0, "batches": 0, "drawn": 0, "stamps": []}
    batches.set_epoch(1)
    assert len(list(batches)) == 2
    assert batches.state_dict() == {"epoch": 1, "batches": 2, "drawn": 2, "stamps": []}
    # Then that epoch is over, and the next one is whole.
    batches.load_state_dict(batches.state_dict())
    assert list(batches) == []
    batches.set_epoch(2)
    assert len(list(batches)) == 2


def lists_by_step() -> tuple[SharedState, SharedBatchSampler]:
    state = SharedState()
    state.add("list", lambda ctx: [100 * ctx.step + i for i in range(6)], every=Every(steps=1))
    state.add("step", lambda ctx: ctx.step, every=Every(steps=1))
    return state, SharedBatchSampler(BatchSampler(SharedIndexSampler(state, "list"), 2, False), state, ["step"])


def test_a_list_that_is_refreshed_in_mid_epoch_is_finished_after_a_resume() -> None:
    state, batches = lists_by_step()
    with SyncEngine(state) as engine:
        engine.start()
        assert trained(batches, engine, 1) == [([0, 1], 0)]
        saved = through_disk({"batches": batches.state_dict(), "engine": engine.state_dict()})
    state, batches = lists_by_step()
    with SyncEngine(state) as engine:
        engine.load_state_dict(saved["engine"])
        engine.start(1)
        batches.load_state_dict(saved["batches"])
        assert trained(batches, engine) == [([2, 3], 1), ([4, 5], 2)]
        assert trained(batches, engine)[0] == ([300, 301], 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": None, "stamps": None}, "the saved state has no epoch and no stamps"),
        ({"epoch": -1}, "epoch must be a whole number of at least 0, got -1"),
        ({"batches": 1.5}, "batches must be a whole number of at least 0, got 1.5"),
        ({"stamps": [[0, torch.zeros(3, dtype=torch.uint8)]]}, "the saved stamps cannot be read: "),
        ({"stamps": [0]}, "the saved stamps cannot be read: "),
    ],
)
def test_what_is_no_state_of_a_batch_sampler_is_refused(change: dict[str, Any], message: str) -> None:
    state = {"epoch": 0, "batches": 0, "drawn": 0, "stamps": [], **change}
    state = {key: value for key, value in state.items() if value is not None}
    batches = SharedBatchSampler(sequence(4), state_of_steps(), ["step"])
    with pytest.raises(ValueError, match=f"^SharedBatchSampler: {message}"):
        batches.load_state_dict(state)


def test_stamps_of_other_values_are_refused() -> None:
    _, _, saved, _ = drawn_ahead(3, 4)
    with refuses("SharedBatchSampler: the saved stamps hold step, this sampler step, even"):
        SharedBatchSampler(sequence(20), state_of_steps(), ["step", "even"]).load_state_dict(saved["batches"])


def test_a_saved_place_beyond_the_end_is_refused() -> None:
    _, _, saved, _ = drawn_ahead(3, 4)
    batches = SharedBatchSampler(sequence(6), state_of_steps(initial=0), ["step"])
    batches.load_state_dict(saved["batches"])
    with refuses("SharedBatchSampler: the saved place is batch 4 of epoch 0, but batch_sampler has only 3 there"):
        next(iter(batches))


def test_a_position_is_a_number_of_batches_that_were_drawn() -> None:
    batches = SharedBatchSampler(sequence(6), state_of_steps(initial=0), ["step"])
    next(iter(batches))
    with refuses("SharedBatchSampler: position must be a whole number of at least 0, got -1"):
        batches.state_dict(position=-1)
    with refuses(
        "SharedBatchSampler: position must be the number of batches trained on since the loader was iterated, got 2 "
        "where 1 were drawn"
    ):
        batches.state_dict(position=2)


def test_stamps_that_are_long_out_of_flight_are_forgotten() -> None:
    state = SharedState()
    state.add("large", lambda ctx: torch.full((1000,), ctx.step), every=Every(steps=1))
    batches = SharedBatchSampler(sequence(300, 1), state, ["large"])
    with SyncEngine(state) as engine:
        engine.start()
        seen = []
        for step, batch in enumerate(batches, 1):
            seen.append(int(batch[0].shared["large"][0]))
            engine.step(step)
            if step == 200:
                kept = batches.state_dict(position=150)
                with refuses(
                    "SharedBatchSampler: position must be the number of batches trained on since the loader was "
                    "iterated, got 100 where 200 were drawn"
                ):
                    batches.state_dict(position=100)
    assert seen == list(range(300))
    assert [number for number, _ in kept["stamps"]] == list(range(150, 200))


def test_the_generators_of_torch_are_not_touched() -> None:
    sampler = RandomSampler(range(8), generator=torch.Generator().manual_seed(0))
    before = torch.get_rng_state()
    list(SharedBatchSampler(BatchSampler(sampler, 2, False), state_of_steps(initial=0), ["step"]))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_value_that_needs_pickle_can_be_stamped_where_pickle_is_allowed() -> None:
    state = SharedState(allow_pickle=True)
    state.add("odd", never, initial=complex)
    (batch,) = SharedBatchSampler(sequence(2), state, ["odd"])
    assert pickle.loads(pickle.dumps(batch))[0].shared["odd"] is complex
