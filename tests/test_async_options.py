"""What a value says of its transport, what it takes from the engine, and which of it goes together."""

import re
from typing import Any

import pytest
import torch
from expect import refuses
from ranks import returned, run_ranks

from syncstate import At, Context, Every, Once, SharedState, SyncEngine
from syncstate.errors import ConfigError, SyncStateError
from syncstate.schedule import Schedule

PATIENCE = 300.0
EACH = Every(steps=1)
EPOCH = Every(epochs=1)


def step_of(ctx: Context) -> int:
    return ctx.step


def started(engine: dict[str, Any], value: dict[str, Any]) -> None:
    state = SharedState()
    state.add("x", step_of, **value)
    with SyncEngine(state, **engine) as running:
        running.start()


# What cannot be


@pytest.mark.parametrize("every", [EPOCH, Once()], ids=str)
def test_a_value_of_an_epoch_or_of_once_cannot_say_that_it_is_asynchronous(every: Schedule) -> None:
    with refuses(
        f"value 'x': async_op=True with {every}: an epoch's value would reach the samplers late, and a value that is "
        "computed once is waited for; give async_op=False"
    ):
        SharedState().add("x", step_of, every=every, async_op=True)


@pytest.mark.parametrize("every", [EPOCH, Once()], ids=str)
def test_nor_may_it_take_such_a_schedule_from_the_engine(every: Schedule) -> None:
    with refuses(
        "value 'x': async_op=True and no schedule of its own, and the engine's counts epochs or is Once(); give the "
        "value every=Every(steps=...) or async_op=False"
    ):
        started({"every": every}, {"async_op": True})


def test_no_lag_is_impossible_for_what_is_asynchronous_wherever_that_is_said() -> None:
    text = (
        ": lag must be at least 1 with async_op=True, got 0: an asynchronous value cannot be in force in the step that "
        "computes it; give async_op=False or a larger lag"
    )
    with refuses("value 'x'" + text):
        SharedState().add("x", step_of, async_op=True, lag=0)
    with refuses("engine" + text):
        SyncEngine(SharedState(), async_op=True, lag=0)
    with refuses(
        "value 'x': lag must be at least 1 for an asynchronous value, got 0; the engine is asynchronous: give the "
        "value async_op=False or a larger lag"
    ):
        started({"async_op": True, "every": EACH}, {"lag": 0})


def test_what_collects_needs_two_steps_wherever_it_is_said_to_be_asynchronous() -> None:
    with refuses(
        "value 'x': lag must be at least 2 for an asynchronous value that collects, got 1: what the ranks send is "
        "computed with one step later"
    ):
        SharedState().add("x", step_of, collect=step_of, async_op=True, lag=1)
    with refuses(
        "value 'x': lag must be at least 2 for an asynchronous value that collects, got 1; the engine is asynchronous: "
        "give the value async_op=False or a larger lag"
    ):
        started({"async_op": True, "every": EACH}, {"collect": step_of, "lag": 1})


@pytest.mark.parametrize("lag", [-1, 1.5, "2", True])
def test_a_lag_is_a_whole_number_of_steps(lag: Any) -> None:
    with refuses(f"value 'x': lag must be a whole number of at least 0, got {lag!r}"):
        SharedState().add("x", step_of, lag=lag)
    with refuses(f"engine: lag must be a whole number of at least 0, got {lag!r}"):
        SyncEngine(SharedState(), lag=lag)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"async_op": "yes"}, "async_op must be true, false or None, got 'yes'"),
        ({"async_op": 1}, "async_op must be true, false or None, got 1"),
        ({"scope": "rack"}, "scope must be 'world' or 'node', got 'rack'"),
    ],
)
def test_unknown_settings_are_refused_by_values_and_engines(options: dict[str, Any], text: str) -> None:
    with refuses(f"value 'x': {text}"):
        SharedState().add("x", step_of, **options)
    with refuses(f"engine: {text}"):
        SyncEngine(SharedState(), **options)


def refused_everywhere(rank: int) -> list[Any]:
    """All ranks have the impossible value; afterwards they start without it."""
    found = []
    for value in ({"lag": 0}, {"lag": 3}):
        try:
            started({"async_op": True, "every": EACH, "timeout": PATIENCE}, value)
            found.append("started")
        except ConfigError as error:
            found.append(str(error)[:33])
    return found


def test_an_impossible_combination_is_refused_on_every_rank_before_anything_is_sent() -> None:
    assert returned(run_ranks(refused_everywhere, 2)) == [["value 'x': lag must be at least 1", "started"]] * 2


def differing(rank: int, options: dict[str, Any]) -> list[str]:
    """Rank 1 says something else of the value."""
    try:
        started({"every": EACH, "timeout": PATIENCE}, options if rank else {})
    except SyncStateError as error:
        return [type(error).__name__, str(error)]
    return ["started"]


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"async_op": True}, "async_op"),
        ({"lag": 2}, "lag"),
        ({"collect": step_of}, "collect"),
        ({"reduce": "sum"}, "reduce"),
        ({"deliver": "scatter"}, "deliver"),
        ({"scope": "node"}, "scope"),
        ({"checkpoint": False}, "checkpoint"),
        ({"every": Every(seconds=1)}, "every"),
    ],
)
def test_ranks_that_say_different_things_of_a_value_raise_with_the_key(options: dict[str, Any], key: str) -> None:
    for kind, text in returned(run_ranks(differing, 2, options)):
        assert kind == "MismatchError"
        assert "plans of the ranks differ" in text
        assert key in text


# What holds where a value says nothing


def applied(engine: dict[str, Any], value: dict[str, Any]) -> list[Any]:
    """The steps at which a value comes into force, up to step 12, and how much was launched by then."""
    state = SharedState()
    state.add("x", lambda ctx: [ctx.step, ctx.epoch], **value)
    found = []
    with SyncEngine(state, **engine) as running:
        for step in range(13):
            for epoch in sorted({max(0, step - 1) // 4, step // 4}):
                if running.step(step, epoch):
                    found.append([step, *state["x"]])
    return found


FIVE = {"every": Every(steps=5)}
TURNS = [[0, 0, 0], [4, 4, 1], [8, 8, 2], [12, 12, 3]]


@pytest.mark.parametrize(
    ("engine", "value", "expected"),
    [
        ({}, FIVE, [[0, 0, 0], [5, 5, 1], [10, 10, 2]]),
        ({"lag": 2}, FIVE, [[0, 0, 0], [7, 5, 1], [12, 10, 2]]),
        ({"async_op": True}, FIVE, [[0, 0, 0], [6, 5, 1], [11, 10, 2]]),
        ({"async_op": True, "lag": 2}, FIVE, [[0, 0, 0], [7, 5, 1], [12, 10, 2]]),
        ({"async_op": True, "lag": 1}, {**FIVE, "lag": 2}, [[0, 0, 0], [7, 5, 1], [12, 10, 2]]),
        ({"async_op": True, "lag": 2}, {**FIVE, "async_op": False}, [[0, 0, 0], [7, 5, 1], [12, 10, 2]]),
        ({"async_op": True, "lag": 2}, {**FIVE, "async_op": False, "lag": 0}, [[0, 0, 0], [5, 5, 1], [10, 10, 2]]),
        ({"lag": 0}, {**FIVE, "async_op": True}, [[0, 0, 0], [6, 5, 1], [11, 10, 2]]),
        ({"async_op": True}, {**FIVE, "collect": step_of}, [[0, 0, 0], [7, 5, 1], [12, 10, 2]]),
        ({"async_op": True, "lag": 1}, {**FIVE, "collect": step_of}, [[0, 0, 0], [7, 5, 1], [12, 10, 2]]),
        ({"async_op": True, "lag": 1}, {**FIVE, "collect": "observed"}, [[0, 0, 0], [7, 5, 1], [12, 10, 2]]),
        ({"lag": 2}, {**FIVE, "collect": step_of}, [[0, 0, 0], [7, 5, 1], [12, 10, 2]]),
        ({"async_op": True, "lag": 2}, {"every": EPOCH}, TURNS),
        ({"lag": 2}, {"every": EPOCH}, TURNS),
        ({"async_op": True, "lag": 2, "every": EPOCH}, {}, TURNS),
        ({"async_op": True}, {"every": EPOCH, "collect": step_of}, TURNS),
        ({"async_op": True, "lag": 2}, {"every": Once()}, [[0, 0, 0]]),
        ({"async_op": True}, {"every": At([2, 3, 11])}, [[3, 2, 0], [4, 3, 0], [12, 11, 2]]),
    ],
    ids=lambda given: re.sub(r"<function (\w+) at \w+>", r"\1", str(given)),
)
def test_a_value_takes_from_the_engine_what_can_hold_for_it(
    engine: dict[str, Any], value: dict[str, Any], expected: list[Any]
) -> None:
    if isinstance(value.get("every"), At):
        expected = [[2, 2, 0], *expected[1:]]  # the first is in force at once
    assert applied(engine, value) == expected


# Devices


def nested(ctx: Context) -> dict[str, Any]:
    return {"a": [torch.full((2, 3), ctx.step), (torch.ones(1, dtype=torch.bfloat16), "text")], "b": {"c": ctx.step}}


def places(rank: int, options: dict[str, Any]) -> list[Any]:
    """Where the tensors of values are, as the state holds them and as `apply` gets them."""
    seen: list[str] = []
    state = SharedState()
    state.add("nested", nested, device="meta", apply=lambda value, ctx: seen.append(value["a"][0].device.type))
    state.add("plain", lambda ctx: torch.zeros(3), device=torch.device("meta"))
    state.add("large", lambda ctx: torch.zeros(20_000), device="meta")
    state.add("items", lambda ctx: [torch.zeros(peer + 1) for peer in range(2)], deliver="scatter", device="meta")
    state.add("here", nested)
    state.add("none", step_of, device="meta")
    with SyncEngine(state, every=EACH, timeout=PATIENCE, **options) as engine:
        for step in range(5):
            engine.step(step)
        content = engine.state_dict()["values"]
    held = state["nested"]
    return [
        [held["a"][0].device.type, tuple(held["a"][0].shape), held["a"][0].dtype, type(held["a"]).__name__],
        [held["a"][1][0].device.type, held["a"][1][0].dtype, held["a"][1][1], type(held["a"][1]).__name__],
        held["b"],
        [state[name].device.type for name in ("plain", "large", "items")],
        state["items"].shape[0],
        [state["here"]["a"][0].device.type, state["here"]["a"][0].tolist()],
        state["none"],
        sorted(set(seen)),
        {value["data"].device.type for value in content.values() if "data" in value},
    ]


@pytest.mark.parametrize("options", [{}, {"async_op": True}, {"lag": 1}], ids=str)
def test_tensors_are_put_on_the_device_of_a_value_when_it_comes_into_force(options: dict[str, Any]) -> None:
    at = 3 if options else 4
    for rank, found in enumerate(returned(run_ranks(places, 2, options))):
        assert found == [
            ["meta", (2, 3), torch.int64, "list"],
            ["meta", torch.bfloat16, "text", "tuple"],
            {"c": at},
            ["meta"] * 3,
            rank + 1,
            ["cpu", [[at] * 3] * 2],
            at,
            ["meta"],
            {"cpu"},
        ]


def restored_places(rank: int) -> list[Any]:
    """A restored value is put on its device too."""
    contents: list[dict[str, Any]] = []
    for _ in range(2):
        state = SharedState()
        state.add("x", lambda ctx: [torch.zeros(2)], device="meta", every=Every(steps=10))
        with SyncEngine(state, timeout=PATIENCE) as engine:
            if contents:
                engine.load_state_dict(contents[0])
            engine.start()
            contents.append(engine.state_dict())
    return [state["x"][0].device.type, state.info("x").version]


def test_a_restored_value_is_on_its_device() -> None:
    assert returned(run_ranks(restored_places, 2)) == [["meta", 1]] * 2


def misplaced(rank: int, async_op: bool) -> list[str]:
    """A device that this process does not have, as on a rank without an accelerator."""
    state = SharedState()
    state.add("x", lambda ctx: torch.zeros(2), device=f"cuda:{97 + rank}" if rank == 1 else "cpu")
    try:
        with SyncEngine(state, every=EACH, async_op=async_op, timeout=PATIENCE) as engine:
            for step in range(5):
                engine.step(step)
    except Exception as error:
        return [type(error).__name__, str(error), " ".join(getattr(error, "__notes__", []))]
    return ["nothing", "", ""]


@pytest.mark.parametrize("async_op", [False, True])
def test_a_device_that_one_rank_lacks_is_told_to_all(async_op: bool) -> None:
    main, other = returned(run_ranks(misplaced, 2, async_op))
    assert other[0] == "ConfigError"
    assert other[1].startswith("value 'x': device='cuda:98' is not there in this process: ")
    assert main[0] == "PeerError"
    assert "start: rank 1 failed before it had started: ConfigError: value 'x': device='cuda:98' is not" in main[1]
