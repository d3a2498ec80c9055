"""What a hands-free host puts on a model and an optimizer of Accelerate, and takes off again. Needs accelerate."""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module, remove_hook_from_module

from syncstate.errors import ConfigError

__all__ = ["Attachment", "unwrapped"]


def unwrapped(accelerator: Accelerator, model: Any) -> Any:
    """The user's own model inside what `prepare` or `torch.compile` wrapped around it."""
    while True:
        # Layer by layer, because unwrap_model would alter a compiled model that wraps a distributed one.
        inner = accelerator.unwrap_model(getattr(model, "_orig_mod", model))
        if inner is model:
            return model
        model = inner


class Attachment(ModelHook):  # type: ignore[misc]  # accelerate ships no types
    """Counts an optimizer's steps, and tells about them at the model's next training forward.

    Args:
        accelerator: Whose `sync_gradients` says whether a call of the optimizer counts.
        model: The module whose forward is watched. A hook that it has already stays in place.
        optimizer: The optimizer, prepared or not; None takes the first prepared one.
        counted: Called after each optimizer step.
        tell: Called before the first training forward after an optimizer step; if none comes, before the next step.

    Raises:
        ConfigError: The model is no module, or there is no optimizer.

    Attributes:
        model: The module inside the wrappers.
        pending: Whether there is something to tell.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: Any,
        *,
        counted: Callable[[], object],
        tell: Callable[[], object],
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"attach: model must be a torch.nn.Module, got {model!r}")
        self.model: torch.nn.Module = unwrapped(accelerator, model)
        self.pending = True
        self._accelerator, self._count, self._report = accelerator, counted, tell
        self._active = True
        # Inside a compiled model the engine must run as it is, not be traced.
        self.pre_forward = torch.compiler.disable(self._before_forward)
        self._watch_steps(_find_optimizer(accelerator, optimizer))
        self._watch_forwards(model)

    def remove(self) -> None:
        """Take everything off. What others have put around it since stays, and finds nothing to do here any more."""
        self._active = self.pending = False
        self._unwatch_steps()
        self._unwatch_forwards()

    def _tell(self) -> None:
        self._report()
        self.pending = False

    # The model

    def _before_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        # The id is that of the backward pass around this call, -1 outside of one. Inside, a checkpointed forward runs
        # again and must find what the first run found.
        if self.pending and self.model.training and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self._tell()
        return args, kwargs

    def _watch_forwards(self, module: torch.nn.Module) -> None:
        self._module = module
        self._had_forward = "forward" in module.__dict__
        self._old: Any = getattr(module, "_hf_hook", None)
        self._top: Any = self
        if self._old is None:
            add_hook_to_module(module, self, append=True)
        else:
            # add_hook_to_module would take the old hook off and put it on again, which moves weights about and loses
            # the autocast that `prepare` has put around it. The forward in place looks its hook up at every call.
            self._top = SequentialHook(self._old, self)
            self._top.no_grad = self._old.no_grad
            module._hf_hook = self._top
        self._forward = module.__dict__.get("forward")

    def _unwatch_forwards(self) -> None:
        module = self._module
        if getattr(module, "_hf_hook", None) is not self._top or module.__dict__.get("forward") is not self._forward:
            return
        if self._old is not None:
            module._hf_hook = self._old
            return
        remove_hook_from_module(module)
        if not self._had_forward:
            module.__dict__.pop("forward", None)  # what accelerate leaves there hides the class's own

    # The optimizer

    def _watch_steps(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._had_step = "step" in optimizer.__dict__
        self._step = step = optimizer.step

        @functools.wraps(step)  # keeps the mark that a scheduler of torch has left on it
        def counted(_: Any, *args: Any, **kwargs: Any) -> Any:
            counts = self._active and self._accelerator.sync_gradients
            if counts and self.pending:
                self._tell()
            result = step(*args, **kwargs)
            if counts:
                self._count()
                self.pending = True
            return result

        # Not a hook of the inner optimizer: that is not called when a scaler skips. A method, because a scheduler of
        # torch looks for the function inside.
        self._counted = optimizer.step = MethodType(counted, optimizer)

    def _unwatch_steps(self) -> None:
        if self._optimizer.__dict__.get("step") is not self._counted:
            return
        if self._had_step:
            self._optimizer.step = self._step
        else:
            del self._optimizer.step


def _find_optimizer(accelerator: Accelerator, optimizer: Any) -> Any:
    """The object whose `step` the training loop calls."""
    prepared = accelerator._optimizers
    if optimizer is None:
        if not prepared:
            raise ConfigError(
                "attach: no optimizer is prepared; call accelerator.prepare(model, optimizer) before, or give "
                "attach(model, optimizer)"
            )
        return prepared[0]
    if not callable(getattr(optimizer, "step", None)):
        raise ConfigError(f"attach: optimizer must be an optimizer with a method step, got {optimizer!r}")
    return next((one for one in prepared if one.optimizer is optimizer), optimizer)
