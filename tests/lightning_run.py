"""A small training for the tests of the Lightning host, which writes down what it reads and when."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, Sampler, TensorDataset

from syncstate import Context, Every, SharedState
from syncstate.lightning import shared

__all__ = ["Draw", "Model", "Saver", "drawing", "evaluate", "fit", "make_ddp_trainer", "make_trainer", "quiet"]


class Draw:
    """A source with all that a resumed run could get wrong: a state, a random draw, the value before.

    Attributes:
        points: Step and epoch of each computation in this process.
    """

    def __init__(self) -> None:
        self.points: list[tuple[int, int]] = []
        self.total = 0

    def compute(self, ctx: Context) -> list[int]:
        self.points.append((ctx.step, ctx.epoch))
        self.total += 1
        return [ctx.step, ctx.epoch, self.total, int(ctx.rng.integers(1 << 40)), sum(ctx.previous or [])]

    def state_dict(self) -> dict[str, int]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.total = state["total"]


def drawing(**schedules: Every) -> tuple[SharedState, dict[str, Draw]]:
    """A state with one such value for each name; without any, `draw` for every second step."""
    state, draws = SharedState(), {name: Draw() for name in schedules or ("draw",)}
    for name, draw in draws.items():
        state.add(name, draw, every=schedules.get(name, Every(steps=2)))
    return state, draws


class Order(Sampler[int]):
    """Writes down a shared value at the moment when the loader begins to draw.

    Attributes:
        drawn: The value at each beginning.
    """

    def __init__(self, size: int, read: Callable[[], Any]) -> None:
        self.size, self.read = size, read
        self.drawn: list[Any] = []

    def __iter__(self) -> Iterator[int]:
        self.drawn.append(self.read())
        return iter(range(self.size))

    def __len__(self) -> int:
        return self.size


class Model(LightningModule):
    """One weight.

    Args:
        batches: How many batches a rank has in an epoch.
        optimizers: More than one means manual optimization, in which each steps in each batch.
        workers: Of the training loader. With one, its iterator draws from the sampler as soon as it is made.
        act: Called at each training batch with the module.

    Attributes:
        read: (step, epoch, values) of each training batch; "drawn with" is what `order` was when its iterator was made.
        elsewhere: The values that were read first in other places, by the place.
    """

    def __init__(
        self, batches: int = 4, *, optimizers: int = 1, workers: int = 0, act: Callable[[Model], object] | None = None
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Linear(1, 1)
        self.batches, self.workers, self.act = batches, workers, act
        self.optimizer_count, self.automatic_optimization = optimizers, optimizers == 1
        self.read: list[tuple[int, int, dict[str, Any]]] = []
        self.elsewhere: dict[str, dict[str, Any]] = {}
        self.order = Order(batches, self.shared_order)
        self.batch_size, self.lr = 1, 0.01  # what Lightning's finders look for

    def values(self) -> dict[str, Any]:
        return dict(shared(self))

    def shared_order(self) -> Any:
        return self.values().get("order")

    def note(self, where: str) -> None:
        self.elsewhere.setdefault(where, self.values())

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> Any:
        drawn = {"drawn with": self.order.drawn[-1]} if self.order.drawn else {}
        self.read.append((self.trainer.global_step, self.trainer.current_epoch, self.values() | drawn))
        if self.act is not None:
            self.act(self)
        loss = self.weight(batch[0]).square().mean()
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return None

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.note("sanity validation" if self.trainer.sanity_checking else "validation")

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.note("test")

    def predict_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.note("predict")

    def configure_optimizers(self) -> Any:
        made = [torch.optim.SGD(self.parameters(), self.lr) for _ in range(self.optimizer_count)]
        return made if len(made) > 1 else made[0]

    def train_dataloader(self) -> DataLoader[Any]:
        self.note("train_dataloader")
        ranks = self.trainer.world_size
        sampler = self.order if ranks == 1 else None  # Lightning would put its own in place
        data = TensorDataset(torch.ones(self.batches * ranks, 1))
        return DataLoader(data, self.batch_size, sampler=sampler, num_workers=self.workers)

    def val_dataloader(self) -> DataLoader[Any]:
        self.note("val_dataloader")
        return DataLoader(TensorDataset(torch.ones(2 * self.trainer.world_size, 1)))

    test_dataloader = predict_dataloader = val_dataloader


class Saver(ModelCheckpoint):
    """Keeps every checkpoint, as `<step>.ckpt`."""

    def __init__(self, folder: Path, **when: Any) -> None:
        super().__init__(folder, "{step}", save_top_k=-1, auto_insert_metric_name=False, **when)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without Lightning's advice, and without what torch says of Lightning's own calls."""
    with warnings.catch_warnings():
        for category in (UserWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        yield


def make_trainer(*callbacks: Callback, **options: Any) -> Trainer:
    """A quiet trainer for one process and two epochs; without logger and validation unless asked for."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    defaults: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "max_epochs": 2, "logger": False, "limit_val_batches": 0,
        "enable_checkpointing": saves, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    with quiet():
        return Trainer(callbacks=list(callbacks), **{**defaults, **options})


def make_ddp_trainer(*callbacks: Callback, **options: Any) -> Trainer:
    """The same for two ranks that a launcher has started. Lightning makes the process group."""
    ddp = {"devices": 2, "strategy": DDPStrategy(process_group_backend="gloo")}
    return make_trainer(*callbacks, **{**ddp, **options})


def fit(trainer: Trainer, model: Model | None = None, ckpt_path: Path | None = None) -> Model:
    """Train the model, or a new one, and return it."""
    model = model or Model()
    with quiet():
        trainer.fit(model, ckpt_path=ckpt_path)
    return model


def evaluate(trainer: Trainer, how: str, model: Model | None = None, ckpt_path: Path | None = None) -> Model:
    """Validate, test or predict; `how` is the trainer's method."""
    model = model or Model()
    with quiet():
        getattr(trainer, how)(model, ckpt_path=ckpt_path, **({} if how == "predict" else {"verbose": False}))
    return model
