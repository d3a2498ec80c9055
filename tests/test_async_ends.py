"""How a run ends while values are in flight: well, by an error of a rank, by the death of a rank."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import returned, run_ranks

from syncstate import Context, Every, SharedState, SyncEngine
from syncstate.errors import PeerError, SyncStateError

PATIENCE = 300.0
EACH = Every(steps=1)
LARGE = 4_000_000  # numbers of 8 bytes: still on the wire when the call that launched them returns


def large(ctx: Context) -> torch.Tensor:
    return torch.full((LARGE,), ctx.step)


def told(error: BaseException) -> list[str]:
    return [type(error).__name__, str(error)]


def raised_by(call: Callable[[], object]) -> list[str]:
    try:
        call()
    except SyncStateError as error:
        return told(error)
    return ["nothing", ""]


# The training loop ends


def ends(rank: int, how: str, who: list[int]) -> Any:
    state = SharedState({"x": large})
    try:
        with SyncEngine(state, every=EACH, async_op=True, lag=4, timeout=PATIENCE) as engine:
            for step in range(8):
                engine.step(step)
                if step == 5 and rank in who:
                    if how == "return":
                        return ["returned", ""]
                    raise {"exception": ValueError, "interrupt": KeyboardInterrupt, "exit": SystemExit}[how]("now")
                if step == 5 and how != "return":
                    time.sleep(0.2)  # until the news is here, or the next sync waits for it
    except BaseException as error:
        return told(error)
    return ["the end", ""]


def test_a_break_with_a_large_value_in_flight_ends_all_ranks() -> None:
    assert returned(run_ranks(ends, 3, "return", [0, 1, 2], timeout=60.0)) == [["returned", ""]] * 3


@pytest.mark.parametrize("how", ["exception", "interrupt", "exit"])
def test_an_error_of_all_ranks_with_a_large_value_in_flight_ends_them(how: str) -> None:
    own = {"exception": "ValueError", "interrupt": "KeyboardInterrupt", "exit": "SystemExit"}[how]
    for kind, text in returned(run_ranks(ends, 3, how, [0, 1, 2], timeout=60.0)):
        # A rank that was still waiting in the engine hears of one that was faster.
        assert kind == own or (kind == "PeerError" and f"failed at step 5: {own}: now" in text)


# An exception, with every culprit, is in the fault table.
@pytest.mark.parametrize(("how", "who"), [("interrupt", 0), ("exit", 2)])
def test_an_error_of_one_rank_with_a_large_value_in_flight_reaches_the_others(how: str, who: int) -> None:
    own = {"interrupt": "KeyboardInterrupt", "exit": "SystemExit"}[how]
    for rank, (kind, text) in enumerate(returned(run_ranks(ends, 3, how, [who], timeout=60.0))):
        if rank == who:
            assert kind == own
        else:
            assert kind == "PeerError"
            assert text == f"rank {who} failed at step 5: {own}: now"


_SCRIPT = """
import sys
import torch, torch.distributed as dist
from syncstate import Every, SharedState, SyncEngine
rank, path, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", store=dist.FileStore(path, 3), rank=rank, world_size=3)
state = SharedState({"x": lambda ctx: torch.full((4_000_000,), ctx.step)})
engine = SyncEngine(state, every=Every(steps=1), async_op=True, lag=4, timeout=300.0)
for step in range(4):
    engine.step(step)
print(rank, int(state["x"][0]), flush=True)
if how == "exit":
    sys.exit(3)
if how == "raise":
    raise ValueError("the end")
"""


def test_a_process_that_ends_without_a_close_does_not_wait_for_what_is_in_flight(tmp_path: Path) -> None:
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _SCRIPT]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), how],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, how in enumerate(("end", "raise", "exit"))
    ]  # fmt: skip
    try:
        # The engine's timeout is 300 s: who waits for it is not over by then.
        ended = [process.communicate(timeout=90.0) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 1, 3], ended
    assert [out for out, _ in ended] == ["0 0\n", "1 0\n", "2 0\n"]


# A rank dies, is late, is elsewhere


def killed(rank: int, who: int, numel: int) -> list[Any]:
    state = SharedState()
    state.add("x", lambda ctx: torch.full((numel,), ctx.step), every=Every(steps=5))
    with SyncEngine(state, async_op=True, lag=3, timeout=PATIENCE) as engine:
        engine.start()
        for step in range(1, 20):
            if step == 6 and rank == who:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                engine.step(step)
            except SyncStateError as error:
                return [step, *told(error), raised_by(lambda step=step: engine.step(step + 1)), int(state["x"][0])]  # type: ignore[misc]
    return ["nothing"]


@pytest.mark.parametrize(("who", "numel"), [(0, LARGE), (1, 4)])
def test_a_rank_that_is_killed_with_a_value_in_flight_is_named_to_all_others(who: int, numel: int) -> None:
    steps = []
    for rank, outcome in enumerate(run_ranks(killed, 3, who, numel, timeout=60.0)):
        if rank == who:
            assert (outcome.status, outcome.exitcode) == ("died", -signal.SIGKILL), str(outcome)
            continue
        assert outcome.status == "returned", str(outcome)
        step, kind, text, again, value = outcome.value
        # A rank between main and the end of the tree may get what step 10 launched, and misses what step 15 does.
        steps.append(step)
        assert 6 <= step <= 18
        assert kind == "PeerError"
        assert f"rank {who}" in text
        assert again == [kind, text]
        assert value == (0 if step <= 8 else 5 if step <= 13 else 10)
    # The launch of step 10 cannot arrive everywhere.
    assert min(steps) <= 13


def elsewhere(rank: int) -> list[Any]:
    """Rank 1 misses the call of step 2."""
    state = SharedState({"x": lambda ctx: ctx.step})
    with SyncEngine(state, every=EACH, async_op=True, lag=2, timeout=PATIENCE) as engine:
        for step in range(8):
            if step != 2 or rank != 1:
                kind, text = raised_by(lambda step=step: engine.step(step))  # type: ignore[misc]
                if text:
                    return [step, kind, text, state["x"]]
    return ["nothing"]


def test_ranks_that_launch_at_different_steps_raise_with_both_and_apply_nothing_of_it() -> None:
    text = "sync of 'x': rank 1 is at step 3 (epoch 0), main (rank 0) is at step 2 (epoch 0). Every rank must call the "
    main, other = returned(run_ranks(elsewhere, 2))
    # Main, which has sent what it should, hears of it in a later call.
    assert (other[0], other[3]) == (5, 1)
    for _, kind, message, _ in (main, other):
        assert kind == "MismatchError"
        assert message.startswith(text)


def late_main(rank: int, timeout: float | None) -> list[Any]:
    """Main computes for longer than the engine's timeout."""
    store: Any = dist.distributed_c10d._get_default_store()

    def slow(ctx: Context) -> int:
        if ctx.step == 1:
            time.sleep(1.2)
            if timeout is None:
                store.wait(["raised"])
        return ctx.step

    state = SharedState()
    state.add("slow", slow, every=EACH, timeout=timeout)
    with SyncEngine(state, async_op=True, lag=2, timeout=0.6) as engine:
        for step in range(6):
            kind, text = raised_by(lambda step=step: engine.step(step))  # type: ignore[misc]
            if text:
                store.set("raised", "yes")
                return [kind, text, state["slow"], raised_by(lambda: engine.step(9))[0]]
        return [state["slow"]]


def test_a_main_process_that_computes_for_too_long_is_named_in_a_timeout() -> None:
    main, other, third = returned(run_ranks(late_main, 3, None, timeout=60.0))
    for kind, text, value, again in (main, other, third):
        assert kind == again == "SyncTimeout"
        assert "'slow'" in text
        assert "0.6 s" in text
        assert "main (rank 0)" in text or "rank 0" in text
        assert value == 0


def test_a_value_with_a_longer_timeout_of_its_own_arrives() -> None:
    assert returned(run_ranks(late_main, 3, 60.0, timeout=60.0)) == [[3]] * 3


def late_rank(rank: int, numel: int) -> list[Any]:
    """Rank 1 stops calling the engine until the others have given up."""
    store: Any = dist.distributed_c10d._get_default_store()
    state = SharedState()
    state.add("x", lambda ctx: torch.full((numel,), ctx.step), every=EACH)
    with SyncEngine(state, async_op=True, lag=2, timeout=0.6) as engine:
        for step in range(6):
            if step == 2 and rank == 1:
                store.wait(["raised/0"])
            kind, text = raised_by(lambda step=step: engine.step(step))  # type: ignore[misc]
            if text:
                store.set(f"raised/{rank}", "yes")
                return [step, kind, text, int(state["x"][0])]
    return ["nothing"]


def test_a_rank_that_comes_too_late_is_named_in_a_timeout_at_the_apply_step() -> None:
    main, late = returned(run_ranks(late_rank, 2, LARGE, timeout=60.0))
    step, kind, text, value = main
    # A launch that the late rank has taken part in arrives; the one of step 2 does not.
    assert (step, kind, value) == (4, "SyncTimeout", 1) or (step, kind, value) == (3, "SyncTimeout", 0)
    assert "rank 1" in text
    assert late[1] in ("SyncTimeout", "PeerError")


def apply_fails(rank: int, who: int) -> list[Any]:
    def apply(value: int, ctx: Context) -> None:
        if rank == who and value == 2:
            raise ValueError("no room")

    state = SharedState()
    state.add("x", lambda ctx: ctx.step, every=Every(steps=2), apply=apply)
    try:
        with SyncEngine(state, async_op=True, lag=1, timeout=PATIENCE) as engine:
            for step in range(9):
                engine.step(step)
    except Exception as error:
        return [*told(error), getattr(error, "__notes__", []), isinstance(error, PeerError)]
    return ["nothing"]


def test_an_apply_that_fails_at_the_apply_step_ends_the_engine_on_all_ranks() -> None:
    for rank, found in enumerate(returned(run_ranks(apply_fails, 3, 1))):
        kind, text, notes, of_peer = found
        if rank == 1:
            assert (kind, text) == ("ValueError", "no room")
            assert notes == ["syncstate: raised by apply of value 'x' at step 2 on rank 1"]
        else:
            assert of_peer
            assert "apply of value 'x' failed at step 2 on rank 1: ValueError: no room" in text


def test_a_teardown_that_was_interrupted_is_finished_by_the_next_call() -> None:
    state = SharedState()
    state.add("x", lambda ctx: ctx.step, every=Every(steps=1))
    engine = SyncEngine(state)
    engine.start()
    assert engine._run is not None
    flights = engine._run._refresh.flights
    abandon = flights.abandon

    def interrupted() -> None:
        raise KeyboardInterrupt

    flights.abandon = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.leave(ValueError("the first"))
    flights.abandon = abandon  # type: ignore[method-assign]
    engine.close()
    with SyncEngine(state) as second:
        assert second.start(3) == ("x",)


def test_what_a_run_that_was_interrupted_has_sent_is_not_waited_for_by_the_next() -> None:
    """The teardown of the first run is interrupted before it forgets what was collected and never computed."""
    state = SharedState()
    state.add("x", lambda ctx: ctx.collected, every=EACH, collect=lambda ctx: ctx.step, async_op=True, lag=3)
    engine = SyncEngine(state)
    engine.start()
    engine.step(1)
    assert engine._run is not None
    flights = engine._run._refresh.flights

    def interrupted() -> None:
        raise KeyboardInterrupt

    flights.abandon = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.leave(ValueError("the first"))
    engine.start(2)
    for step in range(3, 8):
        engine.step(step)
    assert state["x"] == [4]
    engine.close()
