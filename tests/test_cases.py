"""What people reported who shared state by hand, each as a test of what must hold instead.

The numbers in the comments are the public reports.
"""

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from exact import identical, tensor_bits
from ranks import returned, run_ranks
from test_codec import DTYPES

from syncstate import Context, Every, SharedState, SyncEngine
from syncstate.errors import ComputeError
from syncstate.values import SampledIndices

EACH = Every(steps=1)


# accelerate#1821: a broadcast inside a function that only main ran, and its result lost.


def everyday_values() -> dict[str, Any]:
    return {
        "number": 0.1,
        "text": "über",
        "none": None,
        "flag": True,
        "path": pathlib.Path("runs/1"),
        "nested": {"indices": [3, 1, 2], "weights": torch.tensor([0.5, 0.25]), "more": {"a": (1, None)}},
    }


def share_everyday_values(rank: int) -> list[Any]:
    computed: list[str] = []

    def source(name: str, make: Callable[[Context], Any]) -> Callable[[Context], Any]:
        def compute(ctx: Context) -> Any:
            computed.append(name)
            return make(ctx)

        return compute

    state = SharedState()
    for name in everyday_values():
        state.add(name, source(name, lambda ctx, name=name: everyday_values()[name]))  # type: ignore[misc]
    state.add("sampled", source("sampled", lambda ctx: ctx.rng.choice(64, 8, replace=False)))
    state.add("ready-made", SampledIndices(64, 8))
    with SyncEngine(state) as engine:
        engine.start()
    same = all(identical(state[name], value) for name, value in everyday_values().items())
    return [len(computed), same, state["sampled"].tolist(), state["ready-made"].tolist()]


def test_main_computes_once_and_every_rank_gets_the_value_whatever_its_type() -> None:
    main, peer = returned(run_ranks(share_everyday_values, 2))
    assert (main[0], peer[0]) == (7, 0)
    assert main[1:] == peer[1:]
    same, sampled, ready_made = main[1:]
    assert same
    for indices in (sampled, ready_made):
        assert len(set(indices)) == 8
        assert set(indices) <= set(range(64))


# lightning#18148: reading a property on rank 0 hid a collective and froze the run.


def read_while_the_peer_waits(rank: int) -> list[Any]:
    """Rank 1 stays away from the engine until rank 0 has read everything; what communicates would never return."""
    state = SharedState()
    handle = state.add("x", lambda ctx: torch.full((5000,), float(ctx.step)), every=EACH)
    state.add("later", lambda ctx: 1, every=Every(steps=10, start=10))
    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    found: list[Any] = []
    with SyncEngine(state, every=EACH) as engine:
        engine.start()
        if rank == 0:
            for _ in range(100):
                found = [float(state["x"][0]), float(handle.value[0]), handle.info.version, state.info("x").computed_at]
                found += [len(state), "later" in state, list(state), state.names, repr(state), repr(handle)]
                found += [engine.seen, engine.stats.syncs, dict(engine.stats)["x"], len(engine.state_dict()["values"])]
                found += [engine.step(0), engine.step(0, 0)]
            store.set("read", "all")
        else:
            store.wait(["read"])
        engine.step(1)
        return [found, float(state["x"][0])]


def test_reading_values_versions_and_status_never_communicates() -> None:
    main, peer = returned(run_ranks(read_while_the_peer_waits, 2, timeout=30.0))
    assert main == [
        [
            *(0.0, 0.0, 1, 0),
            *(1, False, ["x"], ("x", "later")),
            "SharedState(x: version 1 of step 0, later: not ready)",
            "Shared('x', version 1 of step 0)",
            *((0, 0), 1, (1, 0), 1),
            *((), ()),
        ],
        1.0,
    ]
    assert peer == [[], 1.0]


# pytorch#192920: gloo corrupted tensors that were not contiguous, and what lay beside them.


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "column": lambda base: base[:, 1],
    "transposed": lambda base: base.t(),
    "every other": lambda base: base.flatten()[::2],
    "expanded": lambda base: base[:1, :1].expand(6, 5),
    "channels_last": lambda base: base.reshape(2, 3, 2, -1).contiguous(memory_format=torch.channels_last),
    "permuted": lambda base: base.reshape(2, 3, 2, -1).permute(3, 1, 0, 2),
    "slice": lambda base: base[1:, 2:],
    "flipped": lambda base: base.flip(0, 1),
}


def share_views(rank: int, size: int) -> list[str]:
    """Names of the views that arrived otherwise, or whose base has changed."""
    base = torch.arange(12.0 * size).view(3, 4 * size)
    before = base.clone()
    state = SharedState()
    for name, view in VIEWS.items():
        state.add(name, lambda ctx, view=view: view(base), every=EACH)  # type: ignore[misc]
    wrong = []
    with SyncEngine(state) as engine:
        for call in [(name,) for name in VIEWS] + [tuple(VIEWS)]:
            engine.start() if not engine.stats.syncs else engine.sync(*call)
            wrong += [name for name, view in VIEWS.items() if not identical(state[name], view(before))]
            wrong += ["base"] if not torch.equal(base, before) else []
    return wrong


def test_tensors_that_are_not_contiguous_arrive_equal_and_nothing_beside_them_changes() -> None:
    for size in (1, 2000):
        assert returned(run_ranks(share_views, 2, size)) == [[], []]


# pytorch#156632: dtypes that the backend rejects.


def special_numbers(dtype: torch.dtype) -> list[torch.Tensor]:
    """A few numbers, NaN, -0.0 and infinities where the dtype has them; 0-dim, empty and large."""
    numbers = [0.0, 1.0, 2.0]
    if dtype.is_floating_point or dtype.is_complex:
        numbers += [float("nan"), -0.0, float("inf"), -float("inf"), 0.1]
    line = torch.tensor(numbers, dtype=torch.complex128 if dtype.is_complex else torch.float64).to(dtype)
    if dtype.is_complex:
        line = torch.cat([line, line.conj() * -1j])
    return [line, line[0], line[:0], line[:0].reshape(3, 0), torch.cat([line] * 700), line.reshape(-1, 1)]


# Without two that torch itself makes no numbers of.
ALL_DTYPES = [dtype for dtype in DTYPES if dtype not in (torch.complex32, torch.float4_e2m1fn_x2)]


def share_dtypes(rank: int) -> list[Any]:
    state = SharedState()
    for dtype in ALL_DTYPES:
        state.add(str(dtype), lambda ctx, dtype=dtype: special_numbers(dtype), every=EACH)  # type: ignore[misc]
    wrong = []
    with SyncEngine(state) as engine:
        engine.start()
        for step in range(1, 3):
            engine.step(step)
        for dtype in ALL_DTYPES:
            engine.sync(str(dtype))
            for value, expected in zip(state[str(dtype)], special_numbers(dtype), strict=True):
                if (value.dtype, value.shape) != (dtype, expected.shape) or tensor_bits(value) != tensor_bits(expected):
                    wrong.append(str(dtype))
    return wrong


def test_every_dtype_arrives_bit_exact_with_its_shape() -> None:
    names = {str(dtype).removeprefix("torch.") for dtype in ALL_DTYPES}
    assert names >= {
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    }
    assert returned(run_ranks(share_dtypes, 2)) == [[], []]


# speechbrain#2506: the local rank taken for the rank, so that every node computed its own.


def count_computations(rank: int) -> list[Any]:
    count = 0

    def compute(ctx: Context) -> list[int]:
        nonlocal count
        count += 1
        return [ctx.rank, ctx.local_rank, ctx.node_rank, ctx.num_nodes]

    state = SharedState({"x": compute})
    with SyncEngine(state) as engine:
        engine.start()
    return [count, state["x"]]


def test_a_value_is_computed_once_in_the_world_and_not_once_per_node() -> None:
    env = [{"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": str(rank // 2)} for rank in range(4)]
    assert returned(run_ranks(count_computations, 4, env=env)) == [
        [1, [0, 0, 0, 2]],
        *[[0, [0, 0, 0, 2]]] * 3,
    ]


# lightning#6430: one rank failed, the others waited for their timeout, and that hid the first error.


def main_fails_once(rank: int) -> list[Any]:
    def compute(ctx: Context) -> int:
        if ctx.step == 2:
            raise ValueError("boom")
        return ctx.step

    state = SharedState({"x": compute})
    found: list[Any] = []
    with SyncEngine(state, every=EACH) as engine:
        for step in range(4):
            try:
                engine.step(step)
            except ComputeError as error:
                lines = str(error).splitlines()
                found.append([lines[0], lines[-1], "in compute" in str(error), type(error.__cause__).__name__])
            else:
                found.append(state["x"])
    numbers = torch.ones(1)
    dist.all_reduce(numbers)
    return [found, int(numbers)]


def test_an_error_on_main_reaches_every_rank_with_its_text_and_the_next_sync_works() -> None:
    # The timeouts of group and engine are 60 and 300 s: who waits for them is not back in 20.
    outcomes = returned(run_ranks(main_fails_once, 3, timeout=20.0, group_timeout=60.0))
    for rank, (found, total) in enumerate(outcomes):
        message = "value 'x' at step 2 on main (rank 0): ValueError: boom"
        cause = "ValueError" if rank == 0 else "NoneType"
        assert found == [0, 1, [message, "ValueError: boom", True, cause], 3]
        assert total == 3


# The guide's own chore: every rank holds a tensor of the right shape and dtype before it may receive.


def share_unknown_shapes(rank: int) -> bool:
    def compute(ctx: Context) -> Any:
        kind = [np.int32, np.float64, np.complex64][ctx.step % 3]
        return ctx.rng.integers(0, 100, tuple(range(1, 2 + ctx.step % 4))).astype(kind)

    state = SharedState({"x": compute})
    shapes = []
    with SyncEngine(state, every=EACH) as engine:
        for step in range(8):
            engine.step(step)
            shapes.append((state["x"].shape, state["x"].dtype.name))
    kinds = ["int32", "float64", "complex64"]
    return shapes == [(tuple(range(1, 2 + step % 4)), kinds[step % 3]) for step in range(8)]


def test_no_rank_has_to_know_shape_or_dtype_beforehand() -> None:
    assert returned(run_ranks(share_unknown_shapes, 2)) == [True, True]
