"""How many collectives a sync takes: counted by the engine, by the group that issues them, and by torch's profiler."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from ranks import returned, run_ranks
from torch.profiler import ProfilerActivity, profile

from syncstate import Context, Every, SharedState, SyncEngine
from syncstate.errors import ComputeError

NEVER = Every(steps=1 << 40, start=1 << 40)
OPERATIONS = (
    *(
        "broadcast",
        "allreduce",
        "allreduce_coalesced",
        "allgather",
        "allgather_coalesced",
        "allgather_into_tensor_coalesced",
    ),
    *("reduce", "reduce_scatter", "gather", "scatter", "alltoall", "alltoall_base", "send", "recv", "recv_anysource"),
    *("barrier", "monitored_barrier"),
)


class Counting(dist.ProcessGroupGloo):
    """The backend itself, which also writes down what is asked of it."""

    issued: ClassVar[list[str]] = []


def _counting(name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        Counting.issued.append(name)
        return getattr(super(Counting, self), name)(*args, **kwargs)

    return call


for _name in OPERATIONS:
    if hasattr(dist.ProcessGroupGloo, _name):
        setattr(Counting, _name, _counting(_name))


class Watch:
    """Counts what a block issues, in three ways.

    Attributes:
        counted: What the engine counted.
        issued: What was asked of the private group.
        profiled: What the backends of all groups ran, by the profiler.
        dispatched: What went through `torch.distributed`, which the default group's operations do, by the profiler.
    """

    def __init__(self, engine: SyncEngine) -> None:
        self.engine = engine

    def __enter__(self) -> "Watch":
        Counting.issued = []
        self.before = self.engine.stats.collectives
        self.profile = profile(activities=[ProfilerActivity.CPU])
        self.profile.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self.profile.__exit__(*args)
        names = [event.name for event in self.profile.events() or []]
        self.counted = self.engine.stats.collectives - self.before
        self.issued = list(Counting.issued)
        self.profiled = [name for name in names if name.startswith("gloo:")]
        self.dispatched = [name for name in names if name.startswith("c10d::")]

    @property
    def found(self) -> list[Any]:
        assert self.profiled == [f"gloo:{name}" for name in self.issued]
        return [self.counted, self.issued, self.dispatched]


def fail(ctx: Context) -> None:
    raise ValueError("boom")


def plus(i: int) -> Callable[[Context], int]:
    return lambda ctx: i + ctx.step


def filled(i: int) -> Callable[[Context], torch.Tensor]:
    return lambda ctx: torch.full((8,), i + ctx.step)


def watched(rank: int) -> dict[str, list[Any]]:
    """What a call takes, by what is due in it."""
    state = SharedState()
    for i in range(20):
        state.add(f"number {i}", plus(i), every=Every(steps=10))
        state.add(f"tensor {i}", filled(i), every=Every(steps=15))
    state.add("epoch", lambda ctx: ctx.epoch, every=Every(epochs=1), apply=lambda value, ctx: None)
    state.add("large", lambda ctx: torch.zeros(5000), every=NEVER)
    state.add("long", lambda ctx: "x" * 20_000, every=NEVER)
    state.add("fails", fail, every=NEVER)
    state.add("cannot travel", lambda ctx: object(), every=NEVER)
    found = {}
    with SyncEngine(state) as engine:
        with Watch(engine) as watch:
            engine.start()
        found["start, with a warm-up that is no sync"] = watch.found
        with Watch(engine) as watch:
            for step in range(10):
                assert engine.step(step) == ()
        found["ten steps with nothing due"] = watch.found
        with Watch(engine) as watch:
            assert len(engine.step(10)) == 20
        found["20 numbers"] = watch.found
        with Watch(engine) as watch:
            assert len(engine.step(15)) == 20
        found["20 tensors"] = watch.found
        with Watch(engine) as watch:
            assert len(engine.step(31, 1)) == 41
        found["all of them and an epoch"] = watch.found
        for name in ("number 3", "large", "long"):
            with Watch(engine) as watch:
                engine.sync(name)
            found[name] = watch.found
        for name in ("fails", "cannot travel"):
            with Watch(engine) as watch:
                try:
                    engine.sync(name)
                except ComputeError:
                    found[name] = []
            found[name] += watch.found
        with Watch(engine) as watch:
            for name in state:
                state[name], state.info(name), engine.stats.get(name)
            repr(state), engine.state_dict(), engine.seen
        found["reading"] = watch.found
        with Watch(engine) as watch:
            engine.close()
        found["closing"] = watch.found
    with Watch(engine) as watch:
        dist.broadcast(torch.zeros(3), 0)
    found["one of the default group, to see that the profiler would"] = [watch.profiled, watch.dispatched]
    return found


def restarted(rank: int) -> list[list[Any]]:
    """What a start takes that restores a checkpoint which all ranks loaded, and one which only the last loaded."""
    state = SharedState()
    state.add("x", lambda ctx: ctx.step)
    engine = SyncEngine(state)
    engine.start()
    content = engine.state_dict()
    engine.close()
    found = []
    for load in (True, rank == 1):
        if load:
            engine.load_state_dict(content)
        with Watch(engine) as watch:
            engine.start(3)
        found.append(watch.found)
        engine.close()
    return found


def alone(rank: int) -> list[Any]:
    """What three syncs take in a process that shares with nobody."""
    state = SharedState()
    state.add("x", lambda ctx: torch.zeros(5000), every=Every(steps=1))
    engine = SyncEngine(state, group="single")
    with Watch(engine) as watch, engine:
        for step in range(3):
            engine.step(step)
    return watch.found


def all_counts(rank: int) -> list[Any]:
    dist.ProcessGroupGloo = Counting  # type: ignore[misc]
    return [watched(rank), restarted(rank), alone(rank)]


@pytest.fixture(scope="module")
def counts() -> list[list[Any]]:
    """What each of two ranks found, by what it did."""
    ranks = returned(run_ranks(all_counts, 2))
    return [[found[what] for found in ranks] for what in range(3)]


ONE: list[Any] = [1, ["broadcast"], []]
TWO: list[Any] = [2, ["broadcast", "broadcast"], []]
NONE: list[Any] = [0, [], []]


def test_a_sync_takes_one_collective_up_to_the_frame_and_two_above_and_none_on_the_default_group(
    counts: list[list[Any]],
) -> None:
    expected = {
        "start, with a warm-up that is no sync": [1, ["broadcast", "broadcast"], []],
        "ten steps with nothing due": NONE,
        "20 numbers": ONE,
        "20 tensors": ONE,
        "all of them and an epoch": ONE,
        "number 3": ONE,
        "large": TWO,
        "long": TWO,
        "fails": ONE,
        "cannot travel": ONE,
        "reading": NONE,
        "closing": NONE,
        "one of the default group, to see that the profiler would": [["gloo:broadcast"], ["c10d::broadcast_"]],
    }
    assert counts[0] == [expected] * 2


def test_a_restored_checkpoint_is_only_sent_where_ranks_loaded_different_ones(counts: list[list[Any]]) -> None:
    assert counts[1] == [[[0, ["broadcast"], []], [0, ["broadcast"] * 3, []]]] * 2


def test_a_process_that_shares_with_nobody_issues_nothing(counts: list[list[Any]]) -> None:
    assert counts[2] == [NONE] * 2
