"""The mapping that users read: what it says, what it refuses, and the handles on its values."""

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, assert_type

import pytest
import torch
from expect import refuses

from syncstate import At, Context, Every, Once, SharedState, SyncEngine, TensorSpec
from syncstate.definition import MISSING
from syncstate.errors import NotReady, SyncStateError
from syncstate.handle import Shared
from syncstate.record import Info


def one(ctx: Context) -> float:
    """One."""
    return 1.0


class Doubles:
    """A source that is an object."""

    def compute(self, ctx: Context) -> int:
        return 2 * ctx.step

    def apply(self, value: int, ctx: Context) -> None:
        pass


class NoSource:
    compute = 5


# Reading


def test_a_value_without_a_first_sync_says_when_it_comes_and_how_to_have_one_earlier() -> None:
    state = SharedState()
    state.add("seed", one, every=Every(epochs=2))
    state.add("rest", one)
    with pytest.raises(NotReady) as error:
        state["seed"]
    assert str(error.value) == (
        "value 'seed' has no value yet: it is computed every 2 epochs, and no sync has reached it. Start the engine "
        "before reading it, or give state.add('seed', ..., initial=...) a value to hold until then"
    )
    with pytest.raises(NotReady, match="it is computed by the engine's schedule, and no sync has reached it"):
        state["rest"]


def test_reading_too_early_is_a_key_error_so_that_mappings_work_as_usual() -> None:
    state = SharedState({"x": one})
    assert issubclass(NotReady, KeyError)
    assert issubclass(NotReady, SyncStateError)
    assert state.get("x", "default") == "default"
    with pytest.raises(KeyError):
        state["x"]


def test_an_unknown_name_is_a_key_error_that_lists_the_names() -> None:
    state = SharedState({"a": one, "b": one})
    asks: list[Callable[[], object]] = [
        lambda: state["c"],
        lambda: state.info("c"),
        lambda: state.observe("c", 1.0),
        lambda: state.observed("c"),
    ]
    for ask in asks:
        with pytest.raises(KeyError, match="no shared value 'c'; there are a, b") as error:
            ask()
        assert not isinstance(error.value, NotReady)
    with pytest.raises(KeyError, match="no shared value 'c'; there are none"):
        SharedState()["c"]


def test_the_mapping_knows_the_values_that_are_ready_and_names_knows_all() -> None:
    state = SharedState()
    state.add("late", one)
    state.add("b", one, initial=2)
    state.add("a", one, initial=None)
    assert state.names == ("late", "b", "a")
    assert list(state) == ["b", "a"]
    assert len(state) == 2
    assert ("late" in state, "a" in state, "unknown" in state) == (False, True, False)
    assert dict(state) == {"b": 2, "a": None}


def test_initial_none_is_a_value() -> None:
    state = SharedState()
    state.add("x", one, initial=None)
    assert state["x"] is None


def test_a_state_cannot_be_written() -> None:
    state = SharedState()
    state.add("x", one, initial=1)
    with pytest.raises(TypeError):
        state["x"] = 2  # type: ignore[index]
    with pytest.raises(TypeError):
        del state["x"]  # type: ignore[attr-defined]


def test_a_state_and_its_handles_describe_themselves_without_their_values() -> None:
    state = SharedState()
    late = state.add("late", one)
    secret = state.add("secret", one, initial="hunter2")
    assert repr(state) == "SharedState(late: not ready, secret: initial value)"
    assert repr(late) == "Shared('late', not ready)"
    assert repr(secret) == "Shared('secret', initial value)"


# Handles


def test_a_handle_is_the_value_the_info_and_still_the_function() -> None:
    state = SharedState()

    @state.shared(every=Every(steps=100), initial=0.2)
    def threshold(ctx: Context) -> float:
        """How hard."""
        return min(1.0, 0.2 + ctx.step / 10_000)

    assert_type(threshold, Shared[float])
    assert_type(threshold.value, float)
    assert_type(threshold(Context(step=1)), float)
    assert (threshold.name, threshold.__doc__) == ("threshold", "How hard.")
    assert threshold.value == state["threshold"] == 0.2
    assert threshold(Context(step=1000)) == pytest.approx(0.3)
    assert threshold.info == state.info("threshold") == Info(version=0, computed_at=None, applied_at=None, nbytes=0)


def test_a_handle_of_an_object_calls_its_compute() -> None:
    source = Doubles()
    handle = SharedState().add("x", source)
    assert handle.source is source
    assert handle(Context(step=4)) == 8


def test_the_decorator_takes_a_name() -> None:
    state = SharedState()
    handle = state.shared("other", initial=1)(one)
    assert state.names == ("other",)
    assert handle.name == "other"


def test_the_decorator_needs_its_parentheses() -> None:
    with refuses("write @state.shared() with parentheses"):
        SharedState().shared(one)  # type: ignore[arg-type]


def test_a_handle_follows_the_syncs() -> None:
    state = SharedState()
    handle = state.add("x", Doubles(), every=Every(steps=2))
    with SyncEngine(state) as engine:
        engine.start(0)
        assert (handle.value, handle.info[:3]) == (0, (1, 0, 0))
        for step in (1, 2, 3):
            engine.step(step)
        assert (handle.value, handle.info[:3]) == (4, (2, 2, 2))
        assert handle.info.nbytes > 0
        assert repr(handle) == "Shared('x', version 2 of step 2)"


# Adding


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 10}, "value 'x': every must be Every(...), At([...]) or Once(), got 10"),
        (
            {"collect": 3},
            "value 'x': collect must be a callable collect(ctx) or the word 'observed', got 3",
        ),
        (
            {"reduce": "median"},
            "value 'x': reduce must be one of list, mean, sum, min, max, any, all, got 'median'",
        ),
        ({"deliver": "all"}, "value 'x': deliver must be 'broadcast' or 'scatter', got 'all'"),
        ({"device": "gpu7"}, "value 'x': device must be a device such as 'cuda' or 'cpu', got 'gpu7'"),
        ({"async_op": 1}, "value 'x': async_op must be true, false or None, got 1"),
        ({"lag": -1}, "value 'x': lag must be a whole number of at least 0, got -1"),
        ({"lag": False}, "value 'x': lag must be a whole number of at least 0, got False"),
        ({"scope": "rack"}, "value 'x': scope must be 'world' or 'node', got 'rack'"),
        (
            {"async_op": True, "lag": 0},
            "value 'x': lag must be at least 1 with async_op=True, got 0: an asynchronous value cannot be in force in "
            "the step that computes it; give async_op=False or a larger lag",
        ),
        (
            {"async_op": True, "lag": 1, "collect": one},
            "value 'x': lag must be at least 2 for an asynchronous value that collects, got 1: what the ranks send is "
            "computed with one step later",
        ),
        (
            {"async_op": True, "every": Every(epochs=1)},
            "value 'x': async_op=True with every 1 epochs: an epoch's value would reach the samplers late, and a value "
            "that is computed once is waited for; give async_op=False",
        ),
        (
            {"async_op": True, "every": Once()},
            "value 'x': async_op=True with once: an epoch's value would reach the samplers late, and a value that is "
            "computed once is waited for; give async_op=False",
        ),
        ({"apply": 1}, "value 'x': apply must be a callable apply(value, ctx), got 1"),
        ({"spec": "float"}, "value 'x': spec must be a TensorSpec or a type such as float, got 'float'"),
        ({"checkpoint": 1}, "value 'x': checkpoint must be true or false, got 1"),
        (
            {"timeout": 0},
            "value 'x': timeout must be a finite number of seconds above 0 or a timedelta, got 0",
        ),
        (
            {"timeout": timedelta(seconds=-1)},
            "value 'x': timeout must be a finite number of seconds above 0 or a timedelta, got "
            "datetime.timedelta(days=-1, seconds=86399)",
        ),
        (
            {"timeout": float("nan")},
            "value 'x': timeout must be a finite number of seconds above 0 or a timedelta, got nan",
        ),
        (
            {"timeout": "10"},
            "value 'x': timeout must be a finite number of seconds above 0 or a timedelta, got '10'",
        ),
    ],
)
def test_add_refuses_and_leaves_the_state_as_it_was(options: dict[str, Any], message: str) -> None:
    state = SharedState()
    with refuses(message):
        state.add("x", one, **options)
    assert state.names == ()
    state.add("x", one)


@pytest.mark.parametrize("source", [5, None, "one", NoSource(), Doubles])
def test_a_source_is_a_callable_or_an_object_with_compute(source: Any) -> None:
    with refuses(f"value 'x': the source must be a callable or an object with compute(ctx), got {source!r}"):
        SharedState().add("x", source)


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_name_is_a_text(name: Any) -> None:
    with refuses(f"a shared value needs a non-empty name, got {name!r}"):
        SharedState().add(name, one)


def test_a_name_is_taken_once() -> None:
    state = SharedState({"x": one})
    with refuses("value 'x' is already in this state; names must differ"):
        state.add("x", one)


def test_one_apply_is_never_dropped_for_another() -> None:
    with refuses("value 'x': the source has an apply(value, ctx) of its own; leave out apply= or the source's"):
        SharedState().add("x", Doubles(), apply=lambda value, ctx: None)


def test_nothing_is_added_while_an_engine_runs() -> None:
    state = SharedState({"x": one})
    with SyncEngine(state) as engine:
        state.add("y", one)
        engine.start()
        with refuses("value 'z': an engine that uses this state has started; add values before"):
            state.add("z", one)
    state.add("z", one)


def test_what_is_the_default_may_be_said() -> None:
    state = SharedState()
    state.add(
        "x", one, every=At([0]), collect=None, reduce="list", deliver="broadcast", apply=None, device=None,
        spec=TensorSpec((), torch.float32), async_op=False, lag=0, scope="world", timeout=timedelta(minutes=1),
        checkpoint=False,
    )  # fmt: skip
    assert state.definition("x").transport.timeout == 60.0


def test_missing_is_one_object_also_after_pickling() -> None:
    assert pickle.loads(pickle.dumps(MISSING)) is MISSING
    assert repr(MISSING) == "MISSING"
