"""Replicas that part, and are found and repaired. Plain PyTorch, DDP, Hydra.

DDP gives all replicas the same gradients and takes it for granted that they were equal. Here they are disturbed on
purpose: at known steps one rank changes a tensor of its own replica, as a faulty memory or a kernel that is not
deterministic would. DDP does not notice; each rank goes on training a model of its own.

The training is done twice. With syncstate, a resync looks every `syncstate.schedule.steps` optimizer steps, reports
what has parted (tensor, rank, how much), and repairs it. Without, the replicas stay apart.

    python recipes/periodic_resync.py
    python recipes/periodic_resync.py syncstate/resync=check
    python recipes/periodic_resync.py syncstate/resync=average syncstate.schedule.steps=10
    python recipes/periodic_resync.py ranks=3 syncstate.resync.source=majority 'disturbances=[{step: 60, rank: 0,
        tensor: 2.weight, how: noise, size: 0.3}]'
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
import torch
import torch.distributed as dist
from common import is_rank, join_run, leave_run, start_ranks
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from resync_figure import draw
from sklearn.datasets import load_digits
from torch import Tensor, nn

from syncstate import SyncEngine
from syncstate.config import build
from syncstate.resync import DriftReport

TRAIN = 1397  # digits to learn from, of the 1797 that scikit-learn ships; the rest tells how good a replica is
HOW = ("noise", "scale", "ulp")


@dataclass
class History:
    """What one training leaves for the report."""

    steps: list[int] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)  # at each of the steps, of every rank's own replica
    apart: list[float] = field(default_factory=list)  # the largest difference of a parameter between replicas
    accuracies: list[float] = field(default_factory=list)  # of every rank's replica, in the end
    reports: list[DriftReport] = field(default_factory=list)  # of the resyncs that found something


def digits(seed: int) -> tuple[Tensor, Tensor]:
    """Images and labels in an order of their own, the same on every rank."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return torch.from_numpy(images).float()[order] / 16, torch.from_numpy(labels)[order]


def disturb(net: nn.Module, how: str, tensor: str, size: float) -> None:
    """Change a tensor of this rank's replica, and of no other."""
    parameter = net.get_parameter(tensor)
    with torch.no_grad():
        if how == "noise":
            parameter.add_(size * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        elif how == "scale":
            parameter.mul_(size)
        else:
            flat = parameter.view(-1)
            flat[0] = torch.nextafter(flat[0], torch.tensor(float("inf")))


def fit(cfg: DictConfig, resyncs: bool) -> History:
    """Train once, on this rank of several."""
    torch.manual_seed(cfg.training.seed)
    rank, ranks, width = dist.get_rank(), dist.get_world_size(), cfg.training.hidden
    net = nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )  # fmt: skip
    ddp = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=cfg.training.lr)
    images, labels = digits(cfg.training.seed)
    draws = torch.Generator().manual_seed(cfg.training.seed)
    history = History()
    node: Any = OmegaConf.to_container(cfg.syncstate)
    if node["resync"] and resyncs:
        node["resync"]["on_drift"] = history.reports.append
    state, options = build({**node, "resync": node["resync"] if resyncs else None})
    with SyncEngine(state, **options) as engine:
        engine.model = net
        engine.start()
        for step in range(1, cfg.training.steps + 1):
            batch = torch.randint(TRAIN, (ranks, cfg.training.batch_size), generator=draws)[rank]
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(images[batch]), labels[batch]).backward()
            optimizer.step()
            engine.step(step)
            if step % cfg.training.look == 0:
                look(net, images[TRAIN:], labels[TRAIN:], step, history)
            for what in cfg.disturbances:
                if (what.step, what.rank) == (step, rank):
                    disturb(net, what.how, what.tensor, what.size)
    history.accuracies = gathered((net(images[TRAIN:]).argmax(dim=1) == labels[TRAIN:]).float().mean())
    return history


def look(net: nn.Module, images: Tensor, labels: Tensor, step: int, history: History) -> None:
    """Note how good each replica is, and how far they are apart, over the default group and not over syncstate's."""
    with torch.no_grad():
        loss = nn.functional.cross_entropy(net(images), labels)
        mine = nn.utils.parameters_to_vector(net.parameters())
        first = mine.clone()
        dist.broadcast(first, src=0)
        history.steps.append(step)
        history.losses.append(gathered(loss))
        history.apart.append(max(gathered((mine - first).abs().max())))


def gathered(number: Tensor) -> list[float]:
    """A number of every rank."""
    found = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(found, number.detach())
    return [one.item() for one in found]


def train(cfg: DictConfig, run_dir: Path) -> None:
    """Everything that a rank does: both trainings, and on rank 0 the report."""
    torch.set_num_threads(1)  # the network is small, and the ranks share the processors
    dist.init_process_group("gloo")
    with_, without = fit(cfg, resyncs=True), fit(cfg, resyncs=False)
    if dist.get_rank() == 0:
        path = run_dir / "resync.png"
        mode = cfg.syncstate.resync.mode if cfg.syncstate.resync else "none"
        draw(path, with_, without, [(what.step, what.rank, what.tensor) for what in cfg.disturbances], mode)
        print(f"{report(cfg, with_, without)}\nfigure: {path}", flush=True)
    dist.barrier()


def report(cfg: DictConfig, with_: History, without: History) -> str:
    """What was disturbed, what was found, and where the replicas are in the end."""
    rows: list[tuple[str, ...]] = [("disturbed after step", "tensor", "rank", "how")]
    rows += [(str(d.step), d.tensor, str(d.rank), f"{d.how} {d.size:g}") for d in cfg.disturbances]
    lines = table(rows)
    rows = [("found at step", "tensor", "ranks", "largest difference")]
    for found in with_.reports:
        for drift in found.drifted:
            ranks = ",".join(map(str, drift.ranks))
            rows.append((str(found.step), drift.name, ranks, f"{drift.max_abs_diff:.3g}"))
    lines += ["", *(table(rows) if len(rows) > 1 else ["no resync has reported anything"])]
    rows = [("", *(f"rank {rank}" for rank in range(len(with_.accuracies))), "largest difference")]
    for name, run in (("without resync", without), ("with resync", with_)):
        rows.append((name, *(f"{accuracy:.1%}" for accuracy in run.accuracies), f"{run.apart[-1]:.3g}"))
    return "\n".join([*lines, "", "right on the test digits, each rank's replica in the end:", *table(rows)])


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows as aligned lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def check(cfg: DictConfig) -> None:
    """End on an impossible setting, before any rank is started."""
    build(cfg.syncstate)
    names = {"0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"}
    for number, what in enumerate(cfg.disturbances):
        allowed = {"how": HOW, "tensor": sorted(names), "rank": range(cfg.ranks)}
        for key, values in allowed.items():
            if what[key] not in values:
                told = ", ".join(map(str, values))
                sys.exit(f"disturbances.{number}.{key} must be one of {told}, got {what[key]!r}")


@hydra.main(version_base="1.3", config_path="../configs/experiment", config_name="periodic_resync")
def main(cfg: DictConfig) -> None:
    """Check the config, then train on all ranks."""
    check(cfg)
    composed = DictConfig(OmegaConf.to_container(cfg, resolve=True))
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    if is_rank():
        train(composed, run_dir)
    else:
        start_ranks(train, cfg.ranks, composed, run_dir)


if __name__ == "__main__":
    join_run()
    main()
    leave_run()
