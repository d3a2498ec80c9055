"""A computation that fails while training goes on: raised at the step at which its value would have come into force."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import returned, run_ranks

from syncstate import Context, Every, SharedState, SyncEngine, TensorSpec
from syncstate.context import generator
from syncstate.errors import ComputeError, SyncStateError

PATIENCE = 300.0
EACH = Every(steps=1)


class Failing:
    """Returns [step, a random number, what was computed before], and fails at some steps."""

    def __init__(self, steps: set[int]) -> None:
        self.steps = steps

    def compute(self, ctx: Context) -> list[Any]:
        drawn = float(ctx.rng.random())
        if ctx.step in self.steps:
            raise ValueError(f"boom {ctx.step}")
        return [ctx.step, drawn, ctx.previous[0] if ctx.previous else None]


def outcome(call: Callable[[], object]) -> Any:
    """What a call returned; for one of the package's errors its class, the first lines of its text, and its cause."""
    try:
        return call()
    except SyncStateError as error:
        lines = [line for line in str(error).splitlines() if line.startswith("value ")]
        return [type(error).__name__, lines, type(error.__cause__).__name__]


def failing_history(rank: int, lag: int, async_op: bool, on_error: str) -> list[Any]:
    state = SharedState({"x": Failing({3, 4, 7})})
    found: list[Any] = []
    with SyncEngine(state, every=EACH, async_op=async_op, lag=lag, on_error=on_error, timeout=PATIENCE) as engine:
        for step in range(13):
            came = outcome(lambda step=step: engine.step(step))  # type: ignore[misc]
            found.append([came, state["x"], *state.info("x")[:3]])
        found.append(engine.stats["x"].failed)
    return found


def values_of_the_failing_source() -> dict[int, list[Any]]:
    """What each step computes: one that fails consumes no version, so that the next one draws the same numbers."""
    values: dict[int, list[Any]] = {}
    for step in range(13):
        if step not in (3, 4, 7):
            previous = values[max(values)][0] if values else None
            values[step] = [step, generator(0, "x", len(values) + 1).random(), previous]
    return values


def in_force(raised_at: dict[int, int], lag: int) -> list[Any]:
    """What each call brings when the failures of some steps are raised at others."""
    values = values_of_the_failing_source()
    found: list[Any] = []
    for step in range(13):
        arrived = [s for s in values if s == 0 or s + lag <= step]
        new = step == 0 or (step - lag in arrived and step > lag)
        came: Any = ("x",) if new else ()
        if step in raised_at:
            launched = raised_at[step]
            came = ["ComputeError", [f"value 'x' at step {launched} on main (rank 0): ValueError: boom {launched}"]]
        last = arrived[-1]
        found.append([came, values[last], len(arrived), last, 0 if last == 0 else last + lag])
    return found


def with_causes(expected: list[Any], cause: str) -> list[Any]:
    return [[[*came, cause] if came and came[0] == "ComputeError" else came, *rest] for came, *rest in expected]


@pytest.mark.parametrize("lag", [1, 2, 5])
def test_a_failure_is_raised_on_every_rank_at_the_apply_step_and_consumes_no_version(lag: int) -> None:
    expected = in_force({3 + lag: 3, 4 + lag: 4, 7 + lag: 7}, lag)
    main, *others = returned(run_ranks(failing_history, 3, lag, True, "raise"))
    assert main == [*with_causes(expected, "ValueError"), 3]
    assert others == [[*with_causes(expected, "NoneType"), 3]] * 2


def test_a_blocking_value_with_a_lag_raises_at_once_and_brings_the_same_values() -> None:
    expected = in_force({3: 3, 4: 4, 7: 7}, 2)
    main, other = returned(run_ranks(failing_history, 2, 2, False, "raise"))
    # The arrivals of a call that raises are in force, only not named.
    assert main == [*with_causes(expected, "ValueError"), 3]
    assert other == [*with_causes(expected, "NoneType"), 3]


@pytest.mark.parametrize("async_op", [True, False])
def test_on_error_keep_counts_the_failures_and_brings_the_same_values(async_op: bool) -> None:
    expected = in_force({}, 2)
    assert returned(run_ranks(failing_history, 2, 2, async_op, "keep")) == [[*expected, 3]] * 2


# Other ways to fail, and with others


def kinds(rank: int) -> list[Any]:
    def boom(ctx: Context) -> int:
        if ctx.step == 2:
            raise ValueError("boom")
        return ctx.step

    state = SharedState()
    state.add("good", lambda ctx: ctx.step, every=EACH, lag=2)
    state.add("bad", boom, every=EACH, lag=2)
    state.add("blocking", lambda ctx: ctx.step, every=EACH, async_op=False)
    state.add("object", lambda ctx: object() if ctx.step == 4 else 1, every=Every(steps=2), lag=1)
    wrong = TensorSpec((2,), torch.float32)
    state.add("spec", lambda ctx: torch.zeros(2 + (ctx.step == 6)), every=Every(steps=3), spec=wrong, lag=2)
    found = []
    with SyncEngine(state, async_op=True, timeout=PATIENCE) as engine:
        for step in range(9):
            came = outcome(lambda step=step: engine.step(step))  # type: ignore[misc]
            found.append([came, state["good"], state["bad"], state["blocking"]])
    return found


def test_a_failure_keeps_back_all_values_of_its_frame_and_is_raised_once() -> None:
    main, other = returned(run_ranks(kinds, 2))
    for found in (main, other):
        assert [row[1:] for row in found] == [
            *([0, 0, 0], [0, 0, 1], [0, 0, 2], [1, 1, 3]),
            *([1, 1, 4], [3, 3, 5], [3, 3, 6], [5, 5, 7], [5, 5, 8]),
        ]
        errors = {step: came for step, (came, *_) in enumerate(found) if came and came[0].endswith("Error")}
        # Raised once, when the first value of the frame would have come into force: the object, with a lag of 1.
        assert sorted(errors) == [3, 5, 7]
        assert errors[3][:2] == ["ComputeError", ["value 'bad' at step 2 on main (rank 0): ValueError: boom"]]
        assert errors[5][0] == "ComputeError"
        assert errors[5][1][0].startswith("value 'object' at step 4 on main (rank 0): CodecError: ")
        assert errors[7][:2] == [
            "MismatchError",
            ["value 'spec' at step 6 on main (rank 0): promised tensor [2] torch.float32, "
             "got tensor [3] torch.float32"],
        ]  # fmt: skip


def two_at_once(rank: int) -> list[Any]:
    """A failure that arrives in the call in which a blocking sync fails."""

    def boom(ctx: Context) -> int:
        if ctx.step in (2, 4):
            raise ValueError(f"boom {ctx.step}")
        return ctx.step

    state = SharedState()
    state.add("later", boom, every=Every(steps=2), async_op=True, lag=2)
    state.add("now", boom, every=Every(steps=4))
    with SyncEngine(state, timeout=PATIENCE) as engine:
        return [outcome(lambda step=step: engine.step(step)) for step in range(9)]  # type: ignore[misc]


def test_failures_that_meet_in_one_call_are_raised_together() -> None:
    for rank, found in enumerate(returned(run_ranks(two_at_once, 2))):
        texts = [
            "value 'later' at step 2 on main (rank 0): ValueError: boom 2",
            "value 'now' at step 4 on main (rank 0): ValueError: boom 4",
        ]
        cause = "NoneType" if rank else "ValueError"
        assert found[:4] == [("later", "now"), (), (), ()]
        assert found[4] == ["ComputeError", texts, cause]
        assert found[5:6] == [()]
        assert found[6] == ["ComputeError", ["value 'later' at step 4 on main (rank 0): ValueError: boom 4"], cause]
        assert found[7:] == [(), ("later", "now")]


# Leaving with something in flight


def leaves(rank: int, fails: bool, on_error: str, numel: int) -> list[Any]:
    def source(ctx: Context) -> torch.Tensor:
        if fails and ctx.step == 1:
            raise ValueError("boom")
        return torch.full((numel,), ctx.step)

    state = SharedState({"x": source})

    def run() -> None:
        with SyncEngine(state, every=EACH, async_op=True, lag=3, on_error=on_error, timeout=PATIENCE) as engine:
            engine.step(0)
            engine.step(1)

    return [outcome(run), int(state["x"][0]), state.info("x").version]


@pytest.mark.parametrize("numel", [4, 1_000_000])
def test_leaving_the_block_right_after_a_launch_neither_hangs_nor_applies(numel: int) -> None:
    assert returned(run_ranks(leaves, 3, False, "raise", numel)) == [[None, 0, 1]] * 3


def test_leaving_the_block_right_after_a_failing_launch_raises_on_every_rank() -> None:
    text = ["value 'x' at step 1 on main (rank 0): ValueError: boom"]
    main, *others = returned(run_ranks(leaves, 3, True, "raise", 4))
    assert main == [["ComputeError", text, "ValueError"], 0, 1]
    assert others == [[["ComputeError", text, "NoneType"], 0, 1]] * 2


def test_leaving_after_a_failing_launch_is_quiet_where_old_values_are_kept() -> None:
    assert returned(run_ranks(leaves, 2, True, "keep", 4)) == [[None, 0, 1]] * 2


def goes_on_after_close(rank: int, numel: int) -> list[Any]:
    state = SharedState()
    state.add("x", lambda ctx: torch.full((numel,), ctx.step), every=EACH)
    engine = SyncEngine(state, async_op=True, lag=3, timeout=PATIENCE)
    found = []
    for first, last in ((0, 4), (4, 6), (7, 9)):
        engine.start(first)
        for step in range(first, last + 1):
            found.append([step, engine.step(step), int(state["x"][0]), *state.info("x")[:3]])
        engine.close()
    return found


@pytest.mark.parametrize("numel", [4, 100_000])
def test_what_is_in_flight_at_a_close_comes_into_force_at_its_step_after_the_next_start(numel: int) -> None:
    expected = [
        *([0, (), 0, 1, 0, 0], [1, (), 0, 1, 0, 0], [2, (), 0, 1, 0, 0], [3, (), 0, 1, 0, 0]),
        *([4, ("x",), 1, 2, 1, 4], [4, (), 1, 2, 1, 4], [5, ("x",), 2, 3, 2, 5], [6, ("x",), 3, 4, 3, 6]),
        # The start at step 7 brings what step 4 launched, and launches; so nothing is left for the call that follows.
        *([7, (), 4, 5, 4, 7], [8, ("x",), 5, 6, 5, 8], [9, ("x",), 6, 7, 6, 9]),
    ]
    assert returned(run_ranks(goes_on_after_close, 2, numel)) == [expected] * 2


def drains(rank: int, numel: int, collects: bool) -> list[Any]:
    state = SharedState()
    collect = (lambda ctx: ctx.rank) if collects else None
    state.add("x", lambda ctx: [ctx.step, ctx.collected, torch.zeros(numel)], every=EACH, collect=collect)
    found = []
    with SyncEngine(state, async_op=True, lag=4, timeout=PATIENCE) as engine:
        for step in range(7):
            engine.step(step)
            engine.drain()
            found.append([state["x"][:2], *state.info("x")[:3], engine.stats.syncs])
        engine.drain()
    return found


@pytest.mark.parametrize("collects", [False, True])
@pytest.mark.parametrize("numel", [4, 100_000])
def test_drain_waits_for_what_is_in_flight_and_brings_nothing_into_force_early(numel: int, collects: bool) -> None:
    got = [0, 1] if collects else None
    first = [[[0, got], 1, 0, 0, 1 + step] for step in range(5)]
    later = [[[step - 4, got], step - 3, step - 4, step, 1 + step] for step in (5, 6)]
    assert returned(run_ranks(drains, 2, numel, collects)) == [[*first, *later]] * 2


def test_a_kept_failure_is_logged_with_the_step_of_its_launch(caplog: pytest.LogCaptureFixture) -> None:
    state = SharedState({"x": Failing({3})})
    with SyncEngine(state, every=EACH, async_op=True, lag=2, on_error="keep") as engine, caplog.at_level(logging.ERROR):
        for step in range(6):
            engine.step(step)
            assert len(caplog.records) == (step >= 5)
    assert caplog.messages[0].startswith(
        "the old values stay: value 'x' at step 3 on main (rank 0): ValueError: boom 3\nTraceback on rank 0:"
    )


def start_twice(rank: int) -> Any:
    """The second start fails for one value, after another one was sent; then it is tried again."""
    tries: list[int] = []

    def moody(ctx: Context) -> int:
        tries.append(ctx.step)
        if ctx.step == 4 and tries.count(4) == 1:
            raise ValueError("not yet")
        return ctx.step

    state = SharedState()
    state.add("far", lambda ctx: torch.full((3000,), ctx.step), every=Every(steps=1), async_op=True, lag=3)
    state.add("moody", moody, every=Every(steps=4))
    with SyncEngine(state, timeout=20.0) as engine:
        engine.start()
        engine.step(1)
        engine.close()
        with pytest.raises(ComputeError):
            engine.start(4)
        engine.start(4)
        saved = engine.state_dict() if rank else None
        for step in (5, 6, 7):
            engine.step(step)
        return saved is not None, int(state["far"][0]), state["moody"], state.info("far")[:3]


def test_a_start_that_fails_keeps_what_it_has_sent_for_the_next_try() -> None:
    seen = returned(run_ranks(start_twice, 3))
    assert [row[1:] for row in seen] == [seen[0][1:]] * 3
    assert seen[0][1:3] == (4, 4)
