"""The engine's loop: what starts, what is due at which step, what a call returns, and what is refused."""

import json
import logging
import math
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from expect import refuses
from ranks import returned, run_ranks

from syncstate import At, Context, Every, Once, SharedState, SyncEngine
from syncstate.errors import ComputeError, ConfigError, MismatchError, NotReady
from syncstate.record import Info
from syncstate.schedule import Schedule
from syncstate.values import Seed


def step_of(ctx: Context) -> int:
    return ctx.step


def place_of(ctx: Context) -> list[int]:
    return [ctx.step, ctx.epoch]


def state_with(**schedules: Schedule | None) -> SharedState:
    state = SharedState()
    for name, every in schedules.items():
        state.add(name, step_of, every=every)
    return state


class Counting:
    """A source that counts its computations and fails when told to."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.fails = False

    def compute(self, ctx: Context) -> int:
        self.steps.append(ctx.step)
        if self.fails:
            raise ValueError("boom")
        return ctx.step


# Starting


def test_entering_computes_nothing_and_start_computes_what_is_due() -> None:
    source = Counting()
    state = SharedState()
    state.add("x", source, every=Every(steps=10))
    with SyncEngine(state) as engine:
        assert source.steps == []
        assert "x" not in state
        assert engine.start(step=0, epoch=0) == ("x",)
        assert source.steps == [0]
        assert state["x"] == 0


def test_the_first_step_starts_the_engine() -> None:
    state = state_with(x=Every(steps=10))
    with SyncEngine(state) as engine:
        assert engine.step(3) == ("x",)
        assert (state["x"], engine.seen) == (3, (3, 0))
        assert engine.step(9) == ()
        assert engine.step(10) == ("x",)


def test_a_start_serves_its_own_step_and_values_that_should_exist_already() -> None:
    state = state_with(
        now=Every(steps=7, start=21),
        earlier=Every(steps=10),
        over=Every(steps=10, stop=11),
        later=Every(steps=10, start=30),
        once=Once(),
        past=At([3]),
        future=At([22]),
        epoch=Every(epochs=2),
        next_epoch=Every(epochs=1, start=2),
    )
    with SyncEngine(state) as engine:
        assert engine.start(21, 1) == ("earlier", "epoch", "now", "once", "over", "past")
        assert set(state) == {"earlier", "epoch", "now", "once", "over", "past"}


def test_a_value_that_is_not_due_yet_holds_its_initial_one_or_is_not_ready() -> None:
    state = SharedState()
    state.add("with", step_of, every=Every(steps=10, start=5), initial=-1)
    state.add("without", step_of, every=Every(steps=10, start=5))
    with SyncEngine(state) as engine:
        assert engine.start() == ()
        assert (state["with"], state.info("with").version) == (-1, 0)
        with pytest.raises(NotReady, match="it is computed every 10 steps from 5"):
            state["without"]
        assert engine.step(5) == ("with", "without")
        assert dict(state) == {"with": 5, "without": 5}


def test_an_initial_value_does_not_hold_back_a_value_that_is_due_at_start() -> None:
    state = SharedState()
    state.add("x", step_of, every=Every(steps=10), initial=-1)
    with SyncEngine(state) as engine:
        assert state["x"] == -1
        assert engine.start() == ("x",)
        assert state["x"] == 0


def test_an_engine_without_values_counts_steps_and_does_nothing() -> None:
    with SyncEngine() as engine:
        assert [engine.start(), engine.step(1), engine.step(2, 1), engine.sync()] == [()] * 4
        assert engine.seen == (2, 1)
        assert engine.stats.syncs == 0


def test_values_without_a_schedule_take_the_engines() -> None:
    chosen: list[tuple[dict[str, Any], list[int]]] = [({"every": Every(steps=3)}, [0, 3, 6]), ({}, [0])]
    for options, expected in chosen:
        source = Counting()
        state = SharedState({"x": source})
        with SyncEngine(state, **options) as engine:
            for step in range(8):
                engine.step(step)
        assert source.steps == expected


# Steps


def test_a_jump_over_several_due_points_is_one_sync_with_the_current_step() -> None:
    state = state_with(x=Every(steps=10), y=At([12, 14, 90]))
    with SyncEngine(state) as engine:
        engine.start()
        assert engine.step(35) == ("x", "y")
        assert dict(state) == {"x": 35, "y": 35}
        assert state.info("x") == Info(version=2, computed_at=35, applied_at=35, nbytes=state.info("x").nbytes)
        assert engine.step(40) == ("x",)


def test_the_same_step_and_epoch_again_does_nothing() -> None:
    state = state_with(x=Every(steps=1), e=Every(epochs=1))
    with SyncEngine(state) as engine:
        assert engine.start() == ("e", "x")
        assert engine.step(0, 0) == ()
        assert engine.step(1, 0) == ("x",)
        assert engine.step(1, 0) == ()
        assert engine.step(1) == ()
        assert engine.step(1, 1) == ("e",)
        assert engine.step(1, 1) == ()


def test_no_epoch_keeps_the_last_one() -> None:
    state = SharedState()
    state.add("x", place_of, every=Every(steps=1))
    with SyncEngine(state) as engine:
        engine.start(0, 4)
        engine.step(1)
        assert state["x"] == [1, 4]
        engine.step(1, 6)
        engine.step(2)
        assert state["x"] == [2, 6]


def test_values_due_at_one_step_come_in_one_sync_and_by_name() -> None:
    state = state_with(b=Every(steps=2), a=Every(steps=3), c=Every(epochs=1))
    with SyncEngine(state) as engine:
        assert engine.start() == ("a", "b", "c")
        assert engine.stats.syncs == 1
        assert engine.step(6, 1) == ("a", "b", "c")
        assert engine.stats.syncs == 2


def test_a_smaller_step_or_epoch_is_refused_and_the_engine_goes_on() -> None:
    state = state_with(x=Every(steps=5))
    with SyncEngine(state) as engine:
        engine.start(10, 2)
        for step, epoch in ((9, 2), (10, 1), (11, 0)):
            with refuses(
                f"step({step}, {epoch}): the engine has already seen step 10 of epoch 2; "
                "steps and epochs never go back, call start(step, epoch) to begin again"
            ):
                engine.step(step, epoch)
        assert engine.step(15, 2) == ("x",)


def test_only_start_goes_back_and_then_values_and_versions_stay() -> None:
    state = state_with(x=Every(steps=10), late=Every(steps=10, start=5), once=Once())
    with SyncEngine(state) as engine:
        engine.start()
        engine.step(25)
        assert engine.start(3) == ()
        assert dict(state) == {"x": 25, "late": 25, "once": 0}
        assert [state.info(name).version for name in ("x", "late", "once")] == [2, 1, 1]
        assert engine.step(5) == ("late",)
        assert engine.step(10) == ("x",)
        assert state.info("x")[:3] == (3, 10, 10)
        assert engine.start(0) == ("x",)


def test_a_start_ahead_serves_what_was_passed_over() -> None:
    state = state_with(x=Every(steps=10))
    with SyncEngine(state) as engine:
        engine.start(10)
        assert engine.start(10) == ()
        assert engine.start(19) == ()
        assert engine.start(21) == ("x",)


@pytest.mark.parametrize("call", ["start", "step"])
@pytest.mark.parametrize("given", [-1, 2.0, math.nan, "3", None, True, [1]])
def test_steps_and_epochs_are_whole_numbers(call: str, given: Any) -> None:
    with SyncEngine(state_with(x=Every(steps=1))) as engine:
        for started in (False, True):
            if started:
                engine.start()
            name = call if started else "start"  # which the first step calls
            with refuses(f"{name}: step must be a whole number of at least 0, got {given!r}"):
                getattr(engine, call)(given, 0)
            if given is not None:
                with refuses(f"{name}: epoch must be a whole number of at least 0, got {given!r}"):
                    getattr(engine, call)(1, given)
        assert engine.step(1) == ("x",)


# Sync on demand


def test_sync_refreshes_now_and_leaves_the_schedules_alone() -> None:
    state = SharedState()
    for name in ("b", "a"):
        state.add(name, place_of, every=Every(steps=10, start=5), initial=None)
    with SyncEngine(state) as engine:
        engine.start(0, 1)
        engine.step(3)
        assert engine.sync("b") == ("b",)
        assert dict(state) == {"b": [3, 1], "a": None}
        assert state.info("b")[:3] == (1, 3, 3)
        assert engine.sync() == ("a", "b")
        assert engine.step(4) == ()
        assert engine.step(5) == ("a", "b")


def test_sync_refuses_names_it_does_not_know_and_an_engine_that_has_not_started() -> None:
    engine = SyncEngine(state_with(a=None, b=None))
    with refuses("sync: no shared value 'c'; there are a, b"):
        engine.sync("a", "c")
    for opened in (False, True):
        if opened:
            engine.open()
        with refuses("sync: the engine has not started; call start(step, epoch) first"):
            engine.sync("a")
    engine.close()
    with refuses("the engine is closed; call start(step, epoch) to begin again"):
        engine.sync("a")


# Ending


def test_a_closed_engine_says_so_and_starts_again_with_its_values() -> None:
    state = state_with(x=Every(steps=10))
    engine = SyncEngine(state)
    engine.start(10, 3)
    for _ in range(2):
        engine.close()
    with refuses("the engine is closed; call start(step, epoch) to begin again"):
        engine.step(20)
    assert state["x"] == 10
    assert engine.start(15, None) == ()
    assert engine.seen == (15, 3)
    assert engine.step(20) == ("x",)
    assert state.info("x")[:3] == (2, 20, 20)
    engine.close()


def test_closing_before_the_start_does_nothing() -> None:
    engine = SyncEngine(state_with(x=None))
    engine.close()
    engine.abort("never started")
    assert engine.start() == ("x",)
    engine.close()


def test_a_state_belongs_to_one_engine_at_a_time() -> None:
    state = state_with(x=Every(steps=1))
    taken = "another engine uses this state; close it first, or give each engine a state of its own"
    with SyncEngine(state) as first:
        first.start()
        with refuses("value 'y': an engine that uses this state has started; add values before"):
            state.add("y", step_of)
        second = SyncEngine(state)
        with refuses(taken):
            second.start()
        assert first.step(1) == ("x",)
    state.add("y", step_of)
    assert second.start(1) == ("x", "y")
    second.close()


def test_an_engine_that_ended_with_an_error_gives_the_state_back() -> None:
    state = state_with(x=None)

    def fail() -> None:
        with SyncEngine(state) as engine:
            engine.start()
            raise KeyError("from the loop")

    with pytest.raises(KeyError, match="from the loop"):
        fail()
    state.add("y", step_of)


# Failures that the engine survives


def test_a_failed_first_value_can_be_started_again() -> None:
    source = Counting()
    state = SharedState()
    state.add("x", source, every=Every(steps=10))
    state.add("y", step_of, every=Every(steps=10))
    with SyncEngine(state) as engine:
        source.fails = True
        with pytest.raises(ComputeError):
            engine.start(20)
        assert (dict(state), engine.seen) == ({}, (-1, -1))
        source.fails = False
        assert engine.start(20) == ("x", "y")
        assert state.info("x")[:3] == (1, 20, 20)


def test_a_failed_sync_keeps_the_old_values_and_tries_at_the_next_due_step() -> None:
    source = Counting()
    state = SharedState()
    state.add("x", source, every=Every(steps=10))
    state.add("y", step_of, every=Every(steps=5))
    with SyncEngine(state) as engine:
        engine.start()
        source.fails = True
        with pytest.raises(ComputeError) as error:
            engine.step(10)
        assert isinstance(error.value.__cause__, ValueError)
        assert dict(state) == {"x": 0, "y": 0}
        assert engine.step(11) == ()
        source.fails = False
        assert engine.step(15) == ("y",)
        assert engine.step(20) == ("x", "y")
        assert source.steps == [0, 10, 20]
        assert [state.info(name).version for name in ("x", "y")] == [2, 3]


def test_on_error_keep_logs_and_counts_instead_of_raising(caplog: pytest.LogCaptureFixture) -> None:
    source = Counting()
    state = SharedState()
    state.add("x", source, every=Every(steps=10), initial=-1)
    state.add("y", step_of, every=Every(steps=1))
    source.fails = True
    with SyncEngine(state, on_error="keep") as engine:
        assert engine.start() == ()
        assert dict(state) == {"x": -1}
        assert engine.step(1) == ("y",)
        source.fails = False
        assert engine.step(10) == ("x", "y")
        source.fails = True
        assert engine.sync("x") == ()
        assert state["x"] == 10
        assert (engine.stats["x"].syncs, engine.stats["x"].failed) == (1, 2)
    (first, second) = [record for record in caplog.records if record.name == "syncstate"]
    assert (first.levelno, second.levelno) == (logging.ERROR, logging.ERROR)
    assert first.getMessage().startswith(
        "the old values stay: value 'x' at step 0 on main (rank 0): ValueError: boom\n"
    )


# Counters and events


def test_stats_count_syncs_failures_and_no_collectives_alone() -> None:
    source = Counting()
    state = SharedState()
    state.add("x", source, every=Every(steps=2))
    state.add("y", step_of, every=Every(steps=4))
    with SyncEngine(state) as engine:
        for step in range(5):
            engine.step(step)
        source.fails = True
        with pytest.raises(ComputeError):
            engine.step(6)
        stats = engine.stats
        assert {name: tuple(counters) for name, counters in stats.items()} == {"x": (3, 1), "y": (2, 0)}
        assert (stats.syncs, stats.failed, stats.collectives, len(stats)) == (4, 1, 0, 2)
        assert stats.seconds > 0
        with pytest.raises(KeyError):
            stats["z"]


def test_events_go_to_a_function() -> None:
    events: list[Mapping[str, Any]] = []
    source = Counting()
    state = SharedState()
    state.add("x", source, every=Every(steps=2))
    with SyncEngine(state, events=events.append) as engine:
        engine.start()
        source.fails = True
        with pytest.raises(ComputeError):
            engine.step(2, 1)
    assert events == [
        {"event": "open", "rank": 0, "world_size": 1},
        {"event": "sync", "rank": 0, "step": 0, "epoch": 0, "names": ["x"]},
        {"event": "failed", "rank": 0, "step": 2, "epoch": 1, "names": ["x"]},
        {"event": "close", "rank": 0, "step": 2},
    ]


def test_events_go_to_a_file_as_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with SyncEngine(state_with(x=None), events=str(path)) as engine:
        engine.start()
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["open", "sync", "close"]


# Settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frame_bytes": 1000}, "engine: frame_bytes must be a whole number of at least 1024, got 1000"),
        ({"frame_bytes": 1100}, "engine: frame_bytes must be a multiple of 64, got 1100"),
        ({"frame_bytes": 2048.0}, "engine: frame_bytes must be a whole number of at least 1024, got 2048.0"),
        ({"max_bytes": 0}, "engine: max_bytes must be a whole number of at least 1, got 0"),
        ({"seed": 1.5}, "engine: seed must be a whole number, got 1.5"),
        ({"main": -1}, "engine: main must be a whole number of at least 0, got -1"),
        ({"main": True}, "engine: main must be a whole number of at least 0, got True"),
        ({"on_error": "ignore"}, "engine: on_error must be 'raise' or 'keep', got 'ignore'"),
        ({"config": [1]}, "engine: config must be a mapping, got [1]"),
        ({"every": 100}, "engine: every must be Every(...), At([...]) or Once(), got 100"),
        ({"state": {}}, "engine: state must be a SharedState, got {}"),
        ({"async_op": 1}, "engine: async_op must be true, false or None, got 1"),
        ({"lag": 1.5}, "engine: lag must be a whole number of at least 0, got 1.5"),
        (
            {"async_op": True, "lag": 0},
            "engine: lag must be at least 1 with async_op=True, got 0: an asynchronous value cannot be in force in the "
            "step that computes it; give async_op=False or a larger lag",
        ),
        ({"scope": "rack"}, "engine: scope must be 'world' or 'node', got 'rack'"),
        ({"verify_values": 1}, "engine: verify_values must be true or false, got 1"),
    ],
)
def test_impossible_settings_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with refuses(message):
        SyncEngine(**options)


@pytest.mark.parametrize("given", [0, -1.0, math.nan, math.inf, "60", True, None, timedelta(0)])
def test_a_timeout_is_a_positive_time(given: Any) -> None:
    with refuses(
        f"engine: timeout must be a finite number of seconds above 0 or a timedelta, got {given!r}",
    ):
        SyncEngine(timeout=given)


def test_bad_events_groups_and_main_processes_are_refused_at_start() -> None:
    for options in ({"events": 3}, {"main": 1}, {"group": "all"}, {"group": "single", "main": 1}):
        state = state_with(x=None)
        engine = SyncEngine(state, **options)
        with pytest.raises(ConfigError):
            engine.start()
        state.add("y", step_of)  # the state is free


# On ranks


def follow(rank: int, main: int | None) -> list[Any]:
    """What a rank sees of values on all clocks, step by step."""
    computed: list[tuple[str, int]] = []

    def source(name: str) -> Callable[[Context], list[Any]]:
        def compute(ctx: Context) -> list[Any]:
            computed.append((name, ctx.step))
            return [name, ctx.step, ctx.epoch, ctx.previous and ctx.previous[1], int(ctx.rng.integers(1 << 62))]

        return compute

    schedules: dict[str, Schedule | None] = {
        "default": None,
        "at": At([1, 4, 6]),
        "epochs": Every(epochs=1),
        "once": Once(),
        "late": Every(steps=2, start=3, stop=7),
    }
    state = SharedState()
    for name in schedules if rank else reversed(schedules):  # the order of registration does not matter
        state.add(name, source(name), every=schedules[name])
    trail: list[Any] = []
    with SyncEngine(state, every=Every(steps=3), main=main, seed=7) as engine:
        for epoch in range(3):
            trail.append((engine.step(3 * epoch, epoch), dict(state)))
            for step in range(3 * epoch + 1, 3 * epoch + 4):
                trail.append((engine.step(step, epoch), dict(state)))
    return [trail, computed]


@pytest.mark.parametrize(("world_size", "main"), [(2, None), (4, 2)])
def test_every_rank_holds_the_same_values_at_every_step_and_only_main_computes(
    world_size: int, main: int | None
) -> None:
    alone, computed = follow(0, None)
    ranks = returned(run_ranks(follow, world_size, main))
    assert [trail for trail, _ in ranks] == [alone] * world_size
    assert [count for _, count in ranks] == [computed if rank == (main or 0) else [] for rank in range(world_size)]
    assert [names for names, _ in alone] == [
        ("default", "epochs", "once"), ("at",), (), ("default", "late"),
        ("epochs",), ("at",), ("late",), ("at", "default"),
        ("epochs",), (), (), ("default",),
    ]  # fmt: skip


def contexts(rank: int) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []

    class Source:
        def compute(self, ctx: Context) -> int:
            seen.append({"call": "compute", **describe(ctx)})
            return 5

        def apply(self, value: int, ctx: Context) -> None:
            seen.append({"call": f"apply {value}", **describe(ctx)})

    state = SharedState()
    state.add("x", Source(), every=Every(steps=2))
    with SyncEngine(state) as engine:
        engine.model, engine.host = "model", "host"
        engine.start(4, 1)
        engine.step(6, 2)
    return seen


def keeping(rank: int) -> list[Any]:
    """What a rank holds where a source fails now and then and the engine keeps the old values."""

    def sometimes(ctx: Context) -> int:
        if ctx.step % 3 == 0:
            raise ValueError("boom")
        return ctx.step

    state = SharedState({"x": sometimes, "y": step_of})
    held = []
    with SyncEngine(state, every=Every(steps=1), on_error="keep") as engine:
        for step in range(6):
            held.append([engine.step(step), dict(state)])
        return [held, engine.stats["x"], engine.stats.collectives]


def test_on_error_keep_leaves_all_ranks_with_the_same_old_values() -> None:
    both = ("x", "y")
    held = [[(), {}], *([both, {"x": s, "y": s}] for s in (1, 2)), [(), {"x": 2, "y": 2}]]
    held += [[both, {"x": s, "y": s}] for s in (4, 5)]
    assert returned(run_ranks(keeping, 2)) == [[held, (4, 2), 6]] * 2


def describe(ctx: Context) -> dict[str, Any]:
    names = ("step", "epoch", "rank", "world_size", "local_rank", "node_rank", "num_nodes", "is_main", "model", "host")
    return {name: getattr(ctx, name) for name in names}


def test_sources_and_apply_are_told_where_they_run() -> None:
    def expected(rank: int, call: str, step: int, epoch: int) -> dict[str, Any]:
        place = {"rank": rank, "world_size": 2, "local_rank": rank, "node_rank": 0, "num_nodes": 1}
        return {
            "call": call, "step": step, "epoch": epoch, **place, "is_main": rank == 0, "model": "model", "host": "host"
        }  # fmt: skip

    main, peer = returned(run_ranks(contexts, 2))
    assert peer == [expected(1, "apply 5", 4, 1), expected(1, "apply 5", 6, 2)]
    assert main == [
        expected(0, call, step, epoch) for step, epoch in ((4, 1), (6, 2)) for call in ("compute", "apply 5")
    ]


def looked_at(rank: int) -> list[Any]:
    """The table of who holds what, and what becomes of a value that one rank changes where it is held."""

    def apply(value: torch.Tensor, ctx: Context) -> None:
        if ctx.step == 3 and ctx.rank == 1:
            value += 1

    state = SharedState()
    state.add("number", step_of)
    state.add("seed", Seed(base=7, per_rank=True))
    state.add("tensor", lambda ctx: torch.full((9,), ctx.step), apply=apply)
    state.add("later", step_of, every=Every(steps=50, start=50))
    state.add("initial", step_of, every=Every(steps=50, start=50), initial=0.5)
    with SyncEngine(state, every=Every(steps=1), verify_values=True) as engine:
        engine.start()
        for step in range(1, 3):
            engine.step(step)
        table = engine.inspect()
        seed = state["seed"]
        try:
            engine.step(3)
        except MismatchError as error:
            return [table, seed, str(error)]
        return [table]


def test_inspect_tells_who_holds_what_and_verify_values_finds_what_differs() -> None:
    tables, seeds, errors = zip(*returned(run_ranks(looked_at, 3)), strict=True)
    of_step_2 = "(version 3 of step 2)"
    assert set(tables) == {
        f"number: ranks 0-2: 2 {of_step_2}\n"
        f"seed: rank 0: {seeds[0]} {of_step_2}; rank 1: {seeds[1]} {of_step_2}; rank 2: {seeds[2]} {of_step_2}\n"
        f"tensor: ranks 0-2: tensor [9] torch.int64 {of_step_2}\n"
        "later: ranks 0-2: not ready\n"
        "initial: ranks 0-2: 0.5 (initial value)"
    }
    held = "tensor [9] torch.int64 (version 4 of step 3)"
    assert set(errors) == {
        f"value 'tensor' differs between ranks after the sync at step 3: ranks 0,2: {held}; rank 1: {held}"
    }


def open_and_close(rank: int, world_size: int) -> list[int]:
    """Engines opened and closed in a row; the ranks reach each end at different times, and nobody may see an error."""
    values = []
    state = SharedState()
    state.add("x", lambda ctx: busy(ctx.step), every=Every(steps=1))
    state.add("applied", lambda ctx: ctx.step, every=Every(steps=2), apply=lambda value, ctx: busy(1000 * ctx.rank))
    for run in range(20):
        engine = SyncEngine(state)
        engine.start(run)
        busy((rank + run) % world_size * 20_000)
        engine.close()
        values.append(state["x"])
    return values


def busy(n: int) -> int:
    total = n
    for _ in range(n):
        total = total % 1_000_003 * 2
    return n


def test_ranks_that_end_at_the_same_step_at_different_times_see_no_error() -> None:
    assert returned(run_ranks(open_and_close, 3, 3)) == [list(range(20))] * 3
