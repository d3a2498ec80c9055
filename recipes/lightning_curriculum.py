"""Learning from wrong labels, with a curriculum that all ranks share. Lightning, DDP, Hydra.

Handwritten digits, two in five of the training labels wrong. A network learns the right labels first, because they
agree with each other, and the wrong ones later, by heart. So a sample whose loss is large after a while probably has a
wrong label. The curriculum is a threshold on the loss of a sample: what lies above it is left out. By the config it
comes down with the steps (`falling_limit`), or it is a quantile of the losses that all ranks have seen since the last
refresh (`quantile_limit`), which follows the training by itself.

Three values are shared by the ranks: a seed and the order of the samples, new in every epoch, and the threshold, new
every `syncstate.schedule.steps` optimizer steps. The ranks must agree on all of them, or they would learn from
overlapping shards by different rules.

    python recipes/lightning_curriculum.py
    python recipes/lightning_curriculum.py syncstate.schedule.steps=7 'seeds=[0]'
    python recipes/lightning_curriculum.py --multirun syncstate.schedule.steps=5,10
    python recipes/lightning_curriculum.py 'syncstate/values=[seed,indices,quantile_limit]'
"""

import logging
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
from common import agreement, is_rank, join_run, leave_run, start_ranks
from figures import draw_curriculum
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from omegaconf import DictConfig, OmegaConf
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from syncstate.config import build
from syncstate.lightning import SyncStateCallback, shared
from syncstate.samplers import SharedIndexSampler

DIGITS = 1797  # that scikit-learn ships


class Digits(LightningModule):
    """A network for digits of 8 x 8 pixels, with its data.

    Args:
        cfg: The recipe's config.
        curriculum: Whether samples with a loss above the threshold are left out.
    """

    def __init__(self, cfg: DictConfig, curriculum: bool) -> None:
        super().__init__()
        self.cfg = cfg
        self.curriculum = curriculum
        width = cfg.network.hidden
        self.network = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Dropout(cfg.network.dropout),
            nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, 10),
        )  # fmt: skip
        self.train_set, self.test_set = noisy_digits(**cfg.data)

    def train_dataloader(self) -> DataLoader[Any]:
        """Shards of the shared order. Lightning adds no sampler of its own to this one."""
        sampler = SharedIndexSampler(shared(self), "indices")
        return DataLoader(self.train_set, self.cfg.data.batch_size, sampler=sampler)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.test_set, batch_size=len(self.test_set))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        images, labels = batch
        losses = nn.functional.cross_entropy(self.network(images), labels, reduction="none")
        if self.curriculum:
            shared(self).observe("curriculum", losses)  # of all samples; only a limit by quantile takes them
        kept = losses <= shared(self)["curriculum"] if self.curriculum else torch.ones_like(losses, dtype=torch.bool)
        loss = (losses * kept).sum() / kept.sum().clamp(min=1)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        images, labels = batch
        right = self.network(images).argmax(dim=1) == labels
        self.log("accuracy", right.float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.cfg.network.lr)


def noisy_digits(train: int, wrong: float, seed: int, **_: Any) -> tuple[TensorDataset, TensorDataset]:
    """Training data of which a share has a wrong label, and clean test data; the same on every rank."""
    rng = np.random.default_rng(seed)
    images, labels = load_digits(return_X_y=True)
    order = rng.permutation(len(labels))
    images, labels = images[order].astype(np.float32) / 16, labels[order]
    chosen = rng.permutation(train)[: round(wrong * train)]
    labels[chosen] = (labels[chosen] + rng.integers(1, 10, len(chosen))) % 10  # any of the nine others
    data = TensorDataset(torch.from_numpy(images), torch.from_numpy(labels))
    return TensorDataset(*data[:train]), TensorDataset(*data[train:])


@dataclass
class History:
    """What one training leaves for the report."""

    thresholds: list[tuple[int, float]] = field(default_factory=list)  # (optimizer step, threshold)
    losses: list[float] = field(default_factory=list)  # of an epoch, mean over ranks
    accuracies: list[float] = field(default_factory=list)  # on the test set after an epoch
    refreshes: int = 0
    agreed: int = 0  # refreshes after which all ranks held the same values


class Watch(Callback):
    """Looks after each refresh whether the ranks agree, and keeps a history. Stands behind `SyncStateCallback`.

    Args:
        tables: Whether rank 0 prints what the ranks hold, after refresh 1, 2, 4, 8 and so on.
    """

    def __init__(self, tables: bool) -> None:
        self.tables = tables
        self.history = History()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look(trainer)

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        self._look(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.history.losses.append(trainer.callback_metrics["loss"].item())
        self.history.accuracies.append(trainer.callback_metrics["accuracy"].item())

    def _look(self, trainer: Trainer) -> None:
        state = shared(trainer)
        count = state.info("curriculum").version
        if count == self.history.refreshes:
            return
        self.history.refreshes = count
        self.history.thresholds.append((trainer.global_step, state["curriculum"]))
        agreed, table = agreement(state)
        self.history.agreed += agreed
        if self.tables and trainer.is_global_zero and count & (count - 1) == 0:
            verdict = "all ranks agree" if agreed else "RANKS DIFFER"
            print(f"step {trainer.global_step}, refresh {count}: {verdict}\n{table}", flush=True)


def fit(cfg: DictConfig, run_dir: Path, seed: int, curriculum: bool, tables: bool) -> History:
    """Train once, on this rank of several."""
    seed_everything(seed, verbose=False)
    cfg.syncstate.seed = seed
    watch = Watch(tables)
    trainer = Trainer(
        **cfg.trainer,
        callbacks=[SyncStateCallback.from_config(cfg.syncstate), watch],
        default_root_dir=run_dir,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Digits(cfg, curriculum))
    if trainer.is_global_zero:
        how = "with" if curriculum else "without"
        accuracy = watch.history.accuracies[-1]
        print(f"seed {seed}, {how} curriculum: accuracy {accuracy:.1%} after {trainer.global_step} steps", flush=True)
    return watch.history


def train(cfg: DictConfig, run_dir: Path) -> None:
    """Everything that a rank does: all trainings, and on rank 0 the report."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", "The '.*_dataloader' does not have many workers")  # the data are in memory
    warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`")  # Lightning's own
    with_, without = [], []
    for count, seed in enumerate(cfg.seeds):
        with_.append(fit(cfg, run_dir, seed, curriculum=True, tables=count == 0))
        without.append(fit(cfg, run_dir, seed, curriculum=False, tables=False))
    if torch.distributed.get_rank() == 0:
        path = run_dir / "curriculum.png"
        draw_curriculum(path, with_, without)
        print(f"{report(cfg, with_, without)}\nfigure: {path}", flush=True)


def report(cfg: DictConfig, with_: list[History], without: list[History]) -> str:
    """Both accuracies for every seed, and by how much the curriculum is better or worse."""
    wrong, tests = cfg.data.wrong, DIGITS - cfg.data.train
    lines = [
        f"accuracy after the last epoch, on {tests} clean test digits; {wrong:.0%} of the training labels are wrong",
        "seed   without      with   difference",
    ]
    last = [(a.accuracies[-1], b.accuracies[-1]) for a, b in zip(without, with_, strict=True)]
    lines += [
        f"{s:<4} {a:>9.1%} {b:>9.1%}  {100 * (b - a):+5.1f} points" for s, (a, b) in zip(cfg.seeds, last, strict=True)
    ]
    gains = [100 * (b - a) for a, b in last]
    mean = sum(gains) / len(gains)
    lines.append(f"with the curriculum the accuracy is {abs(mean):.1f} points {'LOWER' if mean < 0 else 'higher'}")
    if len(gains) > 1:
        lines[-1] += f", the mean of {len(gains)} seeds (from {min(gains):+.1f} to {max(gains):+.1f})"
    best_without, best_with = (sum(max(run.accuracies) for run in runs) / len(runs) for runs in (without, with_))
    lines.append(
        f"at the best epoch, which only clean test data could tell: {best_without:.1%} without, {best_with:.1%} with"
    )
    agreed, refreshes = (
        sum(counts) for counts in zip(*((run.agreed, run.refreshes) for run in with_ + without), strict=True)
    )
    lines.append(f"the ranks agreed on all values after {agreed} of {refreshes} refreshes")
    return "\n".join(lines)


@hydra.main(version_base="1.3", config_path="../configs/experiment", config_name="lightning_curriculum")
def main(cfg: DictConfig) -> None:
    """Check the config, then train on all ranks."""
    build(cfg.syncstate)  # an impossible setting ends here, before there are ranks
    composed = DictConfig(OmegaConf.to_container(cfg, resolve=True))
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    if is_rank():
        train(composed, run_dir)
    else:
        start_ranks(train, cfg.trainer.devices, composed, run_dir)


if __name__ == "__main__":
    join_run()
    main()
    leave_run()
