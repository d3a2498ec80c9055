"""A small training project with the folders and the main script that lightning-hydra-template made common.

Tests write it into a folder of their own and compose or run it as a user would. Of syncstate it knows one value of its
own (`configs/syncstate/values/hard.yaml`), one experiment, and the model's reading of a seed.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

__all__ = ["compose_in", "importable", "run_in", "write_project"]

_TRAIN = """\
# @package _global_
defaults:
  - _self_
  - data: numbers
  - model: line
  - callbacks: default
  - logger: null
  - trainer: default
  - paths: default
  - hydra: default
  - experiment: null
  - optional local: default

task_name: train
"""

_CALLBACKS = """\
defaults:
  - model_checkpoint
  - early_stopping
  - _self_

model_checkpoint:
  dirpath: ${paths.output_dir}/checkpoints
  save_last: true

early_stopping:
  monitor: loss
  patience: 100
"""

_CHECKPOINT = """\
model_checkpoint:
  _target_: lightning.pytorch.callbacks.ModelCheckpoint
  dirpath: null
  save_last: null
  every_n_train_steps: 2
"""

_STOPPING = """\
early_stopping:
  _target_: lightning.pytorch.callbacks.EarlyStopping
  monitor: ???
  patience: 3
"""

_TRAINER = """\
_target_: lightning.pytorch.Trainer
default_root_dir: ${paths.output_dir}
accelerator: cpu
devices: 1
max_epochs: 2
enable_progress_bar: false
enable_model_summary: false
"""

_HYDRA = """\
# One directory on all ranks: started a second apart, they would each read another time from the clock.
run:
  dir: logs/${oc.env:RUN_ID,${now:%Y-%m-%d_%H-%M-%S}}
sweep:
  dir: logs/${oc.env:RUN_ID,${now:%Y-%m-%d_%H-%M-%S}}
"""

_HARD = """\
defaults:
  - /syncstate/schedule@hard.every: null
  - _self_

hard:
  source: src.hard.hardest
"""

_EXPERIMENT = """\
# @package _global_
defaults:
  - override /callbacks: [default, syncstate]
  - override /syncstate/schedule: every_n_epochs
  - override /syncstate/values: [seed, hard]

syncstate:
  schedule:
    epochs: 3
"""

_TRAIN_PY = """\
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def callbacks_of(cfg: DictConfig) -> list:
    return [hydra.utils.instantiate(node) for node in (cfg.get("callbacks") or {}).values() if "_target_" in node]


@hydra.main(version_base="1.3", config_path="../configs", config_name="train")
def main(cfg: DictConfig) -> None:
    datamodule = hydra.utils.instantiate(cfg.data)
    model = hydra.utils.instantiate(cfg.model)
    trainer = hydra.utils.instantiate(cfg.trainer, callbacks=callbacks_of(cfg), logger=False)
    trainer.fit(model=model, datamodule=datamodule)


if __name__ == "__main__":
    main()
"""

_DATA_PY = """\
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset


class Numbers(LightningDataModule):
    def __init__(self, size: int, batch_size: int) -> None:
        super().__init__()
        x = torch.linspace(-1, 1, size).unsqueeze(1)
        self.dataset = TensorDataset(x, 2 * x)
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.dataset, batch_size=self.batch_size)
"""

_MODEL_PY = """\
import json
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import LightningModule
from syncstate.lightning import shared


class Line(LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, index):
        self.seen.append([self.global_step, shared(self)["seed"]])
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layer(x), y)
        self.log("loss", loss)
        return loss

    def on_train_end(self) -> None:
        told = {"seen": self.seen, "output_dir": HydraConfig.get().runtime.output_dir}
        Path(f"rank{self.global_rank}.json").write_text(json.dumps(told))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)
"""

_HARD_PY = """\
def hardest(ctx):
    return ctx.step


def offset(ctx, by):
    return ctx.step + by


class Hardest:
    def __init__(self, k, scores=()):
        self.k = k
        self.scores = scores

    def compute(self, ctx):
        return ctx.step * self.k


def watch(value, ctx):
    pass
"""

_FILES = {
    "configs/train.yaml": _TRAIN,
    "configs/data/numbers.yaml": "_target_: src.data.Numbers\nsize: 16\nbatch_size: 2\n",
    "configs/model/line.yaml": "_target_: src.model.Line\nlr: 0.1\n",
    "configs/callbacks/default.yaml": _CALLBACKS,
    "configs/callbacks/model_checkpoint.yaml": _CHECKPOINT,
    "configs/callbacks/early_stopping.yaml": _STOPPING,
    "configs/trainer/default.yaml": _TRAINER,
    "configs/trainer/ddp.yaml": "defaults: [default, _self_]\nstrategy: ddp\ndevices: 2\n",
    "configs/logger/none.yaml": "",
    "configs/paths/default.yaml": "output_dir: ${hydra:runtime.output_dir}\n",
    "configs/hydra/default.yaml": _HYDRA,
    "configs/syncstate/values/hard.yaml": _HARD,
    "configs/experiment/epochs.yaml": _EXPERIMENT,
    "src/__init__.py": "",
    "src/train.py": _TRAIN_PY,
    "src/data.py": _DATA_PY,
    "src/model.py": _MODEL_PY,
    "src/hard.py": _HARD_PY,
}


def write_project(folder: Path) -> Path:
    """Write the project into the folder and return it."""
    for name, text in _FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@contextlib.contextmanager
def importable(project: Path) -> Iterator[Path]:
    """The project's folder on `sys.path`, and its modules forgotten afterwards."""
    sys.path.insert(0, str(project))
    try:
        yield project
    finally:
        sys.path.remove(str(project))
        for name in [name for name in sys.modules if name.split(".")[0] == "src"]:
            del sys.modules[name]


def compose_in(project: Path, *overrides: str) -> DictConfig:
    """The project's config as `src/train.py` would see it with these arguments."""
    with initialize_config_dir(str(project / "configs"), version_base="1.3"):
        return compose("train", overrides=list(overrides))


def run_in(
    project: Path, *command: str, timeout: float = 60.0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run python with this command in the project's folder; stdout and stderr come back as text."""
    return subprocess.run(
        [sys.executable, *command], cwd=project, env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
