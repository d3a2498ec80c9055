"""A collecting function that fails on some ranks, or what cannot be sent or reduced: the same error on every rank."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import returned, run_ranks

from syncstate import Context, Every, SharedState, SyncEngine
from syncstate.errors import SyncStateError

PATIENCE = 300.0
EACH = Every(steps=1)
MODES: list[dict[str, Any]] = [{}, {"async_op": True}]


def outcome(call: Callable[[], object]) -> Any:
    """What a call returned; for one of the package's errors its class, the lines that name a value, and its cause."""
    try:
        return call()
    except SyncStateError as error:
        lines = [line for line in str(error).splitlines() if line.startswith("value ")]
        return [type(error).__name__, lines, repr(error.__cause__), str(error)]


def failing(rank: int, who: list[int], options: dict[str, Any], on_error: str) -> list[Any]:
    """Collecting fails at step 2 on some ranks."""

    def collect(ctx: Context) -> int:
        if ctx.step == 2 and rank in who:
            raise ValueError(f"no loss on {rank}")
        return 10 * ctx.step + rank

    state = SharedState()
    state.add("x", lambda ctx: [ctx.step, ctx.collected, float(ctx.rng.random())], collect=collect, every=EACH)
    state.add("y", lambda ctx: ctx.step, every=EACH)
    found = []
    with SyncEngine(state, on_error=on_error, timeout=PATIENCE, **options) as engine:
        for step in range(6):
            came = outcome(lambda step=step: engine.step(step))  # type: ignore[misc]
            found.append([came, state["x"][:2], state["y"], state.info("x").version, engine.stats["x"].failed])
    return found


@pytest.mark.parametrize("who", [[0], [1], [2], [0, 2], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("options", MODES, ids=str)
def test_every_rank_raises_with_the_ranks_that_failed_and_the_next_sync_works(
    who: list[int], options: dict[str, Any]
) -> None:
    texts = [f"value 'x' at step 2: collect failed on rank {rank}: ValueError: no loss on {rank}" for rank in who]
    at = 4 if options else 2  # where the error is raised
    for rank, found in enumerate(returned(run_ranks(failing, 3, who, options, "raise"))):
        kind, lines, cause, text = found[at][0]
        assert (kind, lines) == ("ComputeError", texts)
        # A rank that failed itself finds its own exception behind the error; main one of those that it knows.
        assert cause == (repr(ValueError(f"no loss on {rank}")) if rank in who else "None")
        for peer in who:
            assert f"Traceback on rank {peer}:\nTraceback (most recent call last):" in text
        if options:
            in_force = [0, 0, 0, 1, 1, 3]
            versions, later = [1, 1, 1, 2, 2, 3], [0, 0, 1, 2, 3, 4]
        else:
            in_force = [0, 1, 1, 3, 4, 5]
            versions, later = [1, 2, 2, 3, 4, 5], [0, 1, 1, 3, 4, 5]
        assert [row[1] for row in found] == [[s, [10 * s + r for r in range(3)]] for s in in_force]
        assert [row[2] for row in found] == later
        assert [row[3] for row in found] == versions
        # Asynchronous, it has arrived by then at the latest.
        assert [row[4] for row in found][at:] == [1] * (6 - at)


@pytest.mark.parametrize("options", MODES, ids=str)
def test_a_collecting_failure_is_kept_where_old_values_are(options: dict[str, Any]) -> None:
    in_force = [0, 0, 0, 1, 1, 3] if options else [0, 1, 1, 3, 4, 5]
    for found in returned(run_ranks(failing, 2, [1], options, "keep")):
        assert [row[1][0] for row in found] == in_force
        assert all(isinstance(row[0], tuple) for row in found)
        assert found[-1][4] == 1


def observed(rank: int, options: dict[str, Any], fails: str) -> list[Any]:
    """A sync fails in which numbers were observed; more of them come before the next one."""

    def source(ctx: Context) -> list[Any]:
        if fails == "compute" and ctx.step == 2:
            raise ValueError("boom")
        return [ctx.step, [part.tolist() for part in ctx.collected]]

    def other(ctx: Context) -> int:
        if fails == "collect" and ctx.step == 2 and ctx.rank == 1:
            raise ValueError("boom")
        return 0

    state = SharedState()
    state.add("x", source, collect="observed", every=Every(steps=2))
    state.add("y", lambda ctx: 0, collect=other, every=Every(steps=2))
    found = []
    with SyncEngine(state, timeout=PATIENCE, **options) as engine:
        for step in range(9):
            came = outcome(lambda step=step: engine.step(step))  # type: ignore[misc]
            found.append([came if came and came[0] != "ComputeError" else (), state["x"]])
            state.observe("x", 10 * step + rank)
    return [row[1] for row in found]


@pytest.mark.parametrize("fails", ["collect", "compute"])
@pytest.mark.parametrize("options", MODES, ids=str)
def test_what_was_observed_for_a_sync_that_failed_reaches_the_next_one(options: dict[str, Any], fails: str) -> None:
    for values in returned(run_ranks(observed, 2, options, fails)):
        if options:
            # What step 2 had taken is back when its failure arrives, at step 4, after which step 4 collects.
            fourth = [[0.0, 10.0, 20.0, 30.0], [1.0, 11.0, 21.0, 31.0]]
            assert values[:6] == [[0, [[], []]]] * 6
            assert values[6:8] == [[4, fourth]] * 2
            assert values[8] == [6, [[40.0, 50.0], [41.0, 51.0]]]
        else:
            fourth = [[0.0, 10.0, 20.0, 30.0], [1.0, 11.0, 21.0, 31.0]]
            assert values[:4] == [[0, [[], []]]] * 4
            assert values[4:6] == [[4, fourth]] * 2
            assert values[6:8] == [[6, [[40.0, 50.0], [41.0, 51.0]]]] * 2


def unsendable(rank: int, options: dict[str, Any]) -> list[Any]:
    """What a rank collected cannot be sent, or is too large, or cannot be reduced."""

    def collect(ctx: Context) -> Any:
        if ctx.step == 1 and rank == 2:
            return {"a": [1, object()]}
        if ctx.step == 3 and rank == 0:
            return torch.zeros(300_000)
        return torch.zeros(4) if ctx.step == 5 and rank == 1 else torch.ones(3)

    state = SharedState()
    state.add("other", lambda ctx: ctx.collected, collect=lambda ctx: 1, every=Every(steps=2, start=1))
    state.add("x", lambda ctx: ctx.collected.tolist(), collect=collect, reduce="sum", every=Every(steps=2, start=1),
              initial=0)  # fmt: skip
    found = []
    with SyncEngine(state, timeout=PATIENCE, max_bytes=100_000, **options) as engine:
        engine.start()
        for step in range(1, 10):
            came = outcome(lambda step=step: engine.step(step))  # type: ignore[misc]
            if came and came[0] == "ComputeError":
                found.append([step, came[1], came[2].split("(")[0]])
        found.append(state["x"])
    return found


def test_what_cannot_be_sent_or_reduced_is_an_error_on_every_rank_that_names_rank_and_value() -> None:
    main, second, third = returned(run_ranks(unsendable, 3, {}))
    for found in (main, second, third):
        assert [row[0] for row in found[:-1]] == [1, 3, 5]
        texts = [row[1] for row in found[:-1]]
        assert texts[0][0].startswith("value 'x' at step 1: collect failed on rank 2: CodecError: ")
        assert "CodecError: cannot encode a[1] of type object" in texts[0][0]
        assert texts[1][0].startswith("value 'other' at step 3: collect failed on rank 0: CodecError: ")
        assert "max_bytes=100000" in texts[1][0]
        assert texts[2] == [
            "value 'x' at step 5 on main (rank 0): what the ranks collected cannot be reduced: TypeError: "
            'reduce="sum" takes a number, or a tensor or array of the same shape, from each rank, got '
            "rank 0: tensor [3] torch.float32; rank 1: tensor [4] torch.float32; rank 2: tensor [3] torch.float32; "
            'give reduce="list" to find them as they are'
        ]
        assert found[-1] == [3.0, 3.0, 3.0]
    assert [row[2] for row in main[:-1]] == ["None", "CodecError", "TypeError"]
    assert [row[2] for row in third[:-1]] == ["CodecError", "None", "None"]
    assert [row[2] for row in second[:-1]] == ["None"] * 3


def interrupted(rank: int, options: dict[str, Any], kind: str) -> list[Any]:
    """Collecting is interrupted on rank 1 at step 2."""

    def collect(ctx: Context) -> int:
        if ctx.step == 2 and rank == 1:
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyboardInterrupt
        return rank

    state = SharedState()
    state.add("x", lambda ctx: [ctx.step, ctx.collected], collect=collect, every=EACH)
    try:
        with SyncEngine(state, timeout=PATIENCE, **options) as engine:
            for step in range(30):
                engine.step(step)
    except BaseException as error:
        return [type(error).__name__, str(error), state["x"][0]]
    return ["nothing"]


@pytest.mark.parametrize("kind", ["interrupt", "kill"])
@pytest.mark.parametrize("options", MODES, ids=str)
def test_a_rank_that_is_interrupted_or_killed_while_it_collects_is_named_to_all_others(
    options: dict[str, Any], kind: str
) -> None:
    outcomes = run_ranks(interrupted, 3, options, kind, timeout=60.0)
    for rank in (0, 2):
        assert outcomes[rank].status == "returned", str(outcomes[rank])
        error, text, step = outcomes[rank].value
        assert error == "PeerError"
        assert "rank 1" in text
        assert step <= 1
    if kind == "kill":
        assert outcomes[1].status == "died"
    else:
        assert outcomes[1].value[0] == "KeyboardInterrupt"


def late(rank: int, options: dict[str, Any]) -> list[Any]:
    """Collecting takes longer on rank 2 than the value's timeout."""

    def collect(ctx: Context) -> int:
        if ctx.step == 2 and rank == 2:
            time.sleep(1.5)
        return rank

    state = SharedState()
    state.add("slow", lambda ctx: ctx.collected, collect=collect, every=EACH)
    with SyncEngine(state, timeout=0.6, **options) as engine:
        for step in range(9):
            came = outcome(lambda step=step: engine.step(step))  # type: ignore[misc]
            if came and came[0] not in ("slow",):
                return [came[0], came[3]]
    return ["nothing"]


@pytest.mark.parametrize("options", MODES, ids=str)
def test_a_rank_that_collects_for_too_long_is_named_in_a_timeout(options: dict[str, Any]) -> None:
    found = returned(run_ranks(late, 3, options, timeout=60.0))
    for kind, text in found[:2]:
        assert kind == "SyncTimeout"
        assert "'slow'" in text
        assert "rank 2" in text
    assert found[2][0] in ("SyncTimeout", "PeerError")


def elsewhere(rank: int) -> list[Any]:
    """Rank 1 misses the call of step 2."""
    state = SharedState()
    state.add("x", lambda ctx: ctx.collected, collect=lambda ctx: ctx.step, every=EACH)
    with SyncEngine(state, timeout=PATIENCE) as engine:
        for step in range(5):
            if step != 2 or rank != 1:
                came = outcome(lambda step=step: engine.step(step))  # type: ignore[misc]
                if came[0] != "x":
                    return [step, came[0], came[3], state["x"]]
    return ["nothing"]


def test_ranks_that_collect_at_different_steps_raise_with_both() -> None:
    for rank, (step, kind, text, value) in enumerate(returned(run_ranks(elsewhere, 2))):
        assert (step, kind, value) == (3 if rank else 2, "MismatchError", [1, 1])
        assert text.startswith("sync of 'x': main (rank 0) is at step 2 (epoch 0), rank 1 is at step 3 (epoch 0).")


def large_failures(rank: int) -> list[Any]:
    """Some ranks fail while others send more than fits into a frame, at the same step."""

    def collect(ctx: Context) -> torch.Tensor:
        if ctx.step % 2 and ctx.step < 9 and (ctx.step // 2) % 4 in (rank, 3):
            raise ValueError(f"no room on {rank} " + "x" * 20_000)
        return torch.full((100_000 * rank,), ctx.step)

    state = SharedState()
    state.add("x", lambda ctx: [len(part) for part in ctx.collected], collect=collect, every=EACH)
    found = []
    with SyncEngine(state, async_op=True, lag=2, timeout=PATIENCE) as engine:
        for step in range(12):
            came = outcome(lambda step=step: engine.step(step))  # type: ignore[misc]
            found.append([came[0] if came else "", state["x"]])
    return found


def test_failures_and_large_contributions_of_other_ranks_do_not_disturb_each_other() -> None:
    expected = [["x", [0, 100_000, 200_000]]]
    for step in range(1, 12):
        launched = step - 2
        kind = "" if launched < 1 else "ComputeError" if launched in (1, 3, 5, 7) else "x"
        expected.append([kind, [0, 100_000, 200_000]])
    assert returned(run_ranks(large_failures, 3)) == [expected] * 3
