"""The Lightning callback on two ranks of DDP: the values are the same on both, and nothing is left behind."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning_run import Model, Saver, drawing, evaluate, fit, make_ddp_trainer, make_trainer
from ranks import returned, run_ranks
from torch.utils.data import DataLoader, TensorDataset

from syncstate import Context, Every, SharedState
from syncstate.lightning import SyncStateCallback, shared
from syncstate.samplers import SharedIndexSampler
from syncstate.values import SampledIndices


class Told(DummyLogger):
    """A logger that writes down what it is told, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append({name: value for name, value in metrics.items() if name.startswith("syncstate")})


def groups() -> list[str]:
    """The process groups that torch knows of in this process."""
    return [dist.get_process_group_ranks(group).__repr__() for group in dist.distributed_c10d._world.pg_map]


def train_and_resume(rank: int, folder: str) -> dict[str, Any]:
    threads = threading.active_count()

    def read_often_on_rank_0(model: Model) -> None:
        if rank == 0:
            for _ in range(100):
                dict(shared(model))
                shared(model).info("draw")

    state, draws = drawing(draw=Every(steps=2), order=Every(epochs=1))
    state.add("step", lambda ctx: ctx.step, every=Every(steps=4))
    callback, told = SyncStateCallback(state), Told()
    trainer = make_ddp_trainer(callback, Saver(Path(folder), every_n_train_steps=3), logger=told)
    model = fit(trainer, Model(act=read_often_on_rank_0))
    result: dict[str, Any] = {
        "read": model.read,
        "computed": {name: draw.points for name, draw in draws.items()},
        "told": [row for row in told.rows if row],
        "syncs": (callback.engine.stats.syncs, callback.engine.stats.collectives),
        "groups": groups(),
    }
    again, draws = drawing(draw=Every(steps=2), order=Every(epochs=1))
    again.add("step", lambda ctx: ctx.step, every=Every(steps=4))
    callback = SyncStateCallback(again)
    result["resumed"] = fit(make_ddp_trainer(callback), ckpt_path=Path(folder, "3.ckpt")).read
    result["tested"] = evaluate(make_ddp_trainer(callback), "test").elsewhere["test"]
    return result | {"threads": threading.active_count() - threads, "groups": [result["groups"], groups()]}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks saw of one training, its continuation and a test."""
    return returned(run_ranks(train_and_resume, 2, str(tmp_path_factory.mktemp("ranks")), init=False))


def test_every_batch_reads_the_same_on_both_ranks(both: list[dict[str, Any]]) -> None:
    assert both[0]["read"] == both[1]["read"]
    assert [(step, values["draw"][0], values["step"]) for step, _, values in both[0]["read"]] == [
        (0, 0, 0), (1, 0, 0), (2, 2, 0), (3, 2, 0), (4, 4, 4), (5, 4, 4), (6, 6, 4), (7, 6, 4),
    ]  # fmt: skip


def test_only_main_computes(both: list[dict[str, Any]]) -> None:
    assert both[0]["computed"] == {"draw": [(0, 0), (2, 0), (4, 0), (6, 1), (8, 1)], "order": [(0, 0), (4, 1)]}
    assert both[1]["computed"] == {"draw": [], "order": []}


def test_reading_on_one_rank_communicates_nothing(both: list[dict[str, Any]]) -> None:
    # One for the steps 0, 2, 4, 6, 8 and one for the turn of the epoch; a collective each.
    assert [rank["syncs"][0] for rank in both] == [6, 6]
    assert both[0]["syncs"] == both[1]["syncs"]


def test_only_rank_0_logs(both: list[dict[str, Any]]) -> None:
    assert both[0]["told"] == [{"syncstate/step": 0.0}, {"syncstate/step": 4.0}, {"syncstate/step": 8.0}]
    assert both[1]["told"] == []


def test_both_ranks_resume_from_the_checkpoint_of_rank_0(both: list[dict[str, Any]]) -> None:
    assert both[0]["resumed"] == both[1]["resumed"] == both[0]["read"][3:]


def test_an_evaluation_has_the_values_of_the_fit_on_both_ranks(both: list[dict[str, Any]]) -> None:
    assert both[0]["tested"] == both[1]["tested"]
    assert both[0]["tested"]["step"] == 8


def test_no_process_group_and_no_thread_is_left_behind(both: list[dict[str, Any]]) -> None:
    # Lightning keeps the default group, and nothing else is there.
    assert [rank["groups"] for rank in both] == [[["[0, 1]"], ["[0, 1]"]]] * 2
    assert [rank["threads"] for rank in both] == [0, 0]


def sampled(rank: int) -> list[list[int]]:
    """The samples of each epoch on this rank."""
    state = SharedState()
    state.add("order", SampledIndices(10, 8), every=Every(epochs=1))
    seen: list[list[int]] = []

    class Sampling(Model):
        def train_dataloader(self) -> Any:
            data = TensorDataset(torch.arange(10.0).reshape(10, 1))
            return DataLoader(data, batch_size=2, sampler=SharedIndexSampler(shared(self), "order"))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 0:
                seen.append([])
            seen[-1] += [int(index) for index in batch[0]]
            return super().training_step(batch, batch_idx)

    fit(make_ddp_trainer(SyncStateCallback(state), max_epochs=3), Sampling())
    return seen


def test_lightning_leaves_a_shared_order_alone() -> None:
    ranks = returned(run_ranks(sampled, 2, init=False))
    for epoch in range(3):
        shards = [set(rank[epoch]) for rank in ranks]
        assert [len(shard) for shard in shards] == [4, 4]
        assert not shards[0] & shards[1]
    assert ranks[0][0] != ranks[0][1] != ranks[0][2]


def main_of(rank: int, main: int) -> list[int]:
    state = SharedState()
    computed: list[int] = []

    def source(ctx: Context) -> int:
        computed.append(ctx.step)
        return ctx.rank

    state.add("x", source, every=Every(steps=2))
    model = fit(make_ddp_trainer(SyncStateCallback(state, main=main), max_epochs=1))
    assert {values["x"] for _, _, values in model.read} == {main}
    return computed


def test_another_rank_than_0_can_be_main() -> None:
    assert returned(run_ranks(main_of, 2, 1, init=False)) == [[], [0, 2, 4]]


class Report(Callback):
    """Writes what a spawned rank read into a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        (self.folder / str(trainer.global_rank)).write_bytes(pickle.dumps(pl_module.read))


@pytest.mark.usefixtures("both")  # which has started the server of processes that is used here too
def test_ranks_that_lightning_starts_itself_get_the_values_by_pickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "")  # Lightning sets it, and leaves it
    monkeypatch.delenv("MASTER_PORT")
    # As strategy="ddp_spawn", but processes that have Lightning loaded already are forked.
    strategy = DDPStrategy(process_group_backend="gloo", start_method="forkserver")
    state, _ = drawing()
    fit(make_trainer(SyncStateCallback(state), Report(tmp_path), devices=2, strategy=strategy, max_epochs=1))
    read = [pickle.loads((tmp_path / str(rank)).read_bytes()) for rank in (0, 1)]
    assert read[0] == read[1]
    assert [(step, values["draw"][0]) for step, _, values in read[0]] == [(0, 0), (1, 0), (2, 2), (3, 2)]
