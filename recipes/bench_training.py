"""How much a sync every ten steps slows down a training: a small network under DDP."""

from collections.abc import Mapping

import torch
from bench_lab import Lab, Operation
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncstate import Context, Every, SharedState, SyncEngine

__all__ = ["train_with_syncs"]

_STEPS = 10
_BATCH = 128
_WIDTH = 256
_INDICES = 1000


def train_with_syncs(lab: Lab, target: Mapping[int, float]) -> None:
    """Ten steps with a sync in one of them, over ten steps without: in percent more.

    Shared are a seed, the order of 1000 samples, and a threshold.

    Args:
        lab: Takes the reading.
        target: World size -> percent.
    """
    state = SharedState()
    order = torch.randperm(_INDICES, generator=torch.Generator().manual_seed(0))
    state.add("seed", lambda ctx: ctx.step, every=Every(steps=_STEPS))
    state.add("indices", lambda ctx: order, every=Every(steps=_STEPS))
    state.add("threshold", _threshold, every=Every(steps=_STEPS))
    step_once = _Step()
    step = 0

    def with_syncs() -> None:
        nonlocal step
        for _ in range(_STEPS):
            step_once()
            step += 1
            engine.step(step)

    def without() -> None:
        for _ in range(_STEPS):
            step_once()

    with SyncEngine(state) as engine:
        engine.start()
        over = Operation(without, list)
        lab.ratio("syncstate", Operation(with_syncs, list), over=over, want=[], target=target, share=1 / 5, excess=True)
        lab.meet()  # a rank that ends earlier is missed by one that still shares


def _threshold(ctx: Context) -> float:
    return 1.0 / (1 + ctx.step)


class _Step:
    """One optimizer step of a network, on the same batch every time."""

    def __init__(self) -> None:
        layers = nn.Sequential(nn.Linear(64, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH), nn.ReLU())
        self._model = DistributedDataParallel(nn.Sequential(layers, nn.Linear(_WIDTH, 10)))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._batch = torch.rand(_BATCH, 64), torch.randint(10, (_BATCH,))

    def __call__(self) -> None:
        images, labels = self._batch
        self._optimizer.zero_grad()
        nn.functional.cross_entropy(self._model(images), labels).backward()
        self._optimizer.step()
