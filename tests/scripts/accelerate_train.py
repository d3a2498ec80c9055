"""A training script as a user writes it, for `accelerate launch` and torchrun; each process leaves a report."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from syncstate import Context, Every, SharedState
from syncstate.accelerate import SyncStateHook
from syncstate.values import SampledIndices


def main(folder: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    state, computed = SharedState(), []
    state.add("sampled", SampledIndices(64, 8), every=Every(epochs=1))

    @state.shared(every=Every(steps=2))
    def threshold(ctx: Context) -> float:
        computed.append(ctx.step)
        return ctx.step / 10

    data = torch.arange(14.0 * accelerator.num_processes).reshape(-1, 1)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader, model, optimizer = accelerator.prepare(DataLoader(TensorDataset(data), batch_size=2), model, optimizer)
    thresholds, sampled = [], []
    with SyncStateHook(accelerator, state) as hook:
        for epoch in range(2):
            hook.set_epoch(epoch)
            sampled.append(state["sampled"].tolist())
            for (batch,) in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).mean())
                    optimizer.step()
                    optimizer.zero_grad()
                    hook.step()
                thresholds.append(threshold.value)
    report = {
        "rank": accelerator.process_index,
        "world_size": accelerator.num_processes,
        "wrapped": type(model).__name__,
        "computed": computed,
        "thresholds": thresholds,
        "sampled": sampled,
        "seen": hook.engine.seen,
    }
    (folder / f"{accelerator.process_index}.json").write_text(json.dumps(report))
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
