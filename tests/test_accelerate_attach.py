"""The Accelerate hook attached to a model: when it acts, and that it leaves everything as it was."""

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module
from accelerate_run import Make, make, prepared, recording, train
from ranks import returned, run_ranks
from torch.utils.checkpoint import checkpoint

from syncstate import Every, SharedState
from syncstate.accelerate import SyncStateHook

__all__ = ["make"]


def test_evaluation_never_refreshes(make: Make) -> None:
    accelerator = make()
    _, model, optimizer = prepared(accelerator)
    state, source = recording(every=Every(steps=1))
    x = torch.ones(1, 1)
    with SyncStateHook(accelerator, state) as hook:
        hook.attach(model)
        with torch.no_grad():
            model(x)
        with torch.inference_mode():
            model(x)
        model.eval()
        model(x)
        assert source.steps == []
        model.train()
        model(x).sum().backward()
        model(x)
        assert source.steps == [0]
        optimizer.step()
        model.eval()
        model(x)
        assert source.steps == [0]
        model.train()
        model(x)
        assert source.steps == [0, 1]


def evaluate_on_main_only(rank: int) -> tuple[list[int], int]:
    accelerator = Accelerator(cpu=True)
    state, source = recording(every=Every(steps=1))
    loader, model, optimizer = prepared(accelerator, batches=4)
    inner = accelerator.unwrap_model(model)
    with SyncStateHook(accelerator, state) as hook:
        hook.attach(model)
        inner.eval()  # which the wrapper does not notice
        model(torch.ones(1, 1))
        assert not state
        inner.train()
        for (batch,) in loader:
            if accelerator.is_main_process:
                with torch.no_grad():
                    inner(batch)
                    model(batch)
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
    return source.steps, state["x"]


def test_an_evaluation_on_main_alone_does_not_make_it_sync_alone() -> None:
    assert returned(run_ranks(evaluate_on_main_only, 2, timeout=30)) == [([0, 1, 2, 3], 4), ([], 4)]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_forward_that_runs_again_in_backward_finds_what_the_first_run_found(make: Make, use_reentrant: bool) -> None:
    accelerator = make()
    state, source = recording(every=Every(steps=1), initial=0)
    found: list[Any] = []

    class Reader(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            found.append(state["x"])
            out: torch.Tensor = super().forward(input) * state["x"]
            return out

    model, optimizer = Reader(1, 1), None
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with SyncStateHook(accelerator, state) as hook:
        hook.attach(model)
        for _ in range(3):
            checkpoint(model, torch.ones(1, 1, requires_grad=True), use_reentrant=use_reentrant).sum().backward()
            optimizer.step()
    # A reentrant checkpoint's only forward with gradients is the second one; there the optimizer's next step refreshes.
    assert found == ([0, 0, 1, 1, 2, 2] if use_reentrant else [1, 1, 2, 2, 3, 3])
    assert source.steps == [0, 1, 2]


def test_steps_without_a_forward_between_them_are_not_lost(make: Make) -> None:
    accelerator = make()
    _, model, optimizer = prepared(accelerator)
    state, source = recording(every=Every(steps=1))
    with SyncStateHook(accelerator, state) as hook:
        hook.attach(model)
        for _ in range(4):
            optimizer.step()
        assert source.steps == [0, 1, 2, 3]
        model(torch.ones(1, 1))
    assert source.steps == [0, 1, 2, 3, 4]


def test_the_first_prepared_optimizer_counts_unless_another_is_given(make: Make) -> None:
    for given, expected in ((None, 1), ("second", 2), ("inner", 2), ("unprepared", 3)):
        accelerator = make()
        first, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        inner = torch.optim.SGD(second.parameters(), lr=0.1)
        first, one = accelerator.prepare(first, torch.optim.SGD(first.parameters(), lr=0.1))
        second, two = accelerator.prepare(second, inner)
        three = torch.optim.SGD(first.parameters(), lr=0.1)
        state, source = recording(every=Every(steps=1))
        with SyncStateHook(accelerator, state) as hook:
            hook.attach(second, {None: None, "second": two, "inner": inner, "unprepared": three}[given])
            one.step()
            for _ in range(2):
                two.step()
            for _ in range(3):
                three.step()
            second(torch.ones(1, 1))
            first(torch.ones(1, 1))
            assert hook.engine.seen == (expected, 0)
            assert source.models == [second] * (expected + 1)


class Doubler(ModelHook):  # type: ignore[misc]  # accelerate ships no types
    """Doubles what goes in, and counts how often it was put on and taken off."""

    def __init__(self) -> None:
        self.put_on = self.taken_off = 0

    def init_hook(self, module: Any) -> Any:
        self.put_on += 1
        return module

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return (args[0] * 2, *args[1:]), kwargs

    def detach_hook(self, module: Any) -> Any:
        self.taken_off += 1
        return module


def test_a_hook_that_the_model_has_stays_in_place(make: Make) -> None:
    accelerator = make(mixed_precision="bf16")
    autocast: list[bool] = []

    class Asking(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            autocast.append(torch.is_autocast_enabled("cpu"))
            return input

    model: Any = Asking(1, 1)
    doubler = Doubler()
    add_hook_to_module(model, doubler)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state, source = recording(every=Every(steps=1))
    forward = model.forward
    with SyncStateHook(accelerator, state) as hook:
        hook.attach(model)
        assert model(torch.ones(1)).item() == 2.0
        assert source.steps == [0]
    assert model(torch.ones(1)).item() == 2.0
    assert (model._hf_hook, model.forward) == (doubler, forward)
    assert (doubler.put_on, doubler.taken_off) == (1, 0)
    assert autocast == [True, True]


def test_hooks_added_later_outlive_ours(make: Make) -> None:
    accelerator = make()
    _, model, optimizer = prepared(accelerator)
    state, source = recording(every=Every(steps=1))
    with SyncStateHook(accelerator, state) as hook:
        hook.attach(model)
        add_hook_to_module(model, Doubler(), append=True)
        before = model(torch.ones(1, 1)).item()
        optimizer.step()
    assert isinstance(model._hf_hook, SequentialHook)
    optimizer.step()
    assert model(torch.ones(1, 1)).item() == before
    assert source.steps == [0]


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_detach_leaves_model_and_optimizer_as_they_were(make: Make, mixed_precision: str) -> None:
    accelerator = make(mixed_precision=mixed_precision)
    _, model, optimizer = prepared(accelerator)
    before = [dict(vars(thing)) for thing in (model, optimizer)]
    hook = SyncStateHook(accelerator, SharedState())
    for _ in range(2):
        hook.attach(model)
        assert hook.engine.model is model
        assert [dict(vars(thing)) for thing in (model, optimizer)] != before
        hook.detach()
        hook.detach()
        assert [dict(vars(thing)) for thing in (model, optimizer)] == before
        assert hook.engine.model is None


def test_leaving_the_block_detaches_also_on_an_error(make: Make) -> None:
    accelerator = make()
    _, model, optimizer = prepared(accelerator)
    before = dict(vars(optimizer))

    def fail() -> None:
        with SyncStateHook(accelerator, recording()[0]) as hook:
            hook.attach(model)
            model(torch.ones(1, 1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert dict(vars(optimizer)) == before
    assert not hasattr(model, "_hf_hook")


@pytest.mark.parametrize("early", [False, True])
def test_a_scheduler_of_torch_which_wraps_steps_too_works_on_a_counted_optimizer(make: Make, early: bool) -> None:
    accelerator = make()
    _, model, optimizer = prepared(accelerator)
    state, _ = recording(every=Every(steps=1))
    hook = SyncStateHook(accelerator, state)
    if not early:
        hook.attach(model)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    if early:
        hook.attach(model)
    with hook:
        for _ in range(2):
            optimizer.step()
            scheduler.step()
        assert hook.state_dict()["steps"] == 2
    optimizer.step()
    assert hook.state_dict()["steps"] == 2


def test_a_compiled_model_runs_the_engine_outside_of_the_graph(make: Make) -> None:
    accelerator = make(dynamo_backend="eager")
    inner = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    for attached in (model, inner):
        torch._dynamo.reset()
        state, source = recording(every=Every(steps=1))
        with SyncStateHook(accelerator, state) as hook:
            hook.attach(attached)
            for _ in range(3):
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
        assert source.steps == [0, 1, 2]
        assert source.models == [inner] * 3
    assert model._orig_mod is inner


def test_an_unwrapped_model_inside_a_wrapper_works_as_well() -> None:
    assert returned(run_ranks(attach_the_inner_model, 2)) == [([0, 1, 2], True), ([], True)]


def attach_the_inner_model(rank: int) -> tuple[list[int], bool]:
    accelerator = Accelerator(cpu=True)
    loader, model, optimizer = prepared(accelerator, batches=3)
    inner = accelerator.unwrap_model(model)
    state, source = recording(every=Every(steps=1))
    with SyncStateHook(accelerator, state) as hook:
        hook.attach(inner)
        train(accelerator, hook, (loader, model, optimizer), attached=True)
        return source.steps, hook.engine.model is inner


def test_attached_models_get_the_turn_of_an_epoch_before_their_forward(make: Make) -> None:
    accelerator = make()
    state, source = recording(every=Every(steps=2))
    state.add("epoch", lambda ctx: (ctx.epoch, ctx.step), every=Every(epochs=1))
    parts = prepared(accelerator, batches=2)
    with SyncStateHook(accelerator, state) as hook:
        hook.attach(parts[1])
        for epoch in range(2):
            hook.set_epoch(epoch)
            assert state["epoch"] == (epoch, 2 * epoch)
            train(accelerator, hook, parts, attached=True)
    assert source.steps == [0, 2]
