"""What a checkpoint holds, and that a run which goes on from it equals the run that was never interrupted."""

import io
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact import identical
from expect import refuses
from ranks import returned, run_ranks
from test_codec import VALUES

from syncstate import At, Context, Every, Once, SharedState, SyncEngine
from syncstate.errors import ComputeError, ConfigError, NotReady

EPOCH_STEPS = 5
NEVER = Every(steps=1 << 40, start=1 << 40)

Point = tuple[int, int]


def points(first: Point, last: int) -> list[Point]:
    """The calls of a loop of epochs of five steps after a point: each step, and once more when the epoch turns."""
    calls = []
    for epoch in range(last // EPOCH_STEPS + 1):
        calls += [(epoch * EPOCH_STEPS, epoch)]
        calls += [(epoch * EPOCH_STEPS + i, epoch) for i in range(1, EPOCH_STEPS + 1)]
    return [call for call in calls if call > first and call[0] <= last]


class Walk:
    """A source with a state of its own: what it returns depends on all its computations so far."""

    def __init__(self) -> None:
        self.position = 0

    def compute(self, ctx: Context) -> int:
        self.position += ctx.step + 1
        return self.position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "trail": torch.tensor([self.position])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["trail"], torch.tensor([state["position"]]))
        self.position = state["position"]


def drawn(ctx: Context) -> list[Any]:
    return [ctx.step, ctx.epoch, ctx.rng.random(), ctx.previous and ctx.previous[2]]


def running(ctx: Context) -> torch.Tensor:
    """A tensor above the frame that is made from the one before."""
    noise = torch.from_numpy(ctx.rng.standard_normal(3000))
    return noise if ctx.previous is None else ctx.previous / 2 + noise


def rich_state() -> SharedState:
    state = SharedState()
    state.add("drawn", drawn, every=Every(steps=3))
    state.add("running", running, every=Every(steps=4, start=2))
    state.add("epoch", drawn, every=Every(epochs=1))
    state.add("once", drawn, every=Once())
    state.add("at", drawn, every=At([4, 11, 12]), initial=None)
    state.add("late", drawn, every=Every(steps=50, start=13))
    state.add("walk", Walk(), every=Every(steps=2))
    return state


def trace(engine: SyncEngine, calls: list[Point]) -> list[Any]:
    """What the engine returns and holds at each call."""
    found = []
    for step, epoch in calls:
        came = engine.step(step, epoch)
        values = {name: value.tolist() if name == "running" else value for name, value in engine.state.items()}
        found.append([came, values, [engine.state.info(name)[:3] for name in engine.state.names]])
    return found


def unbroken_and_resumed(rank: int, folder: str, stops: list[Point]) -> list[bool]:
    """Whether a run that was saved at each of the points, by main to a file, goes on as the unbroken one."""
    equal = []
    last = 17
    with SyncEngine(rich_state(), seed=5) as engine:
        whole = trace(engine, points((-1, -1), last))
    for step, epoch in stops:
        before, after = points((-1, -1), step), points((step, epoch), last)
        before = [call for call in before if call <= (step, epoch)]
        path = Path(folder, f"{step}-{epoch}.pt")
        with SyncEngine(rich_state(), seed=5) as engine:
            trace(engine, before)
            if rank == 0:
                torch.save({"engine": engine.state_dict()}, path)
        with SyncEngine(rich_state(), seed=5) as engine:
            content = on_every_rank(path)["engine"]
            engine.load_state_dict(content)
            assert engine.start(step, epoch) == ()
            equal.append(identical(trace(engine, after), whole[len(before) :]))
    return equal


def on_every_rank(path: Path) -> dict[str, Any]:
    torch.distributed.barrier()
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


def test_a_resumed_run_equals_the_unbroken_one(tmp_path: Path) -> None:
    stops = [(0, 0), (3, 0), (5, 0), (5, 1), (11, 2), (12, 2), (16, 3)]
    assert returned(run_ranks(unbroken_and_resumed, 2, str(tmp_path), stops)) == [[True] * 7] * 2


def resumed_elsewhere(rank: int, content: dict[str, Any] | None, calls: list[Point]) -> list[Any]:
    engine = SyncEngine(rich_state(), seed=5)
    if content is not None:
        engine.load_state_dict(content)
    found = trace(engine, calls)
    engine.close()
    return found


def test_a_run_goes_on_with_another_number_of_ranks() -> None:
    whole = resumed_elsewhere(0, None, points((-1, -1), 17))
    before, after = points((-1, -1), 9), points((9, 1), 17)
    with SyncEngine(rich_state(), seed=5) as engine:
        trace(engine, before)
        content = engine.state_dict()
    for outcome in returned(run_ranks(resumed_elsewhere, 3, content, after)):
        assert identical(outcome, whole[len(before) :])


# What is in it


def made_by(make: Callable[[], Any]) -> Callable[[Context], Any]:
    return lambda ctx: make()


def through_a_file(content: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def test_every_kind_of_value_survives_a_file_of_weights_only() -> None:
    kinds = {name: make for name, make in VALUES.items() if name != "numpy scalars"}
    state = SharedState()
    for name, make in kinds.items():
        state.add(name, made_by(make))
    with SyncEngine(state) as engine:
        engine.start()
        content = through_a_file(engine.state_dict())
    again = SharedState()
    for name in kinds:
        again.add(name, lambda ctx: pytest.fail("computed instead of restored"))
    with SyncEngine(again) as engine:
        engine.load_state_dict(content)
        assert engine.start() == ()
        assert [name for name, make in kinds.items() if not identical(again[name], make())] == []
        assert [again.info(name) for name in kinds] == [state.info(name) for name in kinds]


def test_a_checkpoint_is_not_changed_by_the_run_that_made_it() -> None:
    with SyncEngine(rich_state()) as engine:
        trace(engine, points((-1, -1), 6))
        content = engine.state_dict()
        copy = through_a_file(content)
        trace(engine, points((6, 1), 12))
        assert identical(content, copy)
        assert not identical(content, engine.state_dict())


def test_saving_and_loading_compute_and_communicate_nothing() -> None:
    def explode(ctx: Context) -> int:
        raise AssertionError("computed")

    # The other ranks are not there: whatever communicates here fails.
    state = SharedState()
    state.add("x", explode, initial=3)
    engine = SyncEngine(state)
    content = engine.state_dict()
    assert content == {"version": 1, "seen": [-1, -1], "values": {}, "flights": [], "sources": {}}
    engine.load_state_dict(content)
    assert engine.state_dict() == content
    assert engine.seen == (-1, -1)


def test_an_engine_that_loaded_and_did_not_start_saves_what_it_loaded() -> None:
    with SyncEngine(rich_state()) as engine:
        trace(engine, points((-1, -1), 6))
        content = engine.state_dict()
    second = SyncEngine(rich_state())
    second.load_state_dict(content)
    assert identical(second.state_dict(), content)
    assert second.seen == (6, 1)


def test_values_without_checkpoint_are_not_in_it_and_are_computed_at_the_start() -> None:
    def state_of(log: list[str]) -> SharedState:
        state = SharedState()
        for name, every in (
            ("a", Every(steps=10)),
            ("b", Every(epochs=2)),
            ("c", Once()),
            ("d", Every(steps=9, start=50)),
        ):
            state.add(name, lambda ctx, name=name: log.append(name) or ctx.step, every=every, checkpoint=False)  # type: ignore[func-returns-value]
        state.add("kept", lambda ctx: ctx.step, every=Every(steps=10))
        return state

    with SyncEngine(state_of([])) as engine:
        engine.start()
        engine.step(13, 1)
        content = engine.state_dict()
    assert list(content["values"]) == ["kept"]
    log: list[str] = []
    state = state_of(log)
    with SyncEngine(state) as engine:
        engine.load_state_dict(content)
        assert engine.start(13, 1) == ("a", "b", "c")
        assert log == ["a", "b", "c"]
        assert dict(state) == {"a": 13, "b": 13, "c": 13, "kept": 10 + 3}
        assert [state.info(name).version for name in ("a", "b", "c", "kept")] == [1, 1, 1, 2]


def test_once_is_restored_but_without_checkpoint_it_is_computed_at_every_start() -> None:
    runs: list[str] = []

    def state_of() -> SharedState:
        state = SharedState()
        state.add("kept", lambda ctx: runs.append("kept") or len(runs), every=Once())  # type: ignore[func-returns-value]
        state.add("anew", lambda ctx: runs.append("anew") or len(runs), every=Once(), checkpoint=False)  # type: ignore[func-returns-value]
        return state

    engine = SyncEngine(state_of())
    engine.start()
    content = engine.state_dict()
    engine.close()
    assert runs == ["anew", "kept"]
    engine.start(5)
    assert runs == ["anew", "kept", "anew"]
    engine.close()
    resumed = SyncEngine(state_of())
    resumed.load_state_dict(content)
    assert resumed.start(9) == ("anew",)
    assert runs == ["anew", "kept", "anew", "anew"]
    assert dict(resumed.state) == {"kept": 2, "anew": 4}
    resumed.close()


# Restoring


def test_a_checkpoint_can_be_loaded_inside_the_with_block_and_until_the_first_sync() -> None:
    with SyncEngine(rich_state()) as engine:
        trace(engine, points((-1, -1), 6))
        content = engine.state_dict()
        with refuses("load_state_dict: the engine has started; load before the first sync"):
            engine.load_state_dict(content)
    with SyncEngine(rich_state()) as engine:
        engine.open()
        assert dict(engine.state) == {"at": None}
        engine.load_state_dict(content)
        assert dict(engine.state) == {"at": None}
        assert engine.step(7) == ()
        assert engine.seen == (7, 1)
        assert engine.state["drawn"][:2] == [6, 1]


def test_a_first_step_without_an_epoch_keeps_the_one_of_the_checkpoint() -> None:
    state = SharedState()
    state.add("x", lambda ctx: [ctx.step, ctx.epoch], every=Every(epochs=1))
    with SyncEngine(state) as engine:
        engine.start(10, 3)
        content = engine.state_dict()
    again = SharedState()
    again.add("x", lambda ctx: [ctx.step, ctx.epoch], every=Every(epochs=1))
    with SyncEngine(again) as engine:
        engine.load_state_dict(content)
        assert engine.step(12) == ()
        assert engine.seen == (12, 3)
        assert engine.step(13, 4) == ("x",)


def test_a_start_beyond_the_checkpoint_serves_the_points_between_and_one_before_it_only_its_own() -> None:
    def resumed(step: int) -> tuple[str, ...]:
        engine = SyncEngine(state_of())
        engine.load_state_dict(content)
        came = engine.start(step)
        engine.close()
        return came

    def state_of() -> SharedState:
        state = SharedState()
        state.add("x", lambda ctx: ctx.step, every=Every(steps=10))
        return state

    with SyncEngine(state_of()) as engine:
        engine.start(20)
        engine.step(23)
        content = engine.state_dict()
    assert {step: resumed(step) for step in (0, 3, 10, 20, 23, 29, 30, 57)} == {
        0: ("x",), 3: (), 10: ("x",), 20: ("x",), 23: (), 29: (), 30: ("x",), 57: ("x",)
    }  # fmt: skip


def test_unknown_names_are_named_in_a_warning_and_missing_ones_are_computed(caplog: pytest.LogCaptureFixture) -> None:
    old = SharedState({name: lambda ctx: ctx.step for name in ("gone", "also gone", "stays")})
    with SyncEngine(old) as engine:
        engine.start(7)
        content = engine.state_dict()
    new = SharedState({name: lambda ctx: -ctx.step for name in ("stays", "added")})
    with SyncEngine(new) as engine:
        engine.load_state_dict(content)
        assert engine.start(7) == ("added",)
        assert dict(new) == {"stays": 7, "added": -7}
    assert [record.getMessage() for record in caplog.records] == [
        "the checkpoint has values that this run does not: also gone, gone"
    ]


def test_apply_runs_for_restored_values_too() -> None:
    applied: list[Any] = []

    def state_of() -> SharedState:
        state = SharedState()
        state.add("x", lambda ctx: ctx.step, apply=lambda value, ctx: applied.append((value, ctx.step)))
        return state

    with SyncEngine(state_of()) as engine:
        engine.start(3)
        engine.step(5)
        content = engine.state_dict()
    with SyncEngine(state_of()) as engine:
        engine.load_state_dict(content)
        assert applied == [(3, 3)]
        engine.start(9)
    assert applied == [(3, 3), (3, 5)]


def test_loading_into_an_engine_that_has_run_before_forgets_what_came_later() -> None:
    def run(engine: SyncEngine, first: int, last: int) -> list[Any]:
        found = []
        for step in range(first, last):
            engine.step(step)
            found.append(dict(engine.state))
        return found

    def state_of() -> SharedState:
        state = SharedState()
        state.add("x", drawn, every=Every(steps=3))
        state.add("late", drawn, every=Every(steps=4, start=8), initial=0)
        state.add("not ready", drawn, every=Every(steps=4, start=9))
        state.add("recomputed", lambda ctx: ctx.step, every=Every(steps=100), checkpoint=False)
        return state

    engine = SyncEngine(state_of())
    run(engine, 0, 6)
    content = engine.state_dict()
    expected = run(engine, 6, 20)
    engine.close()
    engine.load_state_dict(content)
    assert engine.start(5) == ("recomputed",)
    assert list(engine.state) == ["x", "late", "recomputed"]
    again = run(engine, 6, 20)
    engine.close()
    assert [values["recomputed"] for values in again] == [5] * 14
    for values in (*expected, *again):
        del values["recomputed"]
    assert again == expected


def test_a_second_start_keeps_values_and_versions_and_goes_on_by_schedule() -> None:
    state = SharedState()
    state.add("x", lambda ctx: ctx.step, every=Every(steps=10))
    state.add("epoch", lambda ctx: ctx.epoch, every=Every(epochs=1))
    engine = SyncEngine(state)
    for first, epoch, came in ((0, 0, ("epoch", "x")), (10, 1, ()), (10, 1, ()), (25, 1, ("x",)), (5, 0, ("epoch",))):
        assert engine.start(first, epoch) == came
        if first == 0:
            assert engine.step(10, 1) == ("epoch", "x")
        engine.close()
    assert (state["x"], state["epoch"]) == (25, 0)
    assert [state.info(name).version for name in ("x", "epoch")] == [3, 3]


def test_a_failed_sync_consumes_no_random_numbers() -> None:
    def drawn_values(failing: set[int]) -> list[float]:
        values: list[float] = []

        def compute(ctx: Context) -> float:
            number = float(ctx.rng.random())
            if ctx.step in failing:
                raise ValueError
            return number

        state = SharedState({"x": compute})
        with SyncEngine(state, every=Every(steps=1), seed=3) as engine:
            for step in range(6):
                try:
                    engine.step(step)
                except ComputeError:
                    continue
                values.append(state["x"])
        return values

    assert drawn_values({0, 2, 3}) == drawn_values(set())[:3]


# What cannot be restored


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "load_state_dict: this is no state of a SyncEngine, got NoneType"),
        ({}, "load_state_dict: this is no state of a SyncEngine, got dict"),
        ({"version": 1, "seen": [0, 0], "values": {}}, "load_state_dict: this is no state of a SyncEngine, got dict"),
        (
            {"version": 2, "seen": [0, 0], "values": {}, "sources": {}},
            "load_state_dict: the state has version 2, this syncstate reads version 1",
        ),
    ],
)
def test_what_is_no_checkpoint_is_refused_when_it_is_loaded(content: Any, message: str) -> None:
    with refuses(message):
        SyncEngine().load_state_dict(content)


DAMAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "seen": lambda content: content.update(seen=[1]),
    "seen of text": lambda content: content.update(seen=["a", "b"]),
    "values": lambda content: content.update(values=[]),
    "a value": lambda content: content["values"].update(x=None),
    "a part of a value": lambda content: content["values"]["x"].pop("version"),
    "data": lambda content: content["values"]["x"].update(data=b"bytes"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_checkpoint_is_refused_when_it_is_loaded(what: str) -> None:
    with SyncEngine(SharedState({"x": lambda ctx: 1})) as engine:
        engine.start()
        content = engine.state_dict()
    DAMAGE[what](content)
    with pytest.raises(ConfigError, match=r"^load_state_dict: "):
        SyncEngine().load_state_dict(content)


def test_bytes_that_are_no_value_are_refused_with_the_values_name() -> None:
    with SyncEngine(SharedState({"x": lambda ctx: 1})) as engine:
        engine.start()
        content = engine.state_dict()
    content["values"]["x"]["data"] = content["values"]["x"]["data"][:-1]
    second = SyncEngine(SharedState({"x": lambda ctx: 2}))
    second.load_state_dict(content)
    with pytest.raises(ConfigError, match=r"^load_state_dict: value 'x' cannot be read: cannot decode"):
        second.start()
    with pytest.raises(NotReady):
        second.state["x"]


# Ranks that loaded different things


def partly_restored(rank: int, loads: list[str | None]) -> list[Any]:
    """Each rank loads the checkpoint that the list names for it, or none; then all start and step on."""
    warnings: list[str] = []
    logging.getLogger("syncstate").addHandler(Keep(warnings))

    def saved(offset: int) -> dict[str, Any]:
        state = SharedState()
        state.add("x", lambda ctx: ctx.step + offset)
        state.add("big", lambda ctx: torch.full((5000,), offset))
        with SyncEngine(state) as engine:
            engine.start(2)
            engine.step(3, 1)
            return engine.state_dict()

    contents = {"A": saved(10), "B": saved(20)}
    state = SharedState()
    state.add("x", lambda ctx: -1)
    state.add("big", lambda ctx: torch.zeros(2))
    load = loads[rank]
    with SyncEngine(state) as engine:
        if load is not None:
            engine.load_state_dict(contents[load])
        came = engine.start(3, 1)
        held = [state["x"], int(state["big"].sum()), state.info("x")[:3], engine.seen]
        engine.step(100)
        return [came, held, state["x"], warnings]


class Keep(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__()
        self.messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.mark.parametrize(
    ("loads", "taken"),
    [
        ([None, "A", "B"], "A"),
        (["B", None, None], "B"),
        ([None, None, "B"], "B"),
        (["B", "A", "A"], "B"),
        (["A", "A", "A"], None),
    ],
)
def test_all_take_the_checkpoint_of_the_lowest_rank_that_loaded_one(loads: list[str | None], taken: str | None) -> None:
    outcomes = returned(run_ranks(partly_restored, 3, loads))
    offset = {"A": 10, "B": 20}[taken or "A"]
    assert [outcome[:3] for outcome in outcomes] == [[(), [2 + offset, 5000 * offset, (1, 2, 2), (3, 1)], -1]] * 3
    messages = [outcome[3] for outcome in outcomes]
    if taken is None:
        assert messages == [[], [], []]
    else:
        lowest = next(rank for rank, load in enumerate(loads) if load is not None)
        for (message,) in messages:
            assert message.startswith("start: the ranks loaded different checkpoints (")
            assert message.endswith(f"; all take that of rank {lowest}")


def sources_elsewhere(rank: int) -> list[Any]:
    """The state of a source lives on main, here rank 1, and goes on there."""
    results = []
    content = None
    for first in (0, 4):
        walk = Walk()
        state = SharedState()
        state.add("walk", walk, every=Every(steps=1))
        with SyncEngine(state, main=1) as engine:
            if content is not None:
                engine.load_state_dict(content)
            for step in range(first, first + 4):
                engine.step(step)
            content = engine.state_dict()
            results.append([state["walk"], walk.position, sorted(content["sources"])])
    return results


def test_the_state_of_a_source_is_on_main_alone() -> None:
    assert returned(run_ranks(sources_elsewhere, 2)) == [
        [[10, 0, []], [36, 0, []]],
        [[10, 10, ["walk"]], [36, 36, ["walk"]]],
    ]


# Global generators


def test_a_curriculum_that_draws_goes_on_with_the_same_draws_and_leaves_the_global_generators_alone() -> None:
    """The draws of a sampler that was saved at its fourth, loaded anew, are those of the run that went on."""

    def sampler(ctx: Context) -> list[float]:
        random.random(), np.random.rand(), torch.rand(1)  # draws that must not be seen from outside
        return [float(number) for number in ctx.rng.random(5)]

    def draws(engine: SyncEngine, first: int, last: int) -> list[list[float]]:
        found = []
        for step in range(first, last):
            engine.step(step)
            found.append(engine.state["x"])
        return found

    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    before = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    with SyncEngine(SharedState({"x": sampler}), every=Every(steps=1)) as engine:
        draws(engine, 0, 4)
        content = engine.state_dict()
        expected = draws(engine, 4, 10)
    with SyncEngine(SharedState({"x": sampler}), every=Every(steps=1)) as engine:
        engine.load_state_dict(content)
        assert draws(engine, 4, 10) == expected
    assert random.getstate() == before[0]
    np.testing.assert_equal(np.random.get_state(legacy=False), before[1])
    assert torch.equal(torch.get_rng_state(), before[2])


class Unreadable:
    """A source whose own state cannot be read the first time."""

    tries = 0

    def compute(self, ctx: Context) -> int:
        return ctx.step

    def state_dict(self) -> dict[str, int]:
        return {"any": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.tries += 1
        if self.tries == 1:
            raise OSError("disk gone")


def test_a_checkpoint_is_not_forgotten_by_a_start_that_failed() -> None:
    with SyncEngine(SharedState({"x": Unreadable()}), every=Every(steps=50)) as engine:
        engine.start()
        engine.step(50)
        content = engine.state_dict()
    resumed = SyncEngine(SharedState({"x": Unreadable()}), every=Every(steps=50))
    resumed.load_state_dict(content)
    with pytest.raises(OSError, match="disk gone"):
        resumed.start(60)
    assert resumed.start(60) == ()
    assert (resumed.state["x"], resumed.state.info("x").version) == (50, 2)
    resumed.close()
