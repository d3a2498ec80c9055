"""Who is who: looked up in the process group and in the launcher's environment."""

import re
from typing import Any

import pytest
import torch.distributed as dist
from ranks import returned, run_ranks
from torch.distributed.device_mesh import init_device_mesh

from syncstate.errors import ConfigError
from syncstate.topology import Topology, find_topology

LAUNCHER = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


def test_a_single_process_is_a_group_of_one() -> None:
    assert find_topology() == find_topology("single") == Topology()
    assert Topology().is_main


def test_several_processes_without_a_group_are_not_several_groups_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    message = (
        "WORLD_SIZE is 4 but torch.distributed is not initialized: call torch.distributed.init_process_group first, "
        "or give group='single' to share nothing"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        find_topology()
    assert find_topology("single").world_size == 1


def test_what_is_no_number_in_the_environment_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "many")
    monkeypatch.setenv("LOCAL_RANK", "")
    assert find_topology() == Topology()


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ("all", "group must be a ProcessGroup, a one-dimensional DeviceMesh or 'single', got 'all'"),
        (object(), "group was given but torch.distributed is not initialized"),
    ],
)
def test_an_impossible_group_is_refused(group: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        find_topology(group)


def test_main_must_be_in_the_group() -> None:
    with pytest.raises(ConfigError, match=r"^main must be a global rank of the group, one of \[0\], got 1$"):
        find_topology(main=1)


# On real ranks


def world(rank: int, main: int | None) -> Topology:
    return find_topology(main=main)


def test_the_world_has_global_rank_0_or_the_given_one_as_main() -> None:
    for main in (None, 0, 2):
        found = returned(run_ranks(world, 3, main))
        assert [t.rank for t in found] == [0, 1, 2]
        assert {(t.world_size, t.main, t.global_ranks) for t in found} == {(3, main or 0, (0, 1, 2))}
        assert [t.is_main for t in found] == [r == (main or 0) for r in range(3)]


def refusal(group: Any, main: int | None = None) -> str:
    try:
        find_topology(group, main)
    except ConfigError as error:
        return str(error)
    return "accepted"


def sub_groups(rank: int) -> tuple[Topology | str, str, Topology]:
    """Two groups of two in a world of four, one of them asked for as 3, 1, which torch sorts."""
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    mine, other = groups[rank % 2], groups[1 - rank % 2]
    last = find_topology(mine, main=2 if rank % 2 == 0 else 3)
    return find_topology(mine), refusal(other), last


def test_a_sub_group_has_ranks_of_its_own_and_its_first_one_as_main() -> None:
    found = returned(run_ranks(sub_groups, 4))
    even, odd = (0, 2), (1, 3)
    for rank, (mine, _, last) in enumerate(found):
        members = odd if rank % 2 else even
        assert isinstance(mine, Topology)
        assert (mine.rank, mine.world_size, mine.global_ranks) == (members.index(rank), 2, members)
        assert (mine.main, last.main) == (0, 1)
        assert mine.is_main == (rank == members[0])
        assert last.is_main == (rank == members[1])


def test_a_group_without_this_rank_is_refused() -> None:
    for rank, (_, refused, _) in enumerate(returned(run_ranks(sub_groups, 4))):
        assert refused.startswith("group must be a ProcessGroup that this process is a member of")
        assert refused.endswith(f"on global rank {rank}")


def meshes(rank: int) -> tuple[Topology, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return find_topology(mesh["replicate"]), refusal(mesh)


def test_a_mesh_of_one_dimension_is_a_group_and_one_of_two_is_refused() -> None:
    for rank, (replicate, refused) in enumerate(returned(run_ranks(meshes, 4))):
        assert replicate.global_ranks == (rank % 2, rank % 2 + 2)
        assert replicate.rank == rank // 2
        assert refused == "group: a DeviceMesh must have one dimension, got 2; pass mesh['name']"


def single(rank: int) -> Topology:
    return find_topology("single")


def test_single_is_this_process_alone_also_in_a_world() -> None:
    for rank, alone in enumerate(returned(run_ranks(single, 2))):
        assert (alone.rank, alone.world_size, alone.main, alone.global_ranks) == (0, 1, 0, (rank,))


def places(rank: int) -> tuple[int, int, int]:
    here = find_topology()
    return here.local_rank, here.node_rank, here.num_nodes


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ([{}] * 4, [(0, 0, 1), (1, 0, 1), (2, 0, 1), (3, 0, 1)]),
        (
            [{"LOCAL_RANK": str(r % 2), "LOCAL_WORLD_SIZE": "2"} for r in range(4)],
            [(0, 0, 2), (1, 0, 2), (0, 1, 2), (1, 1, 2)],
        ),
        (
            # The agent's own number of a node wins over the arithmetic.
            [{"LOCAL_RANK": str(r % 2), "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": str(1 - r // 2)} for r in range(4)],
            [(0, 1, 2), (1, 1, 2), (0, 0, 2), (1, 0, 2)],
        ),
        ([{"LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None}] * 4, [(0, 0, 1)] * 4),
    ],
    ids=["one node", "two nodes", "agent", "no launcher"],
)
def test_the_place_on_the_nodes_comes_from_the_launcher(
    env: list[dict[str, str | None]], expected: list[tuple[int, int, int]]
) -> None:
    assert returned(run_ranks(places, 4, env=env)) == expected
