"""Values of a node: computed by the first rank of each node, and shared there."""

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import returned, run_ranks
from torch.distributed.device_mesh import init_device_mesh

from syncstate import Context, Every, Once, SharedState, SyncEngine
from syncstate.context import generator
from syncstate.errors import SyncStateError

PATIENCE = 300.0
EACH = Every(steps=1)
Env = dict[str, str | None]


def env_of(**lists: list[Any]) -> list[Env]:
    """One mapping a rank, from a list of values for each variable."""
    names = ("GROUP_RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK")
    return [
        {name: None if name not in lists or lists[name][rank] is None else str(lists[name][rank]) for name in names}
        for rank in range(len(next(iter(lists.values()))))
    ]


# Four ranks on two nodes, as launchers tell it.
TWO_NODES = env_of(LOCAL_RANK=[0, 1, 0, 1])


def place(ctx: Context) -> list[Any]:
    return [ctx.rank, ctx.world_size, ctx.node_rank, ctx.num_nodes, ctx.is_main]


def places(rank: int) -> list[Any]:
    """Where each rank is, as an apply sees it on every rank; how often each value was computed here."""
    computed = {"node": 0, "world": 0}
    seen: dict[str, Any] = {}

    def source(name: str, ctx: Context) -> list[Any]:
        computed[name] += 1
        return [rank, *place(ctx)]

    state = SharedState()
    for name in ("node", "world"):
        state.add(
            name,
            lambda ctx, name=name: source(name, ctx),
            apply=lambda value, ctx, name=name: seen.update({name: place(ctx)}),
            every=Every(steps=2),
            scope=name,
        )
    with SyncEngine(state, timeout=PATIENCE) as engine:
        for step in range(5):
            engine.step(step)
    return [computed, state["node"], state["world"], seen["node"], seen["world"]]


@pytest.mark.parametrize(
    "env",
    [
        TWO_NODES,
        env_of(LOCAL_WORLD_SIZE=[2] * 4),
        env_of(GROUP_RANK=[0, 0, 1, 1]),
        env_of(GROUP_RANK=[5, 5, 2, 2], LOCAL_RANK=[0, 1, 2, 3], LOCAL_WORLD_SIZE=[4] * 4),
        env_of(LOCAL_RANK=[0, 1, 0, 1], LOCAL_WORLD_SIZE=[2, 2, 2, None]),
        env_of(LOCAL_RANK=[0, 3, 0, 2], GROUP_RANK=[None, 0, 0, 0]),
    ],
    ids=str,
)
def test_a_value_is_computed_once_on_each_node_and_another_once_in_the_world(env: list[Env]) -> None:
    for rank, found in enumerate(returned(run_ranks(places, 4, env=env))):
        node, local = divmod(rank, 2)
        computed, of_node, of_world, on_node, in_world = found
        assert computed == {"node": 0 if local else 3, "world": 0 if rank else 3}
        assert of_node == [2 * node, 0, 2, node, 2, True]
        assert of_world == [0, 0, 4, 0, 2, True]
        assert on_node == [local, 2, node, 2, local == 0]
        assert in_world == [rank, 4, node, 2, rank == 0]


@pytest.mark.parametrize(
    ("env", "nodes"),
    [
        (env_of(LOCAL_RANK=[None] * 4), [[0, 1, 2, 3]]),  # the same host name
        (env_of(GROUP_RANK=[0, 1, 0, 1]), [[0, 2], [1, 3]]),
        (env_of(GROUP_RANK=[0, 1, 1, 1]), [[0], [1, 2, 3]]),
        (env_of(LOCAL_WORLD_SIZE=[1] * 4), [[0], [1], [2], [3]]),
    ],
    ids=str,
)
def test_nodes_may_be_interleaved_of_different_sizes_or_of_one_rank(env: list[Env], nodes: list[list[int]]) -> None:
    found = returned(run_ranks(places, 4, env=env))
    for number, ranks in enumerate(nodes):
        for local, rank in enumerate(ranks):
            assert found[rank][1] == [ranks[0], 0, len(ranks), number, len(nodes), True]
            assert found[rank][3] == [local, len(ranks), number, len(nodes), local == 0]


def draws(rank: int, async_op: bool) -> list[Any]:
    """Random numbers, previous values and what ranks contribute, of values of the node, each with other schedules."""
    state = SharedState()
    state.add("drawn", lambda ctx: [ctx.step, float(ctx.rng.random()), ctx.previous and ctx.previous[0]],
              every=EACH, scope="node", async_op=async_op, lag=2)  # fmt: skip
    state.add("world", lambda ctx: [ctx.step, float(ctx.rng.random())], every=EACH, async_op=async_op, lag=2)
    state.add("collected", lambda ctx: [ctx.step, ctx.collected], collect=lambda ctx: [rank, ctx.rank],
              every=Every(steps=2), scope="node", async_op=async_op, lag=3)  # fmt: skip
    state.add("items", lambda ctx: [[rank, peer, ctx.step] for peer in range(ctx.world_size)], deliver="scatter",
              every=Every(steps=3), scope="node", async_op=async_op, lag=1)  # fmt: skip
    state.add("once", lambda ctx: rank, every=Once(), scope="node")
    found = []
    with SyncEngine(state, seed=7, timeout=PATIENCE) as engine:
        for step in range(12):
            if rank == 2:
                time.sleep(0.003)
            came = engine.step(step)
            found.append([sorted(came), dict(state), {name: state.info(name)[:3] for name in state}])
    return found


def test_values_of_the_node_are_the_same_asynchronous_or_blocking_with_the_same_lag() -> None:
    asynchronous = returned(run_ranks(draws, 4, True, env=TWO_NODES))
    assert asynchronous == returned(run_ranks(draws, 4, False, env=TWO_NODES))
    for rank, found in enumerate(asynchronous):
        node = rank // 2
        values, infos = found[-1][1], found[-1][2]
        assert values["drawn"] == [9, generator(7, f"drawn/node {node}", 10).random(), 8]
        assert values["world"] == [9, generator(7, "world", 10).random()]
        assert values["collected"] == [8, [[2 * node, 0], [2 * node + 1, 1]]]
        assert values["items"] == [2 * node, rank % 2, 9]
        assert values["once"] == 2 * node
        assert infos == {
            "drawn": (10, 9, 11), "world": (10, 9, 11), "collected": (5, 8, 11), "items": (4, 9, 10), "once": (1, 0, 0),
        }  # fmt: skip
        assert found == asynchronous[2 * node] or rank % 2  # the items differ


def whole_engine(rank: int) -> list[Any]:
    """The engine's own scope, its main process, and a value that differs."""
    state = SharedState()
    state.add("node", lambda ctx: rank, every=EACH)
    state.add("world", lambda ctx: rank, every=EACH, scope="world")
    with SyncEngine(state, scope="node", main=3, timeout=PATIENCE) as engine:
        engine.start()
        engine.step(1)
        return [state["node"], state["world"], engine.stats.collectives, sorted(engine.state_dict()["values"])]


def test_the_scope_of_the_engine_holds_where_a_value_has_none() -> None:
    found = returned(run_ranks(whole_engine, 4, env=TWO_NODES))
    # Values of a node are recomputed at the start, not saved.
    assert found == [[2 * (rank // 2), 3, 4, ["world"]] for rank in range(4)]


# Failures


def fails_on_a_node(rank: int, caught: bool, async_op: bool) -> list[Any]:
    """The source of a node's value fails on node 1."""

    def source(ctx: Context) -> int:
        if ctx.step == 2 and rank == 2:
            raise ValueError("boom")
        return 10 * rank + ctx.step

    state = SharedState()
    state.add("node", source, every=EACH, scope="node", async_op=async_op, lag=1)
    state.add("world", lambda ctx: ctx.step, every=EACH, async_op=async_op, lag=1)
    errors = []
    try:
        with SyncEngine(state, timeout=PATIENCE) as engine:
            for step in range(8):
                try:
                    engine.step(step)
                except SyncStateError as error:
                    errors.append([step, type(error).__name__, str(error).splitlines()[0]])
                    if not caught or errors[-1][1] != "ComputeError":
                        raise
    except SyncStateError:
        return errors
    return [*errors, [state["node"], state["world"]]]


@pytest.mark.parametrize("async_op", [False, True])
def test_a_source_that_fails_on_one_node_raises_there_and_the_other_goes_on(async_op: bool) -> None:
    found = returned(run_ranks(fails_on_a_node, 4, True, async_op, env=TWO_NODES))
    error = [3 if async_op else 2, "ComputeError", "value 'node' at step 2 on main (rank 0): ValueError: boom"]
    assert found == [[[6, 6]]] * 2 + [[error, [26, 6]]] * 2


@pytest.mark.parametrize("async_op", [False, True])
def test_where_the_error_ends_a_node_the_other_hears_of_it(async_op: bool) -> None:
    found = returned(run_ranks(fails_on_a_node, 4, False, async_op, env=TWO_NODES))
    for rank in (2, 3):
        assert found[rank][-1][1] in ("ComputeError", "PeerError")
    for rank in (0, 1):
        assert found[rank][-1][1] == "PeerError"
        assert "boom" in found[rank][-1][2]


def killed(rank: int, who: int, async_op: bool, only_node: bool) -> list[Any]:
    state = SharedState()
    state.add("node", lambda ctx: torch.full((200_000,), ctx.step), every=EACH, scope="node", async_op=async_op)
    if not only_node:
        state.add("world", lambda ctx: ctx.step, every=Every(steps=2), async_op=async_op)
    with SyncEngine(state, timeout=PATIENCE) as engine:
        for step in range(60):
            if step == 3 and rank == who:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                engine.step(step)
            except SyncStateError as error:
                return [type(error).__name__, str(error)]
            if only_node:
                time.sleep(0.05)  # the other node hears of it by looking once a second
    return ["nothing", ""]


@pytest.mark.parametrize("only_node", [False, True])
@pytest.mark.parametrize("who", [0, 2, 3])
def test_a_rank_that_is_killed_on_one_node_is_told_to_the_other(who: int, only_node: bool) -> None:
    outcomes = run_ranks(killed, 4, who, True, only_node, env=TWO_NODES, timeout=60.0)
    for outcome in outcomes:
        if outcome.rank == who:
            assert outcome.status == "died"
            continue
        assert outcome.status == "returned", str(outcome)
        assert outcome.value[0] == "PeerError", str(outcome)


def test_the_rank_that_was_killed_is_named_by_its_rank_in_the_world_or_on_its_node() -> None:
    outcomes = run_ranks(killed, 4, 3, False, True, env=TWO_NODES, timeout=60.0)
    # Rank 2 of the world sees rank 1 of node 1 die, and says on which node and who that is.
    for rank in (0, 1, 2):
        assert "on node 1 (global ranks [2, 3])" in outcomes[rank].value[1]
        assert "rank 1" in outcomes[rank].value[1]


def interrupted(rank: int) -> list[str]:
    """Rank 3 leaves by an error of its own while the others wait for nothing of it."""
    state = SharedState()
    state.add("node", lambda ctx: ctx.step, every=Every(steps=100), scope="node")
    try:
        with SyncEngine(state, timeout=PATIENCE) as engine:
            engine.start()
            for step in range(1, 80):
                if step == 3 and rank == 3:
                    raise ValueError("out of memory")
                engine.step(step)
                time.sleep(0.05)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def test_an_error_on_one_node_reaches_the_ranks_of_all_nodes() -> None:
    found = returned(run_ranks(interrupted, 4, env=TWO_NODES))
    assert found[3] == ["ValueError", "out of memory"]
    for kind, text in found[:3]:
        assert kind == "PeerError"
        assert "ValueError: out of memory" in text


# Groups


def own_groups(rank: int, split: list[list[int]], async_op: bool) -> list[Any]:
    """Disjoint groups with values of the same names at the same time."""
    group = None
    for ranks in split:
        made = dist.new_group(ranks)
        if rank in ranks:
            group = made
    if group is None:
        return []
    found = []
    state = SharedState()
    state.add("x", lambda ctx: [rank, ctx.rank, ctx.world_size, ctx.step], every=EACH)
    state.add("all", lambda ctx: ctx.collected, collect=lambda ctx: rank, every=Every(steps=2))
    with SyncEngine(state, group=group, async_op=async_op, lag=2, timeout=PATIENCE) as engine:
        for step in range(8):
            if rank % 2:
                time.sleep(0.002)
            engine.step(step)
            found.append([state["x"], state["all"]])
    return found


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("split", [[[1, 2]], [[0, 2], [1, 3]], [[3, 1], [0, 2]], [[1, 2, 3]]], ids=str)
def test_groups_share_their_values_among_themselves(split: list[list[int]], async_op: bool) -> None:
    found = returned(run_ranks(own_groups, 4, split, async_op))
    in_force = [0, 0, 0, 1, 2, 3, 4, 5]
    for ranks in split:
        members = sorted(ranks)
        for rank in members:
            assert found[rank] == [[[members[0], 0, len(ranks), s], members] for s in in_force]


def on_a_mesh(rank: int) -> list[Any]:
    """Each row of a mesh is an engine's group, and so is each column, at the same time."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    found = []
    engines = []
    for name in ("replica", "shard"):
        state = SharedState()
        state.add("x", lambda ctx: [rank, ctx.world_size, ctx.step], every=EACH)
        engines.append(SyncEngine(state, group=mesh[name], async_op=True, timeout=PATIENCE))
    for step in range(4):
        for engine in engines:
            engine.step(step)
        found.append([engine.state["x"] for engine in engines])
    for engine in engines:
        engine.close()
    return found


def test_the_rows_and_columns_of_a_mesh_are_groups() -> None:
    for rank, found in enumerate(returned(run_ranks(on_a_mesh, 4))):
        column, row = rank % 2, rank - rank % 2
        assert found == [[[column, 2, s], [row, 2, s]] for s in (0, 0, 1, 2)]


def restored(rank: int) -> list[Any]:
    """Values of a node are computed again at the start of a run that goes on, unless they are to be kept."""
    contents: list[dict[str, Any]] = []
    found = []
    for run in range(2):
        state = SharedState()
        state.add("fresh", lambda ctx, run=run: [run, rank, ctx.step], every=Every(steps=100), scope="node")  # type: ignore[misc]
        state.add("world", lambda ctx, run=run: [run, rank, ctx.step], every=Every(steps=100))  # type: ignore[misc]
        with SyncEngine(state, async_op=True, timeout=PATIENCE) as engine:
            if contents:
                engine.load_state_dict(contents[0])
            came = engine.start(3 + run)
            contents.append(engine.state_dict())
            found.append([came, state["fresh"], state["world"]])
    return found


def test_a_node_computes_its_value_again_after_a_restore() -> None:
    for rank, found in enumerate(returned(run_ranks(restored, 4, env=TWO_NODES))):
        main = 2 * (rank // 2)
        assert found == [
            [("world", "fresh"), [0, main, 3], [0, 0, 3]],
            [("fresh",), [1, main, 4], [0, 0, 3]],
        ]
