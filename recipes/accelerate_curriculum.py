"""A language model with a shared curriculum. Accelerate, Hydra.

A small network learns to predict the next character of Python's standard library. It reads short pieces first and
longer ones later. The length is a shared value: ranks that read pieces of different lengths would wait for each other
in every step, and weigh their characters differently. A second one is the temperature of the softmax, high at first.

    torchrun --nproc-per-node 2 recipes/accelerate_curriculum.py
    accelerate launch --num_processes 2 --cpu recipes/accelerate_curriculum.py
    python recipes/accelerate_curriculum.py syncstate.schedule.steps=5        # one process
    torchrun --nproc-per-node 2 recipes/accelerate_curriculum.py syncstate/transport=async syncstate.transport.lag=2
    torchrun --nproc-per-node 2 recipes/accelerate_curriculum.py syncstate/schedule=overhead  # as often as 1 % allows

All ranks write to one directory, by the `hydra.run.dir` line of the config. The ranks of torchrun and of `accelerate
launch` agree on its `RUN_ID` by themselves; with another launcher set it: `RUN_ID=first mpirun ...`
"""

import math
import sysconfig
import zlib
from pathlib import Path

import hydra
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import agreement, join_run, lacks_ranks, leave_run, start_ranks
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm  # type: ignore[import-untyped]

from syncstate import Context
from syncstate.accelerate import SyncStateHook
from syncstate.config import build

SYMBOLS = 128  # ASCII
ACCUMULATE = 2  # batches for one optimizer step


class CharacterModel(nn.Module):
    """Scores for each next character: characters `[batch, length]` to scores `[batch, length, SYMBOLS]`."""

    def __init__(self, embedding: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, embedding)
        self.recur = nn.GRU(embedding, hidden, batch_first=True)
        self.score = nn.Linear(hidden, SYMBOLS)

    def forward(self, characters: Tensor) -> Tensor:
        scores: Tensor = self.score(self.recur(self.embed(characters))[0])
        return scores


def library_text(characters: int) -> Tensor:
    """The beginning of Python's standard library as numbers below `SYMBOLS`."""
    text = b""
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += file.read_text(encoding="utf-8").encode("ascii", "replace")
        if len(text) >= characters:
            break
    return torch.tensor(list(text[:characters]))


def pieces(text: Tensor, starts: Tensor, length: int) -> Tensor:
    """Pieces of the text, one from each start: `[len(starts), length + 1]`, the last character only to be predicted."""
    return text[starts[:, None] + torch.arange(length + 1, device=starts.device)]


def loss_of(model: nn.Module, batch: Tensor, temperature: float = 1.0) -> Tensor:
    """Cross-entropy of the next character in nats, the mean over the batch."""
    scores = model(batch[:, :-1]) / temperature
    return nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def bits_per_character(accelerator: Accelerator, model: nn.Module, text: Tensor, length: int) -> float:
    """Loss on a text in bits per character. Each rank takes a part of it."""
    model.eval()
    starts = torch.arange(0, len(text) - length, length, device=text.device)
    mine = starts[accelerator.process_index :: accelerator.num_processes]
    nats = sum(loss_of(model, pieces(text, part, length)).item() * len(part) for part in mine.split(128))
    total = accelerator.reduce(torch.tensor([nats, len(mine)], device=accelerator.device))
    model.train()
    return float(total[0] / total[1]) / math.log(2)


def train(cfg: DictConfig, run_dir: Path) -> None:
    """Everything that a rank does."""
    accelerator = Accelerator(cpu=cfg.cpu, gradient_accumulation_steps=ACCUMULATE)
    torch.set_num_threads(1)  # more would only slow down a network this small
    set_seed(cfg.seed)
    text = library_text(cfg.data.characters).to(accelerator.device)
    held_out = int(len(text) * cfg.data.held_out)
    longest = cfg.length.last

    state, options = build(cfg.syncstate)
    options["config"] = {**options.get("config", {}), "text": zlib.crc32(bytes(text.tolist()))}

    @state.shared()
    def length(ctx: Context) -> int:
        """Runs on the main process, by the config's schedule."""
        grown = min(1.0, ctx.step / cfg.length.steps)
        return int(cfg.length.first + grown * (longest - cfg.length.first))

    starts = TensorDataset(torch.arange(0, len(text) - held_out - longest, longest))
    model = CharacterModel(cfg.network.embedding, cfg.network.hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.network.lr)
    loader = DataLoader(starts, cfg.data.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    hook = SyncStateHook(accelerator, state, **options)
    before = bits_per_character(accelerator, model, text[-held_out:], longest)
    batches = cfg.epochs * len(loader)
    with hook, tqdm(total=batches, unit="batch", disable=not accelerator.is_main_process) as bar:
        for epoch in range(cfg.epochs):
            hook.set_epoch(epoch)  # before the loader is iterated
            for (batch,) in loader:
                with accelerator.accumulate(model):
                    loss = loss_of(model, pieces(text, batch, length.value), state["temperature"])
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    hook.step()  # right after the optimizer's; counts optimizer steps, not batches
                bar.set_postfix(length=length.value, temperature=f"{state['temperature']:.2f}", refresh=False)
                bar.update()
        agreed, table = agreement(state)
    after = bits_per_character(accelerator, model, text[-held_out:], longest)

    if accelerator.is_main_process:
        print(f"after the last step: {'all ranks agree' if agreed else 'RANKS DIFFER'}\n{table}")
        print(f"validation loss: {before:.2f} bits per character before, {after:.2f} after", flush=True)
        torch.save(accelerator.unwrap_model(model).state_dict(), run_dir / "model.pt")
        print(f"model: {run_dir / 'model.pt'}", flush=True)
    accelerator.free_memory()


@hydra.main(version_base="1.3", config_path="../configs/experiment", config_name="accelerate_curriculum")
def main(cfg: DictConfig) -> None:
    """Check the config, then train."""
    build(cfg.syncstate)  # an impossible setting ends here, before there are ranks
    composed = DictConfig(OmegaConf.to_container(cfg, resolve=True))
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    if lacks_ranks():
        print(f"accelerate launch --cpu started one process; starting ranks={cfg.ranks}", flush=True)
        start_ranks(train, cfg.ranks, composed, run_dir)
    else:
        train(composed, run_dir)


if __name__ == "__main__":
    join_run()
    main()
    leave_run()
