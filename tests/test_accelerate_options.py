"""The Accelerate hook takes what the engine takes, and refuses what is impossible."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate_run import Make, make, prepared, recording, train

from syncstate import Every, SharedState, SyncEngine
from syncstate.accelerate import SyncStateHook
from syncstate.config import build
from syncstate.errors import ConfigError

__all__ = ["make"]


def keywords(cls: type) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(cls).parameters.values()
    return {p.name: p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def test_the_hook_takes_the_engines_options_with_the_same_types_and_defaults() -> None:
    assert keywords(SyncStateHook) == keywords(SyncEngine)
    assert list(keywords(SyncStateHook)) == list(keywords(SyncEngine))


def test_every_option_reaches_the_engine(make: Make) -> None:
    accelerator = make()

    def taken(engine: Callable[[Any], SyncEngine], name: str, given: Any) -> Any:
        """What becomes of an option: what the engine keeps, or the error that refuses it."""
        try:
            return getattr(engine({name: given})._options, name)
        except ConfigError as error:
            return str(error)

    something = object()
    for name in keywords(SyncEngine):
        for given in (something, 2048, 3.5, "keep"):
            plain = taken(lambda option: SyncEngine(SharedState(), **option), name, given)
            hooked = taken(lambda option: SyncStateHook(accelerator, SharedState(), **option).engine, name, given)
            assert hooked == plain, name
            assert hooked != keywords(SyncEngine)[name].default, name


def test_a_hook_from_a_config_is_the_hook_that_the_config_describes(make: Make) -> None:
    node = {
        "schedule": {"_target_": "syncstate.Every", "steps": 2},
        "seed": 5,
        "values": {"seed": {"source": {"_target_": "syncstate.values.Seed", "base": 11}}},
    }
    state, options = build(node)
    with SyncStateHook.from_config(make(), node) as hook, SyncEngine(state, **options) as engine:
        for step in range(4):
            hook.start() if step == 0 else hook.step()
            engine.step(step)
            assert dict(hook.state) == dict(state)
        assert hook.state.info("seed") == state.info("seed")
    assert hook.state.info("seed").version == 2


def test_impossible_uses_are_refused_with_what_to_do(make: Make) -> None:
    accelerator = make()
    with pytest.raises(ConfigError, match=r"must be an accelerate\.Accelerator, got 'x'"):
        SyncStateHook("x", SharedState())
    with pytest.raises(ConfigError, match="state must be a SharedState"):
        SyncStateHook(accelerator, {})  # type: ignore[arg-type]
    hook = SyncStateHook(accelerator, SharedState())
    model: Any = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"call accelerator\.prepare\(model, optimizer\) before"):
        hook.attach(model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match=r"model must be a torch\.nn\.Module, got None"):
        hook.attach(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"with a method step, got 3"):
        hook.attach(model, 3)
    hook.attach(model)
    with pytest.raises(ConfigError, match=r"attached already; call detach\(\) first"):
        hook.attach(model)
    with hook:
        with pytest.raises(ConfigError, match=r"leave step\(\) out, or call detach\(\) first"):
            hook.step()
        hook.detach()
        hook.step()
        with pytest.raises(ConfigError, match="both would count each step"):
            hook.attach(model)
    assert vars(optimizer).keys().isdisjoint({"step"})


def test_a_run_prints_nothing(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    accelerator = make()
    state, _ = recording(every=Every(steps=1))
    parts = prepared(accelerator)
    with SyncStateHook(accelerator, state) as hook:
        hook.attach(parts[1])
        train(accelerator, hook, parts, attached=True)
    assert capfd.readouterr() == ("", "")
