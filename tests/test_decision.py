"""A decision is what its votes come to; a request is one vote in one sync."""

import pickle
import types
from typing import Any

import numpy as np
import pytest
import torch
from expect import refuses
from hypothesis import given
from hypothesis import strategies as st

from syncstate import Context
from syncstate.context import generator
from syncstate.errors import ConfigError
from syncstate.values import Decision
from syncstate.values.plateau import Plateau

votes = st.lists(st.booleans(), min_size=1, max_size=12)


# Votes


@given(votes=votes, data=st.data())
def test_the_votes_of_all_ranks_decide(votes: list[bool], data: st.DataObject) -> None:
    yes, n = sum(votes), len(votes)
    main, share = data.draw(st.integers(0, n - 1)), data.draw(st.sampled_from([0.1, 0.25, 1 / 3, 0.5, 0.9, 1]))
    expected: dict[str | float, bool] = {"any": yes > 0, "all": yes == n, "main": votes[main], "majority": 2 * yes > n}
    expected[share] = yes / n >= share
    for reduce, decided in expected.items():
        value = Decision(reduce=reduce).compute(Context(rank=main, world_size=n, collected=votes))
        assert type(value) is bool
        assert value == decided, reduce


def test_a_share_is_met_exactly_where_rounding_would_miss_it() -> None:
    assert Decision(reduce=0.1).compute(Context(collected=[True] * 3 + [False] * 27))
    assert Decision(reduce=1 / 3).compute(Context(collected=[True, False, False]))
    assert not Decision(reduce="majority").compute(Context(collected=[True, False]))


def test_an_answer_for_all_ranks_is_taken_as_it_is() -> None:
    for collected in (True, np.bool_(True), torch.tensor(True)):
        assert Decision().compute(Context(collected=collected)) is True


@pytest.mark.parametrize("given", [True, np.bool_(True), torch.tensor(True), torch.tensor(2.0) > 1])
def test_a_predicate_votes_on_each_rank(given: Any) -> None:
    assert Decision(lambda ctx: given if ctx.rank == 1 else False).collect(Context(rank=1)) == (True, 0)
    assert Decision(lambda ctx: given if ctx.rank == 1 else False).collect(Context(rank=0)) == (False, 0)


@pytest.mark.parametrize("given", [None, 1, "yes", torch.tensor(1.0), []])
def test_a_predicate_must_say_true_or_false(given: Any) -> None:
    with pytest.raises(ConfigError, match="the predicate must return true or false, got"):
        Decision(lambda ctx: given).collect(Context())


def test_without_an_engine_a_process_votes_alone() -> None:
    stop = Decision(lambda ctx: ctx.step == 3)
    assert [stop.compute(Context(step=step)) for step in (2, 3)] == [False, True]


# Requests


def decided(main: Decision, *ranks: Decision, version: int = 0, **fields: Any) -> bool:
    """What main computes from what all ranks collect."""
    collected = [decision.collect(Context(rank=rank)) for rank, decision in enumerate((main, *ranks))]
    rng = generator(0, "x", version)
    return main.compute(Context(rng=rng, world_size=len(collected), collected=collected, **fields))


def test_a_request_counts_once_in_the_next_sync() -> None:
    main, peer = Decision(), Decision()
    found = []
    for version in range(1, 8):
        if version == 2:
            peer.request()
            peer.request()
        if version in (4, 5):
            main.request()
        found.append(decided(main, peer, version=version))
    assert found == [False, True, False, True, True, False, False]


def test_a_request_is_not_lost_in_a_sync_that_fails() -> None:
    main, peer = Decision(), Decision()
    assert decided(main, peer, version=1) is False
    peer.request()
    # A failed sync consumes no version, so the next one computes the same.
    assert [decided(main, peer, version=2, step=step) for step in (10, 20, 30)] == [True, True, True]
    assert decided(main, peer, version=3, step=40) is False
    main.request()
    assert [decided(main, peer, version=version) for version in (4, 4, 5)] == [True, True, False]


def test_requests_are_votes_of_their_ranks() -> None:
    main, first, second = Decision(reduce="majority"), Decision(), Decision()
    first.request()
    assert decided(main, first, second, version=1) is False
    first.request()
    second.request()
    assert decided(main, first, second, version=2) is True
    alone = Decision(reduce="main")
    first.request()
    assert decided(alone, first, second, version=1) is False
    alone.request()
    assert decided(alone, first, second, version=2) is True


def test_a_request_and_a_predicate_are_both_heard() -> None:
    seen: list[int] = []

    def predicate(ctx: Context) -> bool:
        seen.append(ctx.step)
        return False

    stop = Decision(predicate)
    stop.request()
    assert stop.compute(Context(step=7)) is True
    assert seen == [7]


def test_a_request_outlives_pickling_and_contexts_made_by_hand() -> None:
    stop = Decision()
    stop.request()
    stop = pickle.loads(pickle.dumps(stop))
    assert [stop.compute(Context()) for _ in range(2)] == [True, False]
    stop.request()
    hand = Context(rng=np.random.default_rng(0))
    assert [stop.compute(hand) for _ in range(2)] == [True, False]


# Stopping hosts


class Accelerates:
    triggered = 0

    def set_trigger(self) -> None:
        self.triggered += 1


def test_a_host_is_stopped_in_its_own_way_and_only_by_true() -> None:
    apply = Decision(stop_host=True).apply
    assert apply is not None
    lightning = types.SimpleNamespace(should_stop=False)
    trainer = types.SimpleNamespace(control=types.SimpleNamespace(should_training_stop=False))
    control = types.SimpleNamespace(should_training_stop=False)
    accelerator = Accelerates()
    for value in (False, True):
        for host in (lightning, trainer, control, accelerator, None):
            apply(value, Context(host=host))
        assert lightning.should_stop is value
        assert trainer.control.should_training_stop is value
        assert control.should_training_stop is value
        assert accelerator.triggered == value
    apply(False, Context(host=lightning))
    assert lightning.should_stop is True  # somebody else may have wanted it


def test_without_stop_host_there_is_nothing_to_apply_and_an_unknown_host_is_an_error() -> None:
    assert Decision().apply is None
    apply = Decision(stop_host=True).apply
    assert apply is not None
    apply(False, Context(host=object()))
    with refuses("Decision: stop_host knows no way to stop a object; leave it out and read the value"):
        apply(True, Context(host=object()))


# Settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            (
                {"reduce": reduce},
                "reduce must be one of any, all, main, majority or a share of the ranks above 0 and at most 1, "
                f"got {reduce!r}",
            )
            for reduce in ("most", 0, 1.5, True, None, float("nan"))
        ),
        ({"predicate": 3}, "predicate must be a function predicate(ctx) -> bool, got 3"),
        ({"stop_host": "yes"}, "stop_host must be true or false, got 'yes'"),
    ],
)
def test_a_decision_refuses(options: dict[str, Any], message: str) -> None:
    with refuses(f"Decision: {message}"):
        Decision(**options)


def test_a_predicate_that_keeps_something_needs_main() -> None:
    with pytest.raises(ConfigError, match=r'of which checkpoints hold only main\'s.*got|give reduce="main"'):
        Decision(Plateau("loss"))
    plain, stateful = Decision(), Decision(Plateau("loss", patience=2), reduce="main")
    assert not hasattr(plain, "state_dict")
    assert not hasattr(plain, "load_state_dict")
    stateful.load_state_dict({"best": 1.5, "without": 2})
    assert stateful.state_dict() == {"best": 1.5, "without": 2}


# Plateaus


def over(plateau: Plateau, *metrics: Any) -> list[bool]:
    given = iter(metrics)
    plateau.metric = lambda ctx: next(given)
    return [plateau(Context()) for _ in metrics]


def test_a_plateau_is_so_many_measurements_without_a_better_one() -> None:
    assert over(Plateau("x", 2), 3.0, 2.0, 2.0, 1.0, 1.0, 1.5, 1.2, 0.5) == [
        *(False, False, False, False, False, True, True, False)
    ]
    assert over(Plateau("x", 1, mode="max"), 1, 2, 2, 3) == [False, False, True, False]
    assert over(Plateau("x", 1, min_delta=0.5), 3.0, 2.6, 2.5, 2.4, 1.9) == [False, True, True, False, True]


def test_nan_is_never_better_and_none_is_no_measurement() -> None:
    nan = float("nan")
    assert over(Plateau("x", 2), nan, None, None, nan, 1.0, None, nan) == [
        *(False, False, False, True, False, False, False)
    ]
    assert over(Plateau("x", 1), torch.tensor(2.0), np.float32(2.0)) == [False, True]


def test_a_plateau_goes_on_where_it_was() -> None:
    first, second = Plateau("x", 3), Plateau("x", 3)
    over(first, 2.0, 2.5)
    second.load_state_dict(first.state_dict())
    assert over(first, 3.0, 3.0) == over(second, 3.0, 3.0) == [False, True]


def test_a_name_is_looked_up_in_what_a_trainer_has_logged() -> None:
    trainer = types.SimpleNamespace(callback_metrics={})
    plateau = Plateau("val_loss", 1)
    found = [plateau(Context(host=trainer))]
    for metric in (1.0, 1.0):
        trainer.callback_metrics["val_loss"] = torch.tensor(metric)
        found.append(plateau(Context(host=trainer)))
    assert found == [False, False, True]
    with refuses(
        "Plateau: metric='val_loss' is a name, for which the host must be a Lightning Trainer, got NoneType; give a "
        "function metric(ctx)"
    ):
        plateau(Context())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": ""}, "metric must be a function metric(ctx) or a name, got ''"),
        ({"patience": 0}, "patience must be a whole number of at least 1, got 0"),
        ({"min_delta": -1}, "min_delta must be a finite number of at least 0, got -1"),
        ({"mode": "up"}, "mode must be min or max, got 'up'"),
    ],
)
def test_a_plateau_refuses(options: dict[str, Any], message: str) -> None:
    with refuses(f"Plateau: {message}"):
        Plateau(**{"metric": "loss", **options})


def test_a_metric_must_be_a_number() -> None:
    with pytest.raises(ConfigError, match="the metric must be a number or None, got 'low'"):
        Plateau(lambda ctx: "low")(Context())
