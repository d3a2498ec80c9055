"""The Accelerate hook in `save_state` and `load_state`: a resumed run holds what an unbroken one does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate_run import Make, Recorder, make, prepared, recording
from ranks import returned, run_ranks

from syncstate import At, Every, Once, SharedState
from syncstate.accelerate import SyncStateHook
from syncstate.errors import ConfigError
from syncstate.values import Seed

__all__ = ["make"]


def run_part(
    rank: int, folder: str, attached: bool, options: dict[str, Any], first: int, last: int, save_at: int | None
) -> list[tuple[int, int, int, Any]]:
    """Batches `first` to `last` of two epochs of seven, accumulating two; returns what the values were in each."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader, model, optimizer = prepared(accelerator)
    state, source = recording(every=Every(steps=3))
    state.add("walk", lambda ctx: (ctx.previous or 0.0) + ctx.rng.random(), every=Every(steps=2, start=1), initial=0.0)
    state.add("once", lambda ctx: float(torch.rand(())), every=Once())
    state.add("seed", Seed(), every=Every(epochs=1))
    state.add("at", lambda ctx: ctx.step, every=At([4]), initial=-1)
    ranks: dict[str, Any] = {"collect": lambda ctx: ctx.rank + ctx.step, "reduce": "sum"}
    state.add("sum", lambda ctx: ctx.collected + (ctx.previous or 0), every=Every(steps=1), **ranks)
    hook = SyncStateHook(accelerator, state, **options)
    if first:
        accelerator.load_state(folder)
    seen: list[tuple[int, int, int, Any]] = []
    with hook:
        if attached:
            hook.attach(model)
        for epoch in range(first // 7, 2):
            hook.set_epoch(epoch)
            skip = first - 7 * epoch if epoch == first // 7 else 0
            for index, (batch,) in enumerate(accelerator.skip_first_batches(loader, skip) if skip else loader):
                number = 7 * epoch + skip + index
                if number == last:
                    return seen
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).mean())
                    seen.append((number, source.total if rank == 0 else 0, state["x"], dict(state)))
                    optimizer.step()
                    optimizer.zero_grad()
                    if not attached:
                        hook.step()
                if number == save_at:
                    accelerator.save_state(folder)
    return seen


@pytest.mark.parametrize(("attached", "save_at"), [(False, 9), (True, 6)])
@pytest.mark.parametrize("options", [{}, {"async_op": True, "lag": 2}, {"lag": 2}], ids=["at once", "async", "held"])
def test_a_resumed_run_holds_what_an_unbroken_one_does(
    tmp_path: Path, options: dict[str, Any], attached: bool, save_at: int
) -> None:
    folder = str(tmp_path / "state")
    unbroken = returned(run_ranks(run_part, 2, folder, attached, options, 0, 14, save_at))
    resumed = returned(run_ranks(run_part, 2, folder, attached, options, save_at + 1, 14, None))
    assert resumed == [values[save_at + 1 :] for values in unbroken]
    assert [row[2:] for row in unbroken[0]] == [row[2:] for row in unbroken[1]]
    assert len({row[3]["walk"] for row in unbroken[0]}) == (4 if options else 5)
    # Plain containers and tensors, which need no trust.
    assert torch.load(tmp_path / "state" / "custom_checkpoint_0.pkl", weights_only=True)["engine"]["version"] == 1


def test_an_attached_models_checkpoint_between_step_and_forward_holds_the_values_of_before(
    make: Make, tmp_path: Path
) -> None:
    accelerator = make()
    _, model, optimizer = prepared(accelerator)
    state, _ = recording(every=Every(steps=1))
    with SyncStateHook(accelerator, state) as hook:
        hook.attach(model)
        model(torch.ones(1, 1))
        optimizer.step()
        accelerator.save_state(str(tmp_path))
        model(torch.ones(1, 1))
        assert (state["x"], state.info("x").computed_at) == (2, 1)
    accelerator = make()
    _, model, optimizer = prepared(accelerator)
    state, source = recording(every=Every(steps=1))
    with SyncStateHook(accelerator, state) as hook:
        accelerator.load_state(str(tmp_path))
        assert hook.state_dict()["engine"]["values"]["x"]["version"] == 1
        hook.attach(model)
        model(torch.ones(1, 1))
        assert (state["x"], state.info("x").computed_at, source.steps) == (2, 1, [1])


def test_loading_is_refused_once_the_hook_has_started_and_works_after_close(make: Make, tmp_path: Path) -> None:
    accelerator = make()
    state, _ = recording(every=Every(steps=1))
    hook = SyncStateHook(accelerator, state)
    with hook:
        hook.set_epoch(3)
        hook.step()
        accelerator.save_state(str(tmp_path))
        hook.step()
        with pytest.raises(ConfigError, match=r"before the first start.*close\(\) the hook"):
            accelerator.load_state(str(tmp_path))
        assert state["x"] == 3
        hook.close()
        accelerator.load_state(str(tmp_path))
        hook.start()
        assert (state["x"], hook.engine.seen) == (2, (1, 3))


def test_another_objects_state_is_refused_with_the_reason(make: Make, tmp_path: Path) -> None:
    accelerator = make()
    accelerator.register_for_checkpointing(Recorder(), SyncStateHook(accelerator, SharedState()))
    accelerator.save_state(str(tmp_path))
    accelerator = make()
    hook = SyncStateHook(accelerator, SharedState())
    accelerator.register_for_checkpointing(hook, Recorder())
    with pytest.raises(ConfigError, match="order in which they were registered"):
        accelerator.load_state(str(tmp_path))


def compute_elsewhere(rank: int, options: dict[str, Any], stateful: bool) -> int:
    state, _ = recording(every=Once())
    if not stateful:
        state = SharedState({"x": lambda ctx: ctx.rank})
    with SyncStateHook(Accelerator(cpu=True), state, **options) as hook:
        hook.start()
    value: int = state["x"]
    return value


@pytest.mark.parametrize(("options", "where"), [({"main": 1}, "rank 1"), ({"group": "single"}, "every process")])
def test_a_source_with_a_state_must_compute_where_accelerate_saves(options: dict[str, Any], where: str) -> None:
    for outcome in run_ranks(compute_elsewhere, 2, options, True):
        assert (outcome.status, outcome.error) == ("raised", "ConfigError"), str(outcome)
        assert f"value 'x' has a state, which is where it computes, on {where}," in outcome.message


def test_a_source_without_a_state_computes_anywhere() -> None:
    assert returned(run_ranks(compute_elsewhere, 2, {"main": 1}, False)) == [1, 1]
