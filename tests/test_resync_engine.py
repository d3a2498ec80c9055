"""Resyncs inside an engine: after the values of a step, over its channel, by its main process's clock."""

import gc
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expect import refuses
from ranks import returned, run_ranks
from torch import nn

from syncstate import Every, ParameterResync, SharedState, SyncEngine
from syncstate.errors import ComputeError, ConfigError, DriftError, MismatchError, PeerError
from syncstate.resync import TensorDrift

PATIENCE = 300.0


def runs_in_an_engine(rank: int, host_model: bool) -> Any:
    net = nn.Linear(3, 2)
    with torch.no_grad():
        net.weight.fill_(float(rank))
        net.bias.zero_()
    found: list[Any] = []
    state = SharedState()
    state.add("x", lambda ctx: ctx.step, every=Every(steps=2), apply=lambda value, ctx: found.append(value))
    resync = ParameterResync(
        None if host_model else net, every=Every(steps=3), on_drift=lambda report: found.append(report)
    )  # fmt: skip
    with SyncEngine(state, resync=resync, timeout=PATIENCE) as engine:
        engine.model = net
        engine.start()
        for step in range(1, 8):
            if step == 5 and rank == 1:
                with torch.no_grad():
                    net.bias[1] = 4.0
            engine.step(step)
    told = [one if isinstance(one, int) else (one.step, one.drifted) for one in found]
    return told, net.weight.tolist(), net.bias.tolist()


def test_an_engine_that_nobody_closed_gives_its_state_and_its_resync_back() -> None:
    resync = ParameterResync({"x": torch.zeros(3)}, every=Every(steps=1))
    state = SharedState()
    state.add("x", lambda ctx: ctx.step, every=Every(steps=1))
    dropped: Any = SyncEngine(state, resync=resync, group="single")
    dropped.start()
    dropped = None
    gc.collect()
    with pytest.raises(ConfigError, match=r"^resync\.run: the engine that the resync was given to is gone"):
        resync.run(0)
    with SyncEngine(state, resync=resync, group="single") as engine:
        engine.start(step=4)
        assert (state["x"], resync.run(4).drifted) == (4, [])


def runs_inside_a_source(rank: int) -> Any:
    resync = ParameterResync({"x": torch.full((3,), 0.0 if rank == 0 else 2.0)}, every=Every(steps=100, start=50))
    state = SharedState()
    state.add("x", lambda ctx: resync.run(ctx.step).drifted if ctx.step == 1 else ctx.step, every=Every(steps=1))
    with SyncEngine(state, resync=resync, timeout=60.0) as engine:
        engine.start()
        with pytest.raises(ComputeError) as caught:
            engine.step(1)
        report = resync.run(1)  # all ranks, outside
        engine.step(2)
        return state["x"], str(caught.value), report.drifted


def test_a_resync_inside_a_source_is_an_error_at_once_and_outside_it_runs() -> None:
    for value, text, drifted in returned(run_ranks(runs_inside_a_source, 2, timeout=30.0)):
        assert value == 2
        assert "resync.run: called from inside a source or apply; a sync is running already" in text
        assert drifted == [TensorDrift("x", (1,), 2.0)]


@pytest.mark.parametrize("host_model", [False, True], ids=["a module", "the host's model"])
def test_a_resync_runs_by_its_schedule_after_the_values(host_model: bool) -> None:
    told = [
        0,
        (0, [TensorDrift("weight", (1,), 1.0)]),
        2,
        4,
        6,
        (6, [TensorDrift("bias", (1,), 4.0)]),
    ]
    assert returned(run_ranks(runs_in_an_engine, 2, host_model)) == [(told, [[0.0] * 3] * 2, [0.0] * 2)] * 2


def several(rank: int) -> Any:
    a, b = {"a": torch.full((2,), float(rank))}, {"b": torch.full((2,), float(rank))}
    resyncs = [ParameterResync(a, every=Every(steps=2)), ParameterResync(b, every=Every(steps=3), mode="average")]
    seen = []
    with SyncEngine(resync=resyncs, timeout=PATIENCE) as engine:
        for step in range(1, 7):
            engine.step(step)
            seen.append((a["a"][0].item(), b["b"][0].item()))
    with ParameterResync(a, every=Every(steps=1)) as alone:  # afterwards each can stand alone again
        alone.run(9)
    resyncs[0].run(10)
    resyncs[0].close()
    return seen


def test_several_resyncs_follow_their_own_schedules() -> None:
    ours, theirs = returned(run_ranks(several, 2))
    assert ours == [(0.0, 0.0)] * 2 + [(0.0, 0.5)] * 4
    assert theirs == [(1.0, 1.0), (0.0, 1.0), (0.0, 0.5), (0.0, 0.5), (0.0, 0.5), (0.0, 0.5)]


def follows_the_clock(rank: int) -> Any:
    tensors = {"a": torch.zeros(2)}
    steps: list[int] = []
    resync = ParameterResync(tensors, every=Every(seconds=0.02), mode="check", on_drift=lambda r: steps.append(r.step))
    with SyncEngine(resync=resync, timeout=PATIENCE) as engine:
        engine.start()
        for step in range(1, 60):
            tensors["a"][0] = rank
            time.sleep(0.001 if rank else 0.004)  # the ranks' own clocks have nothing to say
            engine.step(step)
    return steps


def test_seconds_are_mains() -> None:
    ours, theirs = returned(run_ranks(follows_the_clock, 2))
    assert ours == theirs
    assert len(ours) > 2
    assert ours == sorted(set(ours))


def raises(rank: int) -> Any:
    tensors = {"a": torch.full((2,), float(rank))}
    resync = ParameterResync(tensors, every=Every(steps=2, start=2), on_drift="raise")
    engine = SyncEngine(resync=resync, timeout=PATIENCE)
    engine.start()
    engine.step(1)
    with pytest.raises(DriftError) as first:
        engine.step(2)
    with pytest.raises(DriftError) as again:
        engine.step(3)
    assert first.value is again.value
    engine.close()
    engine.start(4)  # by all ranks: a new one
    engine.close()
    return str(first.value).splitlines()[1:], tensors["a"].tolist()


def test_drift_that_is_raised_ends_the_engine_on_all_ranks_after_the_repair() -> None:
    table = ["  name  ranks  largest difference", "  a     1      1"]
    assert returned(run_ranks(raises, 2)) == [(table, [0.0, 0.0])] * 2


def differs(rank: int) -> Any:
    tensors = {"a": torch.zeros(2 + rank)}
    engine = SyncEngine(resync=ParameterResync(tensors, every=Every(steps=1)), timeout=PATIENCE)
    with pytest.raises(MismatchError) as caught:
        engine.start()
    x = torch.ones(1)
    dist.all_reduce(x)
    return str(caught.value).splitlines()[1].strip(), x.item()


def test_another_structure_ends_the_engine_on_all_ranks() -> None:
    told = "tensors.a: 'float32 [2] cpu' on rank 0; 'float32 [3] cpu' on rank 1"
    assert returned(run_ranks(differs, 2)) == [(told, 2.0)] * 2


def plans(rank: int) -> str:
    resync = ParameterResync({"a": torch.zeros(2)}, every=Every(steps=1), mode=("check", "repair")[rank])
    with pytest.raises(MismatchError) as caught:
        SyncEngine(resync=resync, timeout=PATIENCE).start()
    return str(caught.value)


def test_resyncs_are_part_of_the_plan() -> None:
    for told in returned(run_ranks(plans, 2)):
        assert "resync.0.mode: 'check' on rank 0; 'repair' on rank 1" in told


def callback_fails(rank: int) -> Any:
    def on_drift(report: Any) -> None:
        if rank == 1:
            raise ValueError("not this one")

    resync = ParameterResync({"a": torch.full((2,), float(rank))}, every=Every(steps=1), on_drift=on_drift)
    engine = SyncEngine(resync=resync, timeout=PATIENCE)
    if rank == 1:
        with pytest.raises(ValueError, match=r"^not this one$"):
            engine.start()
        return None
    with pytest.raises(PeerError) as caught:
        _go_on(engine)
    return str(caught.value)


def _go_on(engine: SyncEngine) -> None:
    engine.start()
    for step in range(1, 100):
        engine.step(step)
        time.sleep(0.05)


def test_a_callback_that_fails_on_one_rank_reaches_the_others() -> None:
    first, _ = returned(run_ranks(callback_fails, 2))
    assert "rank 1 failed" in first
    assert "ValueError: not this one" in first


def test_one_that_is_connected_on_its_own_is_not_taken_over() -> None:
    resync = ParameterResync({"a": torch.zeros(2)}, every=Every(steps=1))
    resync.run(0)
    with refuses("resync: it has run on its own already; close it before an engine takes it over"):
        SyncEngine(resync=resync).start()
    resync.close()
    with SyncEngine(resync=resync) as engine:
        engine.start()


def test_without_a_module_the_engine_needs_a_model() -> None:
    with refuses("resync: no module was given, and there is no host whose model could be taken"):
        SyncEngine(resync=ParameterResync(every=Every(steps=1))).start()
