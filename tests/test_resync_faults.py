"""What every rank sees when something goes wrong in a resync, and what works afterwards."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import returned, run_ranks
from torch import Tensor

from syncstate import Every
from syncstate.errors import DriftError, PeerError, SyncStateError
from syncstate.resync import DriftReport, ParameterResync, transfer

EACH = Every(steps=1)
# Longer than any of these runs may take: whoever waits for a timeout has hung.
PATIENCE = 300.0


def told(call: Callable[[], object]) -> tuple[str, str]:
    """Class and text of the error of a call, which must raise one of the package's."""
    try:
        call()
    except SyncStateError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def group_works() -> bool:
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item() == dist.get_world_size()


def dies_in_a_transfer(rank: int, mode: str, who: int) -> Any:
    tensors = {f"x{i}": torch.full((50_000,), float(rank)) for i in range(20)}

    def die(name: str, view: Tensor, came: Tensor, rank: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == who:
        # Everybody is in the middle of it: buckets have come, others are on their way.
        transfer.write = die
    resync = ParameterResync(tensors, every=EACH, mode=mode, timeout=PATIENCE, bucket_bytes=100_000)
    first = told(lambda: resync.run(0))
    again = told(lambda: resync.run(1))
    resync.close()
    return first, again


@pytest.mark.parametrize("mode", ["repair", "copy"])
def test_a_rank_that_is_killed_in_the_middle_is_named_by_all_others(mode: str) -> None:
    outcomes = run_ranks(dies_in_a_transfer, 4, mode, 2, timeout=40)
    assert [outcome.status for outcome in outcomes] == ["returned", "returned", "died", "returned"]
    for outcome in outcomes[:2] + outcomes[3:]:
        first, again = outcome.value
        assert first[0] == "PeerError"
        assert "rank 2" in first[1]
        assert "resync at step 0" in first[1]
        assert again == first


def stays_away(rank: int) -> Any:
    tensors = {"x": torch.full((10,), float(rank))}
    resync = ParameterResync(tensors, every=EACH, timeout=1.5)
    resync.run(0)
    if rank == 1:
        time.sleep(5)
    first = told(lambda: resync.run(1))
    dist.barrier()
    works = group_works()
    resync.close()
    again = len(resync.run(2).drifted)
    resync.close()
    return first, works, again


def test_a_rank_that_does_not_come_is_named_and_all_can_begin_again() -> None:
    (ours, *rest), (late, *others) = returned(run_ranks(stays_away, 2))
    assert ours[0] == "SyncTimeout"
    assert "resync at step 1: rank 0 waited 1.5 s; rank 1 did not report" in ours[1]
    assert late == ours
    assert rest == others == [True, 0]


def never_starts(rank: int) -> Any:
    if rank == 1:
        time.sleep(2)
        return None
    return told(lambda: ParameterResync({"x": torch.zeros(1)}, every=EACH, timeout=1).run(0))


def test_a_rank_that_never_starts_is_named() -> None:
    first, _ = returned(run_ranks(never_starts, 2))
    assert first[0] == "SyncTimeout"
    assert "rank 1 did not arrive within 1 s" in first[1]


def fails_alone(rank: int) -> Any:
    tensors: dict[str, Any] = {"x": torch.zeros(3)}
    resync = ParameterResync(tensors, every=EACH, timeout=PATIENCE)
    resync.run(0)
    if rank == 1:
        tensors["x"] = torch.zeros(3).to_sparse()
    return told(lambda: resync.run(1)), told(lambda: resync.run(2)), group_works()


def test_what_one_rank_cannot_compare_is_told_to_all() -> None:
    ours, theirs = returned(run_ranks(fails_alone, 2))
    cause = (
        "resync: 'x' is a tensor of layout torch.sparse_coo, whose bits cannot be compared; leave it out with exclude"
    )
    assert theirs == (("ConfigError", cause), ("ConfigError", cause), True)
    text = f"rank 1 failed in the resync at step 1: ConfigError: {cause}"
    assert ours == (("PeerError", text), ("PeerError", text), True)


def fails_before_it_starts(rank: int) -> Any:
    module = {"x": torch.zeros(3)} if rank == 0 else None
    return told(lambda: ParameterResync(module, every=EACH, timeout=PATIENCE).run(0))


def test_a_rank_that_fails_before_it_starts_is_heard() -> None:
    cause = "resync: no module was given, and there is no host whose model could be taken"
    assert returned(run_ranks(fails_before_it_starts, 2)) == [
        ("PeerError", f"start: rank 1 failed before it had started: ConfigError: {cause}"),
        ("ConfigError", cause),
    ]


def frees_its_memory(rank: int, mode: str) -> Any:
    module = {"a": torch.zeros(3), "b": torch.zeros(40)}
    resync = ParameterResync(module, every=EACH, mode=mode, timeout=60)
    resync.run(0)
    if rank == 1:
        module["b"].untyped_storage().resize_(0)
    return told(lambda: resync.run(1))


@pytest.mark.parametrize("mode", ["check", "copy", "average"])
def test_a_tensor_whose_memory_was_freed_is_an_error_on_all_ranks_and_no_crash(mode: str) -> None:
    cause = (
        "resync: 'b' is a tensor whose memory was freed, or that never had any; resync while it is there, or leave it "
        "out with exclude"
    )
    first, second = returned(run_ranks(frees_its_memory, 2, mode))
    assert second == ("ConfigError", cause)
    assert first == ("PeerError", f"rank 1 failed in the resync at step 1: ConfigError: {cause}")


def expands_on_one_rank(rank: int) -> Any:
    rows = torch.tensor([0.0, 0.0, 0.0]) if rank == 1 else torch.tensor([1.0, 2.0, 3.0])
    module = {"x": rows[:1].expand(3) if rank == 1 else rows}
    resync = ParameterResync(module, every=EACH, mode="average", timeout=PATIENCE)
    return told(lambda: [resync.run(0), resync.run(1)])


def test_a_mean_that_an_expanded_tensor_cannot_hold_is_an_error_that_names_it() -> None:
    first, second = returned(run_ranks(expands_on_one_rank, 2))
    assert second[0] == "MismatchError"
    assert second[1].startswith("resync: 'x' is an expanded tensor on rank 1, whose elements share their memory")
    assert first == second


def declines_often(rank: int, times: int) -> Any:
    """Rank 1 fails some times by itself before rank 0 comes and tries as often; then all go on together."""
    good = {"x": torch.zeros(3)}
    found: list[Any] = []
    if rank == 1:
        bad = {"x": torch.zeros(3).to_sparse()}
        found = [told(lambda: ParameterResync(bad, every=EACH, timeout=60).run(0))[0] for _ in range(times)]
    dist.barrier()
    if rank == 0:
        found = [told(lambda: ParameterResync(good, every=EACH, timeout=60).run(0)) for _ in range(times)]
    dist.barrier()
    for step in range(2):
        with ParameterResync(good, every=EACH, timeout=60) as resync:
            found.append(resync.run(step).drifted)
    return found


def test_a_rank_that_failed_alone_several_times_is_heard_as_often_and_forgotten_afterwards() -> None:
    first, second = returned(run_ranks(declines_often, 2, 3, timeout=30.0))
    assert second == ["ConfigError"] * 3 + [[], []]
    *failed, once, again = first
    assert (once, again, len(failed)) == ([], [], 3)
    for kind, text in failed:
        assert kind == "PeerError"
        assert text.startswith("start: rank 1 failed before it had started: ConfigError: resync: 'x' is a tensor of")


def callback_fails(rank: int) -> Any:
    def on_drift(report: DriftReport) -> None:
        if rank == 1:
            raise ValueError("not this one")

    resync = ParameterResync({"x": torch.full((3,), float(rank))}, every=EACH, on_drift=on_drift, timeout=PATIENCE)
    if rank == 1:
        with pytest.raises(ValueError, match=r"^not this one$"):
            resync.run(0)
        return None
    assert len(resync.run(0).drifted) == 1
    return told(lambda: resync.run(1))


def test_a_callback_that_fails_on_one_rank_is_told_to_the_others() -> None:
    first, _ = returned(run_ranks(callback_fails, 2))
    assert first == ("PeerError", "rank 1 failed in the resync at step 0: ValueError: not this one")


def block_ends_with_an_error(rank: int) -> Any:
    tensors = {"x": torch.full((3,), float(rank))}
    if rank == 1:
        with pytest.raises(ZeroDivisionError):
            _divide(tensors)
        return tensors["x"].tolist()
    with pytest.raises(PeerError) as caught:
        _go_on(tensors)
    return str(caught.value), tensors["x"].tolist()


def _go_on(tensors: dict[str, Tensor]) -> None:
    with _resync(tensors) as resync:
        resync.run(0)
        tensors["x"][0] = 7
        for step in range(1, 100):  # nothing due: the news comes all the same
            resync.step(1000 * step)
            time.sleep(0.1)


def _resync(tensors: dict[str, Tensor]) -> ParameterResync:
    return ParameterResync(tensors, every=Every(steps=1 << 40, start=1 << 30), mode="average", timeout=PATIENCE)


def _divide(tensors: dict[str, Tensor]) -> None:
    with _resync(tensors) as resync:
        resync.run(0)
        tensors["x"][0] = 9
        raise ZeroDivisionError("by zero")


def test_nothing_is_averaged_while_an_exception_is_in_flight_and_the_others_hear_of_it() -> None:
    (text, ours), theirs = returned(run_ranks(block_ends_with_an_error, 2))
    assert text == "rank 1 failed in the resync at step 0: ZeroDivisionError: by zero"
    assert ours == [7.0, 0.5, 0.5]
    assert theirs == [9.0, 0.5, 0.5]


def leaves_early(rank: int) -> Any:
    resync = ParameterResync({"x": torch.zeros(3)}, every=EACH, timeout=PATIENCE)
    resync.step(0)
    if rank == 1:
        resync.close()
        return None
    return told(lambda: resync.step(1))


def test_a_rank_that_leaves_early_is_named() -> None:
    first, _ = returned(run_ranks(leaves_early, 2))
    assert first[0] == "PeerError"
    assert "rank 1 ended at step 0" in first[1]


def raises_drift(rank: int) -> Any:
    tensors = {"x": torch.full((3,), float(rank))}
    with pytest.raises(DriftError), ParameterResync(tensors, every=EACH, on_drift="raise", timeout=PATIENCE) as resync:
        resync.run(0)
    with ParameterResync(tensors, every=EACH, timeout=PATIENCE) as resync:
        return resync.run(1).drifted, group_works()


def test_after_a_drift_was_raised_through_the_block_another_resync_works() -> None:
    assert returned(run_ranks(raises_drift, 3)) == [([], True)] * 3


def two_at_once(rank: int) -> Any:
    a, b = {"a": torch.full((3,), float(rank))}, {"b": torch.full((3,), float(rank))}
    with (
        ParameterResync(a, every=EACH, timeout=PATIENCE) as first,
        ParameterResync(b, every=EACH, mode="average", timeout=PATIENCE) as second,
    ):
        for step in range(3):
            first.step(step)
            second.step(step)
    return a["a"].tolist(), b["b"].tolist()


def test_two_live_in_one_process() -> None:
    assert returned(run_ranks(two_at_once, 2)) == [([0.0] * 3, [0.5] * 3)] * 2


def in_a_group(rank: int) -> Any:
    group = dist.new_group([1, 2], use_local_synchronization=True) if rank else None
    if rank == 0:
        return None
    tensors = {"x": torch.full((3,), float(rank))}
    with ParameterResync(tensors, every=EACH, group=group, timeout=PATIENCE) as resync:
        return resync.run(0).drifted[0].ranks, tensors["x"].tolist()


def test_a_group_counts_its_own_ranks_and_asks_nobody_else() -> None:
    assert returned(run_ranks(in_a_group, 3)) == [None, ((1,), [1.0] * 3), ((1,), [1.0] * 3)]


def all_are_wrong(rank: int) -> Any:
    if rank:
        time.sleep(0.3)
    resync = ParameterResync({"x": torch.zeros(1)}, every=EACH, exclude="y", timeout=PATIENCE)
    return told(lambda: resync.run(0)), group_works()


def test_what_is_wrong_on_all_ranks_each_says_itself() -> None:
    cause = "resync: exclude: 'y' matches no parameter, buffer or module; the names are x"
    assert returned(run_ranks(all_are_wrong, 3)) == [(("ConfigError", cause), True)] * 3
