"""Sharded parameters: the local shard is compared, with the ranks that hold the same one; nothing is claimed beyond."""

import time
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from exact import tensor_bits
from ranks import returned, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from syncstate import Every, SyncEngine
from syncstate.errors import ConfigError, MismatchError
from syncstate.resync import ParameterResync, TensorDrift
from syncstate.resync.modes import Talk

EACH = Every(steps=1)


def hybrid(rank: int, mode: str) -> Any:
    """Two replicas, each sharded over two ranks: 0 and 2 hold the same shards, 1 and 3 too."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(10, 7), nn.BatchNorm1d(7))  # 7 rows: the shards are not of one size
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(4, 10, generator=torch.Generator().manual_seed(1))).square().sum().backward()
    optimizer.step()
    with ParameterResync(net, every=EACH, mode=mode, optimizer=optimizer, timeout=30) as resync:
        equal = resync.run(0)
        local = net[0].weight.to_local()
        want, pointer = local.clone(), local.data_ptr()
        if rank in (2, 3):
            with torch.no_grad():
                local[1, 1] += rank
        if rank == 3:
            net[1].running_mean[2] += 3
            optimizer.state[net[0].weight]["exp_avg"].to_local()[0] += 2
        report, again = resync.run(1), resync.run(2)
    local = net[0].weight.to_local()
    same = torch.equal(local, want), local.data_ptr() == pointer, type(net[0].weight).__name__
    return equal.drifted, report.drifted, again.drifted, report == again, same, (equal.bytes_sent, report.bytes_sent)


def test_replicas_of_shards_are_repaired_and_every_rank_has_the_whole_report() -> None:
    found = returned(run_ranks(hybrid, 4, "repair"))
    for equal, drifted, again, _, same, sent in found:
        assert equal == []
        assert again == []
        assert same == (True, True, "DTensor")
        assert [(drift.name, drift.ranks) for drift in drifted] == [
            ("0.weight", (2, 3)),
            ("1.running_mean", (3,)),
            ("optimizer.state.0.weight.exp_avg", (3,)),
        ]
        assert [drift.max_abs_diff for drift in drifted] == pytest.approx([3.0, 3.0, 2.0])
        assert sent == found[0][-1]


def test_an_average_of_shards_is_taken_over_their_replicas() -> None:
    for rank, (_, drifted, again, *_, same, _sent) in enumerate(returned(run_ranks(hybrid, 4, "average"))):
        assert drifted == again == []
        assert same == (False, True, "DTensor"), rank


def takes_state_from_main(rank: int) -> Any:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net: Any = nn.Linear(10, 7)
    fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(2, 10)).sum().backward()
    if rank < 2:
        optimizer.step()
    with ParameterResync(net, every=EACH, optimizer=optimizer, timeout=30) as resync:
        first, second = resync.run(0), resync.run(1)
    state = optimizer.state[net.weight]
    kinds = {key: type(value).__name__ for key, value in state.items()}
    return len(first.drifted), second.drifted, kinds, tensor_bits(state["exp_avg"].to_local())


def test_state_that_one_replica_lacks_is_added_as_shards() -> None:
    found = returned(run_ranks(takes_state_from_main, 4))
    assert [result[:2] for result in found] == [(8, [])] * 4  # two parameters, and three states of each
    assert all(
        result[2] == {"step": "Tensor", "exp_avg": "DTensor", "exp_avg_sq": "DTensor"} for result in found
    )  # fmt: skip
    assert found[0][3] == found[2][3]
    assert found[1][3] == found[3][3]


def shards_all(rank: int) -> Any:
    from torch.distributed.fsdp import fully_shard

    net: Any = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8))
    fully_shard(net[0], mesh=init_device_mesh("cpu", (2,)))
    with ParameterResync(net, every=EACH, timeout=30) as resync:
        if rank == 1:
            net[1].running_mean[0] = 4
        partly = resync.run(0)
    with pytest.raises(ConfigError) as caught, ParameterResync(net[0], every=EACH, timeout=30) as resync:
        resync.run(0)
    return partly.drifted, partly.unreplicated, str(partly).splitlines()[-1], str(caught.value)


def test_where_nothing_is_replicated_it_says_so() -> None:
    told = (
        [TensorDrift("1.running_mean", (1,), 4.0)],
        ("0.bias", "0.weight"),
        "  not compared, because no other rank of the group holds them: 0.bias, 0.weight (2 tensors)",
        "resync: nothing is replicated: each of the 2 tensors is sharded over all ranks of the group, so there is "
        "nothing to compare. Shard over one dimension of a device mesh and replicate over another, or leave out the "
        "resync",
    )
    assert returned(run_ranks(shards_all, 2)) == [told, told]


def replicates(rank: int) -> Any:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    whole = DTensor.from_local(torch.zeros(3), mesh, [Replicate(), Replicate()])
    # Sharded over ranks that are not in the group: all of the group hold the same.
    part = DTensor.from_local(torch.full((3,), float(rank % 2)), mesh["model"], [Shard(0)])
    if rank == 2:
        whole.to_local()[0] = 1
        part.to_local()[1] = 5
    with ParameterResync({"whole": whole}, every=EACH, timeout=30) as resync:
        first = resync.run(0)
    with ParameterResync({"part": part}, every=EACH, group=mesh["data"], timeout=30) as resync:
        second = resync.run(0)
    return first.drifted, second.drifted, part.to_local().tolist()


def test_what_a_mesh_replicates_or_a_group_does_is_compared_as_a_whole() -> None:
    found = returned(run_ranks(replicates, 4))
    for rank, (whole, part, local) in enumerate(found):
        assert whole == [TensorDrift("whole", (2,), 1.0)]
        assert part == ([TensorDrift("part", (1,), 5.0)] if rank in (0, 2) else [])
        assert local == [float(rank % 2)] * 3


def sums(rank: int) -> str:
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (2,))
    part = DTensor.from_local(torch.zeros(3), mesh, [Partial()])
    with pytest.raises(ConfigError) as caught:
        ParameterResync({"part": part}, every=EACH, timeout=30).run(0)
    return str(caught.value)


def test_parts_of_a_sum_are_refused() -> None:
    for told in returned(run_ranks(sums, 2)):
        assert told.startswith("resync: 'part' is a DTensor whose ranks hold parts of a sum (P")


def places_differ(rank: int) -> str:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    placement = [Replicate(), Shard(0)] if rank != 3 else [Shard(0), Shard(0)]
    part = DTensor.from_local(torch.zeros(2), mesh, placement)
    with pytest.raises(MismatchError) as caught:
        ParameterResync({"part": part}, every=EACH, timeout=30).run(0)
    return str(caught.value)


def test_shards_laid_out_in_another_way_are_a_mismatch_on_all_ranks() -> None:
    found = returned(run_ranks(places_differ, 4))
    assert len(set(found)) == 1
    assert found[0].splitlines()[1].startswith("  tensors.part: ")


def wraps_in_the_first_fsdp(rank: int) -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel

    net = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    with pytest.raises(ConfigError) as caught:
        ParameterResync(net, every=EACH, timeout=30).run(0)
    dist.barrier()
    return str(caught.value)


def test_the_first_fsdp_is_refused() -> None:
    for told in returned(run_ranks(wraps_in_the_first_fsdp, 2)):
        assert told.startswith("resync: the module is sharded by FullyShardedDataParallel, which does not tell")


def fails_in_a_cohort(rank: int) -> Any:
    """Ranks 1 and 3 hold the same shards; rank 3 fails while rank 1 waits for it alone."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net: Any = nn.Linear(10, 7)
    fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    engine = SyncEngine(resync=ParameterResync(net, every=EACH), timeout=30)
    run, talk_class = Talk.run, cast(Any, Talk)

    def fail(talk: Talk, items: list[Any], *rest: Any) -> Any:
        if rank == 3 and any(item.cohort for item in items):
            raise LookupError("no data")
        return run(talk, items, *rest)

    talk_class.run = fail
    try:
        with engine:
            engine.start()
            for step in range(1, 30):
                engine.step(step)
                time.sleep(0.2)  # the ranks of the other cohort hear of it within a second
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        talk_class.run = run
    return None


def test_a_failure_inside_a_cohort_reaches_its_other_ranks_with_the_cause() -> None:
    *others, culprit = returned(run_ranks(fails_in_a_cohort, 4))
    assert culprit == ("LookupError", "no data")
    for told in others:
        assert told[0] == "PeerError"
        assert "rank 3" in told[1]
        assert "LookupError: no data" in told[1]
