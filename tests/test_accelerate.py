"""The Accelerate hook: what counts as a step, when values come, and what reaches the other processes."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from accelerate_run import Make, make, prepared, recording, train
from ranks import returned, run_ranks

from syncstate import Context, Every, SharedState
from syncstate.accelerate import SyncStateHook
from syncstate.errors import ComputeError, ConfigError, NotReady

__all__ = ["make"]


# Every process holds what the main process computed


def give(value: Any, ctx: Context) -> Any:
    return value


def share_any_type(rank: int) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    state, computed = SharedState(), []

    @state.shared()
    def sampled(ctx: Context) -> list[int]:
        computed.append(ctx.host is accelerator)
        return sorted(ctx.rng.choice(64, size=8, replace=False).tolist())

    values: dict[str, Any] = {
        "int": 2**70,
        "float": 0.1,
        "text": "weiß",
        "none": None,
        "nested": {"a": [1, (2.5, None)], "b": {"c": "d"}},
        "tensor": torch.arange(6, dtype=torch.int16).reshape(2, 3),
    }
    for name, value in values.items():
        state.add(name, functools.partial(give, value))
    with SyncStateHook(accelerator, state, every=Every(steps=2)) as hook:
        hook.start()
        for _ in range(2):
            hook.step()
    return {"computed": computed, **state}


def test_every_process_calls_and_only_main_computes_whatever_the_type() -> None:
    main, other = returned(run_ranks(share_any_type, 2))
    assert (main.pop("computed"), other.pop("computed")) == ([True, True], [])
    assert torch.equal(main["tensor"], torch.arange(6, dtype=torch.int16).reshape(2, 3))
    assert torch.equal(main.pop("tensor"), other.pop("tensor"))
    assert main == other
    assert len(set(main["sampled"])) == 8
    assert (main["int"], main["text"], main["none"]) == (2**70, "weiß", None)
    assert main["nested"] == {"a": [1, (2.5, None)], "b": {"c": "d"}}


# What counts as a step


def accumulate_seven_batches(rank: int, attached: bool) -> tuple[list[int], list[Any], int, str]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    state, source = recording(every=Every(steps=2), initial=0)
    parts = prepared(accelerator)
    with SyncStateHook(accelerator, state) as hook:
        if attached:
            hook.attach(parts[1])
        seen = train(accelerator, hook, parts, attached=attached)
        steps = hook.state_dict()["steps"]
    return source.steps, seen, steps, type(parts[1]).__name__


@pytest.mark.parametrize("attached", [False, True])
def test_every_n_steps_fires_once_per_n_optimizer_steps_under_accumulation(attached: bool) -> None:
    main, other = returned(run_ranks(accumulate_seven_batches, 2, attached))
    # Steps end with batches 3, 6 and, because the loader ends, 7.
    first = 1 if attached else 0  # an attached model's first forward starts the engine, else the first call of step()
    assert main == ([0, 2], [first, 1, 1, 1, 1, 1, 2], 3, "DistributedDataParallel")
    assert other == ([], *main[1:])


@pytest.mark.parametrize("attached", [False, True])
def test_without_accumulation_every_iteration_is_a_step(make: Make, attached: bool) -> None:
    accelerator = make()
    state, source = recording(every=Every(steps=3))
    parts = prepared(accelerator)
    with SyncStateHook(accelerator, state) as hook:
        if attached:
            hook.attach(parts[1])
        hook.start()
        assert train(accelerator, hook, parts, attached=attached) == [1, 1, 1, 2, 2, 2, 3]
    assert source.steps == [0, 3, 6]


def test_the_end_of_the_loader_counts_only_where_accelerate_steps_there(make: Make) -> None:
    plugin = GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False)
    accelerator = make(gradient_accumulation_plugin=plugin)
    state, source = recording(every=Every(steps=1))
    parts = prepared(accelerator)
    with SyncStateHook(accelerator, state) as hook:
        hook.start()
        train(accelerator, hook, parts, attached=False)
        assert source.steps == [0, 1, 2]
        train(accelerator, hook, parts, attached=False)  # the seventh batch and two of these make a step
    assert source.steps == [0, 1, 2, 3, 4]


def test_a_users_own_count_is_taken_as_it_is(make: Make) -> None:
    state, source = recording(every=Every(steps=10))
    with SyncStateHook(make(), state) as hook:
        assert [hook.step(step) for step in (0, 0, 9, 10, 10, 35)] == [("x",), (), (), ("x",), (), ("x",)]
        assert source.steps == [0, 10, 35]
        with pytest.raises(ConfigError, match=r"already seen step 35"):
            hook.step(34)
        hook.step()
        assert hook.engine.seen == (36, 0)


@pytest.mark.parametrize("attached", [None, "prepared", "inner"])
def test_a_step_that_the_scaler_skips_counts(make: Make, attached: str | None) -> None:
    accelerator = make()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    _, model, optimizer = prepared(accelerator)
    state, source = recording(every=Every(steps=1))
    with SyncStateHook(accelerator, state) as hook:
        if attached:
            hook.attach(model, {"prepared": None, "inner": optimizer.optimizer}[attached])
        hook.start()
        skipped = []
        for value in (1.0, float("inf"), float("inf"), 1.0):
            accelerator.backward(model(torch.full((1, 1), value)).sum())
            optimizer.step()
            skipped.append(optimizer.step_was_skipped)
            optimizer.zero_grad()
            if not attached:
                hook.step()
        assert skipped == [False, True, True, False]
        assert hook.state_dict()["steps"] == 4
    assert source.steps == ([0, 1, 2, 3] if attached else [0, 1, 2, 3, 4])


# When values come


def test_entering_computes_nothing_and_the_first_of_the_calls_starts(make: Make) -> None:
    starters: list[Callable[[SyncStateHook], Any]] = [
        lambda hook: hook.start(),
        lambda hook: hook.set_epoch(0),
        lambda hook: hook.step(0),
    ]
    for starter in starters:
        state, source = recording(every=Every(steps=5))
        with SyncStateHook(make(), state) as hook:
            with pytest.raises(NotReady):
                state["x"]
            assert starter(hook) == ("x",)
            assert (state["x"], source.steps) == (1, [0])


def test_a_first_step_without_a_start_serves_step_zero_late(make: Make) -> None:
    state, source = recording(every=Every(steps=2))
    with SyncStateHook(make(), state) as hook:
        assert [hook.step() for _ in range(4)] == [("x",), ("x",), (), ("x",)]
    assert source.steps == [0, 2, 4]
    state, source = recording(every=Every(steps=1))
    with SyncStateHook(make(), state) as hook:
        assert hook.step() == ("x",)  # named once, although computed for steps 0 and 1
    assert source.steps == [0, 1]


def test_epoch_values_are_in_force_before_the_loader_is_iterated(make: Make) -> None:
    accelerator = make()
    state = SharedState()
    state.add("epoch", lambda ctx: (ctx.epoch, ctx.step), every=Every(epochs=1))
    parts = prepared(accelerator, batches=2)
    with SyncStateHook(accelerator, state) as hook:
        at_start = []
        for epoch in range(3):
            hook.set_epoch(epoch)
            at_start.append(state["epoch"])
            train(accelerator, hook, parts, attached=False)
    assert at_start == [(0, 0), (1, 2), (2, 4)]


def test_a_source_that_fails_in_the_first_step_does_not_lose_the_count(make: Make) -> None:
    state, tries = SharedState(), []

    @state.shared(every=Every(steps=2))
    def x(ctx: Context) -> int:
        tries.append(ctx.step)
        if len(tries) == 1:
            raise ValueError("boom")
        return ctx.step

    with SyncStateHook(make(), state) as hook:
        with pytest.raises(ComputeError, match="boom"):
            hook.step()
        hook.step()
        assert (tries, hook.engine.seen) == ([0, 1, 2], (2, 0))


def test_a_closed_hook_begins_again_only_when_told_to(make: Make) -> None:
    state, source = recording(every=Every(steps=2))
    hook = SyncStateHook(make(), state)
    with hook:
        for _ in range(3):
            hook.step()
    with pytest.raises(ConfigError, match=r"call start\(\)"):
        hook.step()
    with pytest.raises(ConfigError, match=r"call start\(\)"):
        hook.set_epoch(1)
    with hook:
        hook.step()
    hook.start(step=0, epoch=0)
    assert state["x"] == 4
    hook.close()
    hook.close()
    assert source.steps == [0, 2, 4, 0]


# Faults


def fail_on_rank_1(rank: int, attached: bool, wrapped: bool) -> None:
    accelerator = Accelerator(cpu=True)
    state, _ = recording(every=Every(steps=1))
    _, model, optimizer = prepared(accelerator)
    if not wrapped:
        model = accelerator.unwrap_model(model)
    with SyncStateHook(accelerator, state) as hook:
        if attached:
            hook.attach(model)
        for index in range(5):
            if rank == 1 and index == 2:
                raise OSError("disk full")
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            if not attached:
                hook.step()


@pytest.mark.parametrize(("attached", "wrapped"), [(False, False), (True, False), (False, True)])
def test_an_error_of_the_training_loop_reaches_the_other_processes(attached: bool, wrapped: bool) -> None:
    # A process that waits in a collective of DDP itself hears of it when that one ends.
    main, other = run_ranks(fail_on_rank_1, 2, attached, wrapped, timeout=20, group_timeout=3 if wrapped else 60)
    assert (main.status, main.error) == ("raised", "PeerError"), str(main)
    assert "OSError: disk full" in main.message
    assert (other.status, other.error, other.message) == ("raised", "OSError", "disk full"), str(other)


def test_several_models_an_accelerator_without_any_and_their_context(make: Make) -> None:
    accelerator = make()
    state, source = recording(every=Every(steps=1))
    with SyncStateHook(accelerator, state) as hook:
        hook.start()
        model = accelerator.prepare(torch.nn.Linear(1, 1))
        hook.start()
        accelerator.prepare(torch.nn.Linear(1, 1))
    assert source.models == [None]
    state, source = recording(every=Every(steps=1))
    accelerator.free_memory()
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    with SyncStateHook(accelerator, state) as hook:
        hook.start()
    assert source.models == [model]
