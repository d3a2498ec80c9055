"""Training with Accelerate for the tests: as a user writes it, on one process or on real ranks."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader, TensorDataset

from syncstate import Context, SharedState
from syncstate.accelerate import SyncStateHook

__all__ = ["Make", "Recorder", "make", "prepared", "recording", "train"]

Make = Callable[..., Accelerator]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """Makes Accelerators of one process, each as if it were the first."""
    # Torch's compiler, which accelerate loads, sets it where it is not set.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))

    def forget() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    def accelerator(**options: Any) -> Accelerator:
        forget()
        return Accelerator(cpu=True, **options)

    yield accelerator
    forget()


class Recorder:
    """A source that remembers the steps at which it computed, and has a state to save."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.models: list[Any] = []
        self.total = 0

    def compute(self, ctx: Context) -> int:
        self.steps.append(ctx.step)
        self.models.append(ctx.model)
        self.total += 1
        return self.total

    def state_dict(self) -> dict[str, int]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.total = state["total"]


def recording(**options: Any) -> tuple[SharedState, Recorder]:
    state, source = SharedState(), Recorder()
    state.add("x", source, **options)
    return state, source


def prepared(accelerator: Accelerator, batches: int = 7) -> tuple[Any, Any, Any]:
    """Loader, model and optimizer, the loader with so many batches a process."""
    data = torch.arange(batches * 2.0 * accelerator.num_processes).reshape(-1, 1) / 100
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader, model, optimizer = accelerator.prepare(DataLoader(TensorDataset(data), batch_size=2), model, optimizer)
    return loader, model, optimizer


def train(accelerator: Accelerator, hook: SyncStateHook, parts: tuple[Any, Any, Any], *, attached: bool) -> list[Any]:
    """One epoch; returns what `x` was in each forward."""
    loader, model, optimizer = parts
    seen = []
    for (batch,) in loader:
        with accelerator.accumulate(model):
            loss = model(batch).mean()
            seen.append(hook.state.get("x"))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if not attached:
                hook.step()
    return seen
