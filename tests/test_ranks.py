"""What the other tests rely on: the harness tells truly what became of each rank, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Outcome, returned, run_ranks


class Picky(RuntimeError):
    """Cannot be rebuilt from its args, as many real exceptions cannot."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"code {code} at {where}")


def total(rank: int, factor: int) -> float:
    x = torch.tensor(float((rank + 1) * factor))
    dist.all_reduce(x)
    return x.item()


def test_values_come_back_in_rank_order() -> None:
    assert returned(run_ranks(own_rank, 4)) == [0, 1, 2, 3]


def own_rank(rank: int) -> int:
    assert dist.get_rank() == rank
    return rank


@pytest.mark.parametrize("store", ["file", "tcp"])
def test_the_default_group_reduces_over_all_ranks(store: Any) -> None:
    assert returned(run_ranks(total, 3, 10, store=store)) == [60.0, 60.0, 60.0]


def test_a_single_rank_is_a_group_of_one() -> None:
    assert returned(run_ranks(total, 1, 7)) == [7.0]


def test_tensors_come_back_by_value() -> None:
    values = returned(run_ranks(some_tensor, 2))
    assert [v.tolist() for v in values] == [[0, 0, 0], [1, 1, 1]]


def some_tensor(rank: int) -> torch.Tensor:
    return torch.full((3,), rank)


def test_without_init_there_is_no_group_and_the_environment_suffices_to_make_one() -> None:
    assert returned(run_ranks(init_by_environment, 2, init=False)) == [(False, 30.0)] * 2


def init_by_environment(rank: int) -> tuple[bool, float]:
    before = dist.is_initialized()
    dist.init_process_group("gloo")
    return before, total(rank, 10)


def test_an_exception_is_told_with_class_bases_message_and_traceback() -> None:
    first, second = run_ranks(fail_on_one, 2)
    assert (first.status, first.value, first.exitcode) == ("returned", "fine", 0)
    assert (second.status, second.error, second.exitcode) == ("raised", "Picky", 1)
    assert second.mro == ["Picky", "RuntimeError", "Exception", "BaseException", "object"]
    assert second.message == "code 7 at the door"
    assert "in fail_on_one" in second.traceback
    assert "KeyError: 'cause'" in second.traceback


def fail_on_one(rank: int) -> str:
    if rank == 1:
        try:
            raise KeyError("cause")
        except KeyError as cause:
            raise Picky(7, where="the door") from cause
    return "fine"


def test_system_exit_is_an_exception_like_others() -> None:
    outcomes = run_ranks(leave_early, 2)
    assert [(o.status, o.error, o.message) for o in outcomes] == [("raised", "SystemExit", "4")] * 2


def leave_early(rank: int) -> None:
    sys.exit(4)


def test_a_value_that_cannot_be_pickled_is_an_exception() -> None:
    (outcome,) = run_ranks(unpicklable, 1)
    assert outcome.status == "raised"
    assert "lambda" in outcome.message


def unpicklable(rank: int) -> Any:
    return lambda: rank


def test_a_killed_rank_died_by_its_signal_and_the_others_report() -> None:
    victim, witness = run_ranks(die_or_watch, 2)
    assert (victim.status, victim.exitcode, victim.value) == ("died", -9, None)
    assert (witness.status, witness.error) == ("raised", "RuntimeError")


def die_or_watch(rank: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def test_a_rank_that_leaves_by_itself_died_with_its_exit_code() -> None:
    assert [(o.status, o.exitcode) for o in run_ranks(vanish, 2)] == [("died", 5)] * 2


def vanish(rank: int) -> None:
    os._exit(5)


def test_an_abort_leaves_its_stack_in_the_output() -> None:
    (outcome,) = run_ranks(abort, 1)
    assert (outcome.status, outcome.exitcode) == ("died", -signal.SIGABRT)
    assert "in abort" in outcome.stderr


def abort(rank: int) -> None:
    os.abort()


def test_a_hung_rank_is_killed_and_shows_where_it_stood_in_every_thread() -> None:
    hung, other = run_ranks(hang_on_one, 2, timeout=1.0)
    assert (hung.status, hung.exitcode) == ("hung", None)
    assert "in wait_in_vain" in hung.stacks
    assert "in wait_beside" in hung.stacks
    assert (other.status, other.value, other.stacks) == ("returned", None, "")


def hang_on_one(rank: int) -> None:
    if rank == 0:
        threading.Thread(target=wait_beside, daemon=True).start()
        wait_in_vain()


def wait_in_vain() -> None:
    threading.Event().wait()


def wait_beside() -> None:
    threading.Event().wait()


def test_a_rank_stuck_in_a_collective_is_hung_too() -> None:
    hung, other = run_ranks(reduce_alone, 2, timeout=1.0)
    assert hung.status == "hung"
    assert "in reduce_alone" in hung.stacks
    assert other.status == "returned"


def reduce_alone(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(1))


def test_seconds_are_those_inside_the_function() -> None:
    quick, slow = run_ranks(linger_on_one, 2)
    assert slow.seconds >= slow.value > quick.value == 0.0
    assert quick.seconds >= 0.0


def linger_on_one(rank: int) -> float:
    began = time.monotonic()
    if rank == 0:
        return 0.0
    time.sleep(0.05)
    return time.monotonic() - began


def test_a_function_that_no_module_holds_is_refused_at_once() -> None:
    with pytest.raises(Exception, match="pickle"):
        run_ranks(lambda rank: None, 2)


def test_a_failure_before_the_function_is_reported_by_every_rank() -> None:
    outcomes = run_ranks(total, 2, Unloadable())
    assert [(o.status, o.error, o.message) for o in outcomes] == [("raised", "ValueError", "not here")] * 2


class Unloadable:
    def __reduce__(self) -> Any:
        return refuse, (os.getpid(),)


def refuse(pid: int) -> None:
    raise ValueError("not here")


def test_returned_fails_with_everything_that_is_known() -> None:
    outcomes = run_ranks(three_ways, 3, timeout=2.0)
    with pytest.raises(AssertionError) as failure:
        returned(outcomes)
    text = str(failure.value)
    assert text.startswith("ranks [1, 2] of 3 did not return")
    for part in (
        "rank 0 returned",
        "rank 1 raised",
        "ZeroDivisionError",
        "last words",
        "rank 2 hung",
        "in wait_in_vain",
    ):
        assert part in text


def three_ways(rank: int) -> None:
    if rank == 1:
        print("last words of 1", file=sys.stderr)
        1 / 0  # noqa: B018
    if rank == 2:
        wait_in_vain()


def test_an_outcome_is_frozen() -> None:
    outcome = Outcome(rank=0, status="returned")
    with pytest.raises(AttributeError):
        outcome.value = 1  # type: ignore[misc]
