"""One rank with an environment of its own: shares values whose order or text could depend on it, and prints them."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from syncstate import Context, Every, SharedState, SyncEngine


def words(ctx: Context) -> dict[str, object]:
    """Types whose iteration or text depends on hash seed, locale or time zone, if anybody lets it."""
    return {
        "set": {f"wörd {n}" for n in range(20)} | {1, 2.5, ("a", None)},
        "text": "\u017e\ud83d \u00e9",
        "path": Path("a/\u00e9"),
        "float": 0.1 + ctx.step,
        "order": {f"k{n}": n for n in (3, 1, 2)},
        "draw": ctx.rng.integers(1 << 40, size=3),
    }


def main() -> None:
    rank, world_size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    state = SharedState()
    state.add("words", words, every=Every(steps=1))
    with SyncEngine(state, timeout=30.0, verify_values=True) as engine:
        for step in range(3):
            engine.step(step)
    held = state["words"]
    shown = [sorted(map(repr, held["set"])), held["text"].encode("utf-8", "surrogatepass"), str(held["path"]).encode()]
    sys.stdout.write(repr([*shown, held["float"], list(held["order"]), held["draw"].tolist(), __debug__]) + "\n")
    sys.stdout.flush()  # which os._exit below does not do
    total = torch.ones(1)
    dist.all_reduce(total)
    os._exit(0 if total.item() == world_size else 1)


if __name__ == "__main__":
    main()
