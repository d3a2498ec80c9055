"""Decisions on real ranks: all of them leave at the same step, and a request counts once."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import returned, run_ranks

from syncstate import Context, Every, SharedState, SyncEngine
from syncstate.errors import ComputeError
from syncstate.values import Decision
from syncstate.values.plateau import Plateau

EACH = Every(steps=1)


# sleap-nn#471: a stop flag and a barrier deadlocked. All ranks leave at the step in which the flag comes into force.


def train_until_stopped(rank: int, flag_rank: int, every: int) -> int:
    stop = Decision()
    state = SharedState()
    state.add("stop", stop, every=Every(steps=every))
    with SyncEngine(state) as engine:
        for step in range(1, 50):
            time.sleep(0.05 * rank)  # rank 1 is slower
            if rank == flag_rank and step == 3:
                stop.request()
            engine.step(step)
            if state["stop"]:
                break
    return step


@pytest.mark.parametrize("flag_rank", [0, 1])
@pytest.mark.parametrize(("every", "last"), [(1, 3), (5, 5)])
def test_a_flag_set_on_one_rank_makes_all_leave_at_the_same_step(flag_rank: int, every: int, last: int) -> None:
    assert returned(run_ranks(train_until_stopped, 2, flag_rank, every)) == [last, last]


# Votes


def vote(rank: int, says: list[bool]) -> dict[str, bool]:
    state = SharedState()
    for reduce in ("any", "all", "main", "majority", 0.25, 0.75):
        state.add(str(reduce), Decision(lambda ctx: says[ctx.rank], reduce=reduce))
    with SyncEngine(state) as engine:
        before = dict(state)
        engine.start()
    assert set(before.values()) == {False}  # until the first sync
    return dict(state)


@pytest.mark.parametrize(
    ("says", "decided"),
    [
        ([True, False, False, False], {"any", "main", "0.25"}),
        ([False, True, True, False], {"any", "0.25"}),
        ([False, True, True, True], {"any", "majority", "0.25", "0.75"}),
        ([True, True, True, True], {"any", "all", "main", "majority", "0.25", "0.75"}),
        ([False, False, False, False], set()),
    ],
)
def test_the_votes_of_four_ranks_decide(says: list[bool], decided: set[str]) -> None:
    for found in returned(run_ranks(vote, 4, says)):
        assert {name for name, value in found.items() if value} == decided


# Requests


def request_at(rank: int, requests: dict[int, list[int]], failing: list[int], options: dict[str, Any]) -> list[Any]:
    """The decision after each step; a second value fails at some of them."""

    def fails(ctx: Context) -> int:
        if ctx.step in failing:
            raise ValueError("boom")
        return 0

    skip = Decision()
    state = SharedState()
    state.add("skip", skip, every=EACH, **options)
    state.add("other", fails, every=EACH, **options)
    found: list[Any] = []
    with SyncEngine(state) as engine:
        engine.start()
        for step in range(1, 10):
            if step in requests.get(rank, []):
                skip.request()
            try:
                engine.step(step)
            except ComputeError:
                found.append("failed")
            else:
                found.append(step if state["skip"] else "")
    return found


def test_a_request_of_any_rank_counts_once() -> None:
    for found in returned(run_ranks(request_at, 3, {0: [2], 1: [4, 5], 2: [5]}, [], {})):
        assert found == ["", 2, "", 4, 5, "", "", "", ""]


def test_a_request_is_not_lost_when_its_sync_fails() -> None:
    for found in returned(run_ranks(request_at, 2, {1: [2], 0: [6]}, [2, 3, 6], {})):
        assert found == ["", "failed", "failed", 4, "", "failed", 7, "", ""]


@pytest.mark.parametrize("options", [{"lag": 2}, {"async_op": True, "lag": 2}], ids=["blocking", "async"])
def test_a_request_comes_into_force_once_after_the_lag_in_both_modes(options: dict[str, Any]) -> None:
    for found in returned(run_ranks(request_at, 2, {0: [2], 1: [4, 5]}, [], options)):
        assert found == ["", "", "", 4, "", 6, 7, "", ""]


# Checkpoints


def stop_and_resume(rank: int, folder: Path, keep: bool, resumed: bool) -> list[bool]:
    stop = Decision()
    state = SharedState()
    state.add("stop", stop, every=Every(steps=5), checkpoint=keep)
    with SyncEngine(state) as engine:
        if resumed:
            engine.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
            engine.start(5)
            return [state["stop"]]
        stop.request()
        engine.step(0)
        stop.request()
        engine.step(5)
        if rank == 0:
            torch.save(engine.state_dict(), folder / "state.pt")
        return [state["stop"]]


@pytest.mark.parametrize("keep", [True, False])
def test_a_resumed_run_finds_its_decision_unless_it_was_not_to_be_saved(tmp_path: Path, keep: bool) -> None:
    assert returned(run_ranks(stop_and_resume, 2, tmp_path, keep, False)) == [[True], [True]]
    assert returned(run_ranks(stop_and_resume, 2, tmp_path, keep, True)) == [[keep], [keep]]


LOSSES = [5.0, 4.0, 4.5, 3.0, 3.5, 3.2, 3.1, 3.0]


def wait_for_better(rank: int, folder: Path, first: int, saved_at: int | None) -> list[bool]:
    """Main's metric decides; the other rank's is worse and worse."""
    plateau = Plateau(lambda ctx: LOSSES[ctx.step] if ctx.is_main else float(ctx.step), patience=3)
    state = SharedState()
    state.add("stop", Decision(plateau, reduce="main"), every=EACH)
    found = []
    with SyncEngine(state) as engine:
        if first:
            engine.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
        for step in range(first, len(LOSSES)):
            engine.step(step)
            found.append(state["stop"])
            if step == saved_at and rank == 0:
                torch.save(engine.state_dict(), folder / "state.pt")
    return found


def test_patience_goes_on_in_a_resumed_run(tmp_path: Path) -> None:
    unbroken = [False, False, False, False, False, False, True, True]
    assert returned(run_ranks(wait_for_better, 2, tmp_path, 0, 4)) == [unbroken] * 2
    assert returned(run_ranks(wait_for_better, 2, tmp_path, 5, None)) == [unbroken[5:]] * 2


# A wrong predicate


def vote_badly(rank: int) -> list[str]:
    state = SharedState({"stop": Decision(lambda ctx: None if ctx.rank else False)})  # type: ignore[arg-type, return-value]
    with SyncEngine(state) as engine, pytest.raises(ComputeError) as caught:
        engine.start()
    return str(caught.value).splitlines()[:1]


def test_a_predicate_that_says_nothing_is_an_error_on_all_ranks_that_names_the_rank() -> None:
    line = (
        "value 'stop' at step 0: collect failed on rank 1: ConfigError: Decision: the predicate must return true or "
        "false, got None"
    )
    assert returned(run_ranks(vote_badly, 2)) == [[line], [line]]
