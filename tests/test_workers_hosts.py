"""Stamped batches under Lightning, Accelerate and the Trainer of Transformers, on two ranks and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from expect import refuses
from lightning.pytorch import Trainer
from lightning_run import Model, Saver, fit, make_ddp_trainer, make_trainer, quiet
from ranks import Outcome, returned, run_ranks
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler

from syncstate import Every, SharedState, SyncEngine
from syncstate.lightning import SyncStateCallback
from syncstate.samplers import SharedBatchSampler, SharedDataset, SharedIndexSampler
from syncstate.samplers.lengths import check_kept_length
from syncstate.values import SampledIndices


class Numbers(Dataset[float]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __getitem__(self, index: int) -> float:
        return float(index)

    def __len__(self) -> int:
        return self.size


def collate(samples: Any) -> tuple[torch.Tensor, int]:
    """A column of the indices, and the value on the batch."""
    return torch.tensor(list(samples)).reshape(-1, 1), samples.shared["step"]


def shared_values(size: int) -> SharedState:
    state = SharedState()
    state.add("step", lambda ctx: ctx.step, every=Every(steps=1))
    state.add("order", SampledIndices(size), every=Every(epochs=1))
    return state


def seen_in(batch: Any) -> tuple[list[int], int]:
    indices, value = batch
    return [int(index) for index in indices.flatten()], int(value)


def workers(count: int) -> dict[str, Any]:
    return {"num_workers": count, "multiprocessing_context": "fork", "persistent_workers": True} if count else {}


# Lightning


class Stamped(Model):
    """Trains on stamped batches.

    Attributes:
        seen: (epoch, indices, value) of each batch.
    """

    def __init__(self, state: SharedState, kind: str = "shared", count: int = 0, *, inside: bool = True) -> None:
        super().__init__()
        self.state, self.kind, self.count = state, kind, count
        self.seen: list[tuple[int, list[int], int]] = []
        self.loader = None if inside else self.make()

    def make(self) -> DataLoader[Any]:
        shared = self.kind == "shared"
        sampler: Any = SharedIndexSampler(self.state, "order") if shared else SequentialSampler(range(40))
        self.stamped = SharedBatchSampler(BatchSampler(sampler, 4, False), self.state, ["step"])
        return DataLoader(
            SharedDataset(Numbers(40)), batch_sampler=self.stamped, collate_fn=collate, **workers(self.count)
        )

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader or self.make()

    predict_dataloader = train_dataloader

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append((self.current_epoch, *seen_in(batch)))
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append((0, *seen_in(batch)))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["batches"] = self.stamped.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.loader is None:
            self.loader = self.make()  # the batch sampler must be there before its state
        self.stamped.load_state_dict(checkpoint["batches"])


def train_stamped(
    rank: int, folder: str, use_distributed_sampler: bool, count: int, inside: bool
) -> tuple[list[Any], dict[int, list[Any]]]:
    """What a rank sees in two epochs, and what it sees when it resumes at a step."""
    options = {"use_distributed_sampler": use_distributed_sampler, "max_epochs": 2}
    state = shared_values(40)
    model = Stamped(state, count=count, inside=inside)
    fit(make_ddp_trainer(SyncStateCallback(state), Saver(Path(folder), every_n_train_steps=1), **options), model)
    resumed = {}
    for step in (2, 5, 7):
        state = shared_values(40)
        again = Stamped(state, count=count, inside=inside)
        fit(make_ddp_trainer(SyncStateCallback(state), **options), again, Path(folder, f"{step}.ckpt"))
        resumed[step] = again.seen
    return model.seen, resumed


@pytest.mark.parametrize(
    ("use_distributed_sampler", "count", "inside"), [(True, 0, True), (True, 2, False), (False, 2, True)]
)
def test_lightning_leaves_stamped_batches_alone_and_resumes_them(
    use_distributed_sampler: bool, count: int, inside: bool, tmp_path: Path
) -> None:
    args = (str(tmp_path), use_distributed_sampler, count, inside)
    ranks = returned(run_ranks(train_stamped, 2, *args, init=False))
    # Five batches an epoch; with two workers, four are drawn when the loader is iterated.
    expected = [0, 0, 0, 0, 0, 5, 5, 5, 5, 5] if count else list(range(10))
    for seen, resumed in ranks:
        assert [value for _, _, value in seen] == expected
        assert resumed == {step: seen[step:] for step in (2, 5, 7)}
    for epoch in range(2):
        dealt = [index for seen, _ in ranks for number, batch, _ in seen if number == epoch for index in batch]
        assert sorted(dealt) == list(range(40))


def train_unsharded(rank: int, use_distributed_sampler: bool) -> list[Any]:
    state = shared_values(40)
    model = Stamped(state, "sequential")
    options = {"use_distributed_sampler": use_distributed_sampler, "max_epochs": 1}
    fit(make_ddp_trainer(SyncStateCallback(state), **options), model)
    return [batch for _, batch, _ in model.seen]


def test_lightning_is_told_where_nobody_shards() -> None:
    outcomes: list[Outcome] = run_ranks(train_unsharded, 2, True, init=False)
    assert {(outcome.error, outcome.message) for outcome in outcomes} == {
        (
            "ConfigError",
            "SharedBatchSampler: 2 ranks would each train on all batches of this BatchSampler: make it with a "
            "SharedIndexSampler or a DistributedSampler. If it deals each rank a part of its own in another way, use "
            "Trainer(use_distributed_sampler=False)",
        )
    }
    one, two = returned(run_ranks(train_unsharded, 2, False, init=False))
    assert one == two == [list(range(k, k + 4)) for k in range(0, 40, 4)]


@pytest.mark.parametrize("inside", [False, True])
def test_lightning_predicts_with_stamped_batches(inside: bool) -> None:
    state = shared_values(40)
    model = Stamped(state, "sequential", inside=inside)
    with quiet():
        make_trainer(SyncStateCallback(state)).predict(model, return_predictions=False)
    assert model.seen == [(0, list(range(k, k + 4)), 0) for k in range(0, 40, 4)]


def changing(lengths: list[int], **options: Any) -> tuple[SharedState, SharedIndexSampler]:
    state = SharedState()
    state.add("order", lambda ctx: list(range(lengths[ctx.epoch])), every=Every(epochs=1))
    return state, SharedIndexSampler(state, "order", **options)


class Changing(Model):
    """Checks its loader when an epoch begins, as the callback of a host would."""

    def __init__(self, sampler: SharedIndexSampler, size: int) -> None:
        super().__init__()
        self.sampler, self.size = sampler, size
        self.seen: list[int] = []

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Numbers(self.size), batch_size=2, sampler=self.sampler)

    def on_train_epoch_start(self) -> None:
        trainer: Trainer = self.trainer
        self.seen.append(0)
        check_kept_length(trainer.train_dataloader, trainer.num_training_batches, trainer.limit_train_batches)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen[-1] += 1
        return super().training_step([batch.float().reshape(-1, 1)], batch_idx)


@pytest.mark.parametrize("now", [12, 4])
def test_a_trainer_that_counts_on_another_length_is_told_both(now: int) -> None:
    state, sampler = changing([8, now, 8])
    with refuses(
        f"SharedIndexSampler: value 'order' (version 2 of step 4) makes {now // 2} batches a rank in this epoch, but "
        "the trainer counts on the 4 that it found when it began; give the sampler num_samples=..., the indices a rank "
        "in every epoch"
    ):
        fit(make_trainer(SyncStateCallback(state), max_epochs=3), Changing(sampler, 12))


@pytest.mark.parametrize(
    ("lengths", "options", "limit", "seen"),
    [
        ([8, 12, 4], {"num_samples": 8}, 1.0, [4, 4, 4]),
        ([8, 12, 6], {}, 3, [3, 3, 3]),
        ([8, 8, 8], {}, 0.5, [2, 2, 2]),
    ],
)
def test_a_length_that_stays_is_no_error(
    lengths: list[int], options: dict[str, Any], limit: float, seen: list[int]
) -> None:
    state, sampler = changing(lengths, **options)
    model = Changing(sampler, 12)
    fit(make_trainer(SyncStateCallback(state), max_epochs=3, limit_train_batches=limit), model)
    assert model.seen == seen


# Accelerate


def accelerated(
    rank: int, size: int, count: int, split: bool, stop_at: int, saved: Any = None
) -> tuple[list[Any], dict[str, Any]]:
    """What a rank sees in an epoch, or in the rest of it; and what it would save after so many steps."""
    from accelerate import Accelerator, skip_first_batches
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=split))
    state = shared_values(size)
    batches = SharedBatchSampler(BatchSampler(SharedIndexSampler.unsharded(state, "order"), 4, False), state, ["step"])
    loader: DataLoader[Any] = accelerator.prepare(
        DataLoader(SharedDataset(Numbers(size)), batch_sampler=batches, collate_fn=collate, **workers(count))
    )
    seen, content, step = [], {}, 0
    with SyncEngine(state) as engine:
        if saved is not None:
            engine.load_state_dict(saved["engine"])
            step = saved["step"]
            engine.start(step)
            batches.load_state_dict(saved["batches"])
            loader = skip_first_batches(loader, step)
        engine.start(step)
        for batch in loader:
            seen.append(seen_in(batch))
            step += 1
            engine.step(step)
            if step == stop_at:
                content = {"engine": engine.state_dict(), "batches": batches.state_dict(), "step": step}
    return seen, content


@pytest.mark.parametrize(
    ("size", "count", "split", "values"),
    [
        # One batch is fetched in advance.
        (40, 0, False, [0, 0, 1, 2, 3]),
        (40, 1, False, [0, 0, 0, 0, 1]),
        # The last round is filled with indices of the first.
        (37, 0, False, [0, 0, 1, 2, 3]),
        (33, 0, False, [0, 0, 1, 2, 3]),
        (18, 0, True, [0, 0, 1, 2, 3]),
    ],
)
def test_accelerate_gives_all_ranks_of_a_round_the_same_values(
    size: int, count: int, split: bool, values: list[int]
) -> None:
    args = (size, count, split, 2)
    ranks = returned(run_ranks(accelerated, 2, *args))
    for seen, _ in ranks:
        assert [value for _, value in seen] == values
    dealt = [index for seen, _ in ranks for batch, _ in seen for index in batch]
    assert {*dealt} == {*range(size)}
    assert len(dealt) - size == -size % (4 if split else 8)
    resumed = returned(run_ranks(accelerated, 2, *args, ranks[0][1]))
    assert [seen for seen, _ in resumed] == [seen[2:] for seen, _ in ranks]


def sharded_twice(rank: int) -> Any:
    from accelerate import Accelerator

    state = SharedState()
    state.add("order", SampledIndices(16), initial=list(range(16)))
    batches = SharedBatchSampler(BatchSampler(SharedIndexSampler(state, "order"), 4, False), state, ["order"])
    return list(Accelerator(cpu=True).prepare(DataLoader(SharedDataset(Numbers(16)), batch_sampler=batches)))


def test_accelerate_does_not_shard_what_is_sharded_already() -> None:
    for outcome in run_ranks(sharded_twice, 2):
        assert (outcome.error, outcome.message) == (
            "ConfigError",
            "SharedIndexSampler: Accelerate deals the batches out to 2 ranks, and this sampler deals its list out to 2 "
            "already; use SharedIndexSampler.unsharded, or do not prepare the loader",
        )


def shuffled(rank: int) -> list[Any]:
    """Accelerate exchanges a random sampler for one that shuffles alike on all ranks."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(rank)
    state = shared_values(16)
    batches = SharedBatchSampler(BatchSampler(RandomSampler(range(16)), 4, False), state, ["step"])
    loader = accelerator.prepare(DataLoader(SharedDataset(Numbers(16)), batch_sampler=batches, collate_fn=collate))
    with SyncEngine(state) as engine:
        engine.start()
        return [index for batch in loader for index in seen_in(batch)[0]]


def test_accelerate_may_exchange_the_sampler_below() -> None:
    one, two = returned(run_ranks(shuffled, 2))
    assert (len(one), sorted(one + two)) == (8, list(range(16)))


# Transformers


class Rows(Dataset[dict[str, Any]]):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.tensor([float(index)])}

    def __len__(self) -> int:
        return 40


class Noting(torch.nn.Module):
    """A model as the Trainer wants it, which writes down what it trains on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Linear(1, 1)
        self.seen: list[tuple[list[int], int]] = []

    def forward(self, x: torch.Tensor, step: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append(seen_in((x, step)))
        return {"loss": self.weight(x / 40).square().mean()}


def collate_rows(samples: Any) -> dict[str, torch.Tensor]:
    return {"x": torch.stack([row["x"] for row in samples]), "step": torch.tensor(samples.shared["step"])}


def hugging_face(rank: int, folder: str, count: int, resume: int | None) -> list[Any]:
    from transformers import Trainer as HuggingFaceTrainer
    from transformers import TrainerCallback, TrainingArguments

    state = shared_values(40)
    batches = SharedBatchSampler(BatchSampler(SharedIndexSampler.unsharded(state, "order"), 4, False), state, ["step"])
    engine, step, rows = SyncEngine(state), 0, SharedDataset(Rows())

    class Stepping(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            engine.step(state.global_step)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if rank == 0:
                content = {"engine": engine.state_dict(), "batches": batches.state_dict()}
                torch.save(content, Path(folder, f"checkpoint-{state.global_step}", "shared.pt"))

    class Loading(HuggingFaceTrainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(
                DataLoader(rows, batch_sampler=batches, collate_fn=self.data_collator, **workers(count))
            )

    checkpoint = None if resume is None else str(Path(folder, f"checkpoint-{resume}"))
    if checkpoint is not None:
        content = torch.load(Path(checkpoint, "shared.pt"), weights_only=True)
        engine.load_state_dict(content["engine"])
        batches.load_state_dict(content["batches"])
        step = resume or 0
    args = TrainingArguments(
        folder, num_train_epochs=1, save_steps=2, report_to=[], disable_tqdm=True, use_cpu=True,
        remove_unused_columns=False, logging_strategy="no",
    )  # fmt: skip
    model = Noting()
    trainer = Loading(model=model, args=args, train_dataset=rows, data_collator=collate_rows, callbacks=[Stepping()])
    with engine:
        engine.start(step)
        trainer.train(resume_from_checkpoint=checkpoint)
    return model.seen


@pytest.mark.parametrize("count", [0, 1])
def test_the_trainer_of_transformers_skips_batches_itself_and_finds_the_stamps(count: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    ranks = returned(run_ranks(hugging_face, 2, str(tmp_path), count, None, init=False))
    # Five batches a rank; its loader is Accelerate's.
    assert [[value for _, value in seen] for seen in ranks] == [[0, 0, 0, 0, 1] if count else [0, 0, 1, 2, 3]] * 2
    assert sorted(index for seen in ranks for batch, _ in seen for index in batch) == list(range(40))
    resumed = returned(run_ranks(hugging_face, 2, str(tmp_path), count, 2, init=False))
    assert resumed == [seen[2:] for seen in ranks]
