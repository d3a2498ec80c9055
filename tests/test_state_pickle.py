"""A state survives the way to a spawned rank, also one made with the decorator."""

import json
import pickle
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from syncstate import Context, Every, Once, SharedState, SyncEngine


def one(ctx: Context) -> float:
    """One."""
    return 1.0


class Doubles:
    """A source that is an object."""

    def compute(self, ctx: Context) -> int:
        return 2 * ctx.step

    def apply(self, value: int, ctx: Context) -> None:
        pass


SPAWNED = SharedState()


@SPAWNED.shared(every=Every(steps=2), initial=-1)
def decorated(ctx: Context) -> int:
    return 10 * ctx.step + ctx.world_size


@SPAWNED.shared("renamed", every=Once())
def under_another_name(ctx: Context) -> str:
    return "once"


SPAWNED.add("object", Doubles(), every=Every(steps=1))
SPAWNED.add("plain", one)


def train(rank: int, state: SharedState, folder: Path) -> None:
    """A rank of a spawning launcher: runs the state that was sent to it."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        assert state is not SPAWNED
        with SyncEngine(state) as engine:
            for step in range(4):
                engine.step(step)
        (folder / f"values.{rank}").write_text(json.dumps(dict(state)))
    finally:
        dist.destroy_process_group()


def test_a_state_with_decorated_functions_runs_in_spawned_ranks(tmp_path: Path) -> None:
    mp.spawn(train, args=(SPAWNED, tmp_path), nprocs=2)
    values = [json.loads((tmp_path / f"values.{rank}").read_text()) for rank in range(2)]
    assert values == [{"decorated": 22, "renamed": "once", "object": 6, "plain": 1.0}] * 2
    # What ran elsewhere left this one alone.
    assert dict(SPAWNED) == {"decorated": -1}


def test_a_pickled_state_keeps_what_was_declared() -> None:
    copy = pickle.loads(pickle.dumps(SPAWNED))
    assert copy.names == SPAWNED.names
    assert dict(copy) == {"decorated": -1}
    for name in copy.names:
        mine, theirs = SPAWNED.definition(name), copy.definition(name)
        assert (mine.every, mine.initial, mine.checkpoint) == (theirs.every, theirs.initial, theirs.checkpoint)
    # The function itself, not its handle in a state that no engine runs.
    assert copy.definition("decorated").source is decorated.source
    assert copy.definition("renamed").compute(Context()) == "once"
    assert copy.definition("object").apply.__self__ is copy.definition("object").source


def test_a_function_that_nobody_can_find_again_is_refused_by_pickle() -> None:
    state = SharedState()

    @state.shared()
    def local(ctx: Context) -> int:
        return 1

    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(state)
