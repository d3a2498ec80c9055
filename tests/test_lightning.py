"""The Lightning callback on one process: when values are refreshed, who sees them, and what else the trainer does."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from expect import refuses
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.tuner.tuning import Tuner
from lightning_run import Model, Saver, drawing, evaluate, fit, make_trainer, quiet
from torch.utils.data import DataLoader, TensorDataset

from syncstate import Context, Every, SharedState, SyncEngine
from syncstate.errors import ConfigError, NotReady
from syncstate.hosts.trainer import import_lightning
from syncstate.lightning import SyncStateCallback, shared
from syncstate.values import Seed


class Watch(Callback):
    """Writes down step and value, at places given by their hooks' names."""

    def __init__(self, *hooks: str) -> None:
        self.seen: list[tuple[str, int, Any]] = []
        for hook in hooks:
            setattr(self, hook, self._look_at(hook))

    def _look_at(self, hook: str) -> Callable[..., None]:
        def look(trainer: Trainer, *_: Any) -> None:
            self.seen.append((hook, trainer.global_step, shared(trainer)["draw"][0]))

        return look


class Notebook(Logger):
    """A logger that keeps what it is told, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.status = ""

    @property
    def name(self) -> str:
        return "notebook"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, {key: value for key, value in metrics.items() if key != "epoch"}))

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    def finalize(self, status: str) -> None:
        self.status = status


# ---------------------------------------------------------------- steps


def test_a_value_for_every_n_steps_is_computed_once_per_n_optimizer_steps_under_accumulation() -> None:
    state, draws = drawing(draw=Every(steps=2))
    model = fit(make_trainer(SyncStateCallback(state), accumulate_grad_batches=3), Model(batches=7))
    assert [step for step, _, _ in model.read] == [0, 0, 0, 1, 1, 1, 2, 3, 3, 3, 4, 4, 4, 5]
    assert draws["draw"].points == [(0, 0), (2, 0), (4, 1), (6, 1)]
    assert [values["draw"][0] for step, _, values in model.read] == [step // 2 * 2 for step, _, _ in model.read]


def test_no_point_is_missed_when_two_optimizers_step_in_each_batch() -> None:
    state, draws = drawing(draw=Every(steps=3))
    model = fit(make_trainer(SyncStateCallback(state)), Model(batches=4, optimizers=2))
    assert [step for step, _, _ in model.read] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert [step for step, _ in draws["draw"].points] == [0, 4, 6, 10, 12, 16]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_value_of_an_epoch_is_in_force_when_the_loaders_iterator_is_made(workers: int) -> None:
    state, draws = drawing(order=Every(epochs=1))
    model = fit(make_trainer(SyncStateCallback(state), max_epochs=3), Model(workers=workers))
    assert draws["order"].points == [(0, 0), (4, 1), (8, 2)]
    assert [values["drawn with"][1] for _, _, values in model.read] == [0] * 4 + [1] * 4 + [2] * 4


def test_what_runs_after_an_optimizer_step_sees_the_value_of_this_step(tmp_path: Path) -> None:
    state, _ = drawing(draw=Every(steps=1))
    watch = Watch("on_train_batch_end", "on_validation_start")
    trainer = make_trainer(
        watch,  # listed before the callback whose values it reads
        SyncStateCallback(state), Saver(tmp_path, every_n_train_steps=1),
        max_epochs=1, limit_val_batches=1, val_check_interval=2, num_sanity_val_steps=0,
    )  # fmt: skip
    fit(trainer)
    assert watch.seen == [
        ("on_train_batch_end", 1, 1),
        ("on_train_batch_end", 2, 2),
        ("on_validation_start", 2, 2),
        ("on_train_batch_end", 3, 3),
        ("on_train_batch_end", 4, 4),
        ("on_validation_start", 4, 4),
    ]
    saved = {file.stem: torch.load(file, weights_only=True)["callbacks"] for file in tmp_path.iterdir()}
    assert {step: states["SyncStateCallback{'name': 'syncstate'}"]["seen"] for step, states in saved.items()} == {
        "1": [1, 0], "2": [2, 0], "3": [3, 0], "4": [4, 0],
    }  # fmt: skip


def test_the_callback_comes_first_also_among_those_of_the_model() -> None:
    class Adding(Model):
        def configure_callbacks(self) -> list[Callback]:
            return [Watch("on_train_batch_end")]

    state, _ = drawing()
    callback = SyncStateCallback(state)
    trainer: Any = make_trainer(LearningRateFinder(num_training_steps=1), callback, fast_dev_run=True)
    fit(trainer, Adding())
    assert trainer.callbacks[0] is callback


def test_sources_see_the_trainer_and_the_users_own_module() -> None:
    told: list[Any] = []
    state = SharedState()
    state.add("x", lambda ctx: told.extend([ctx.host, ctx.model]), every=Every(steps=4))
    callback = SyncStateCallback(state)
    trainer, model = make_trainer(callback, max_epochs=1), Model()
    fit(trainer, model)
    assert told == [trainer, model] * 2
    assert (callback.engine.host, callback.engine.model) == (None, None)


# ---------------------------------------------------------------- where values can be read


def test_values_can_be_read_from_on_fit_start_on() -> None:
    state, draws = drawing()

    class Early(Model):
        def on_fit_start(self) -> None:
            self.note("on_fit_start")

        def configure_optimizers(self) -> Any:
            with pytest.raises(NotReady):
                _ = shared(self)["draw"]
            return super().configure_optimizers()

    model = fit(make_trainer(SyncStateCallback(state), limit_val_batches=1, num_sanity_val_steps=1), Early())
    first = {"draw": [0, 0, 1, 947369041885, 0]}
    for place in ("on_fit_start", "sanity validation", "val_dataloader", "train_dataloader"):
        assert model.elsewhere[place] == first, place
    assert draws["draw"].points == [(0, 0), (2, 0), (4, 0), (6, 1), (8, 1)]


@pytest.mark.parametrize(("how", "where"), [("validate", "validation"), ("test", "test"), ("predict", "predict")])
def test_values_can_be_read_in_a_lone_evaluation(how: str, where: str) -> None:
    state, draws = drawing()
    trainer = make_trainer(SyncStateCallback(state), limit_val_batches=1.0)
    model = evaluate(trainer, how)
    assert model.elsewhere["val_dataloader"] == model.elsewhere[where] == {"draw": [0, 0, 1, 947369041885, 0]}
    assert draws["draw"].points == [(0, 0)]


def test_an_evaluation_after_a_fit_uses_the_values_of_the_fit() -> None:
    state, draws = drawing()
    callback = SyncStateCallback(state)
    fit(make_trainer(callback))
    # A trainer of its own, as is usual for tests: its step is 0.
    assert evaluate(make_trainer(callback), "test").elsewhere["test"]["draw"][0] == 8
    assert draws["draw"].points == [(0, 0), (2, 0), (4, 0), (6, 1), (8, 1)]


@pytest.mark.parametrize(
    ("options", "points"),
    [
        ({"fast_dev_run": True}, [(0, 0)]),
        ({"fast_dev_run": 3}, [(0, 0), (2, 0)]),
        ({"max_steps": 5, "max_epochs": -1}, [(0, 0), (2, 0), (4, 0)]),
        ({"limit_train_batches": 0}, [(0, 0)]),
        ({"max_epochs": 0}, [(0, 0)]),
    ],
)
def test_short_fits_work(options: dict[str, Any], points: list[tuple[int, int]]) -> None:
    state, draws = drawing()
    fit(make_trainer(SyncStateCallback(state), **options))
    assert draws["draw"].points == points


def test_a_second_fit_goes_on_where_the_first_ended() -> None:
    state, draws = drawing(draw=Every(steps=3), order=Every(epochs=1))
    trainer = make_trainer(SyncStateCallback(state), max_epochs=1)
    model = fit(trainer)
    trainer.fit_loop.max_epochs = 3
    fit(trainer, model)
    once, draws_of_once = drawing(draw=Every(steps=3), order=Every(epochs=1))
    assert model.read == fit(make_trainer(SyncStateCallback(once), max_epochs=3)).read
    assert draws["draw"].points == draws_of_once["draw"].points == [(0, 0), (3, 0), (6, 1), (9, 2), (12, 2)]


def test_a_new_trainer_begins_at_step_0_with_the_values_and_versions_there_are() -> None:
    state, draws = drawing(draw=Every(steps=3))
    callback = SyncStateCallback(state)
    fit(make_trainer(callback, max_epochs=1))
    fit(make_trainer(callback, max_epochs=1))
    assert draws["draw"].points == [(0, 0), (3, 0)] * 2
    assert state.info("draw").version == 4


# ---------------------------------------------------------------- finders


def searching(how: str, callback: SyncStateCallback, folder: Path) -> tuple[Trainer, Model]:
    """A trainer whose finder has run, or will in its fit."""
    options, model = {"default_root_dir": folder, "max_epochs": 2}, Model()
    finders = {"lr callback": LearningRateFinder(num_training_steps=6), "size callback": BatchSizeFinder(max_trials=1)}
    trainer = make_trainer(*[finder for name, finder in finders.items() if name == how], callback, **options)
    with quiet():
        if how == "lr tuner":
            Tuner(trainer).lr_find(model, num_training=6)
        elif how == "size tuner":
            Tuner(trainer).scale_batch_size(model, max_trials=1)
    return trainer, model


@pytest.mark.parametrize("how", ["lr tuner", "size tuner", "lr callback", "size callback"])
def test_a_finders_trial_reads_values_and_changes_none(how: str, tmp_path: Path) -> None:
    state, draws = drawing(draw=Every(steps=2), order=Every(epochs=1))
    trainer, model = searching(how, SyncStateCallback(state), tmp_path)
    fit(trainer, model)
    begin = max(index for index, (step, _, _) in enumerate(model.read) if step == 0)
    trial, training = model.read[:begin], model.read[begin:]
    assert len(trial) >= 3
    assert {(step, epoch) for step, epoch, _ in trial} >= {(0, 0), (1, 0), (2, 0)}
    assert [values["draw"] for _, _, values in trial] == [trial[0][2]["draw"]] * len(trial)

    plain, draws_of_plain = drawing(draw=Every(steps=2), order=Every(epochs=1))
    untried = Model()
    untried.batch_size = model.batch_size
    assert training == fit(make_trainer(SyncStateCallback(plain)), untried).read
    assert {name: draw.points for name, draw in draws.items()} == {n: d.points for n, d in draws_of_plain.items()}


def test_a_fit_after_a_trial_that_failed_works(tmp_path: Path) -> None:
    def fail(model: Model) -> None:
        raise ValueError("mine")

    state, draws = drawing()
    callback = SyncStateCallback(state)
    with pytest.raises(ValueError, match="mine"), quiet():
        Tuner(make_trainer(callback, default_root_dir=tmp_path)).lr_find(Model(act=fail))
    fit(make_trainer(callback))
    assert draws["draw"].points == [(0, 0), (2, 0), (4, 0), (6, 1), (8, 1)]


# ---------------------------------------------------------------- logging


def logged(source: Callable[[Context], Any], **options: Any) -> list[tuple[int | None, dict[str, float]]]:
    state, notebook = SharedState(), Notebook()
    state.add("x", source, every=Every(steps=2))
    fit(make_trainer(SyncStateCallback(state, **options), logger=notebook, max_epochs=1))
    return notebook.rows


def test_a_new_value_is_logged_once_over_the_axis_of_lightnings_monitors() -> None:
    rows = [(0, {"syncstate/x": 0.0}), (1, {"syncstate/x": 2.0}), (3, {"syncstate/x": 4.0})]
    assert logged(lambda ctx: ctx.step) == rows


def test_values_are_logged_under_the_name_of_the_callback_and_not_at_all_on_request() -> None:
    assert logged(lambda ctx: ctx.step, name="mine")[0] == (0, {"mine/x": 0.0})
    assert logged(lambda ctx: ctx.step, log=False) == []


@pytest.mark.parametrize("value", [True, 1, 1.0, np.float32(1), torch.tensor(1), torch.tensor(1.0), np.array(1)])
def test_numbers_of_all_kinds_are_logged(value: Any) -> None:
    assert logged(lambda ctx: value)[0] == (0, {"syncstate/x": 1.0})


@pytest.mark.parametrize(
    "value", [float("nan"), float("-inf"), 10**400, 1j, "1", None, [1.0], {"a": 1}, torch.ones(1), torch.tensor(1j)]
)
def test_what_is_no_finite_number_is_not_logged(value: Any) -> None:
    assert logged(lambda ctx: value) == []


def test_a_resumed_run_logs_at_the_steps_of_the_unbroken_one(tmp_path: Path) -> None:
    def rows(*callbacks: Callback, ckpt_path: Path | None = None) -> list[Any]:
        state, notebook = SharedState(), Notebook()
        state.add("x", lambda ctx: ctx.step, every=Every(epochs=1))
        fit(make_trainer(SyncStateCallback(state), *callbacks, logger=notebook, max_epochs=3), ckpt_path=ckpt_path)
        return notebook.rows

    assert rows(Saver(tmp_path)) == [(0, {"syncstate/x": 0}), (4, {"syncstate/x": 4}), (8, {"syncstate/x": 8})]
    assert rows(ckpt_path=tmp_path / "4.ckpt") == [(4, {"syncstate/x": 4}), (8, {"syncstate/x": 8})]


# ---------------------------------------------------------------- names


def test_two_callbacks_with_names_of_their_own_work_side_by_side(tmp_path: Path) -> None:
    states = {"one": drawing(draw=Every(steps=1))[0], "two": drawing(draw=Every(steps=2))[0]}
    callbacks = [SyncStateCallback(state, name=name) for name, state in states.items()]
    trainer = make_trainer(*callbacks, Saver(tmp_path), max_epochs=1)

    class Both(Model):
        def values(self) -> dict[str, Any]:
            return {name: shared(self, name)["draw"][0] for name in states}

    model = fit(trainer, Both())
    assert [(values["one"], values["two"]) for _, _, values in model.read] == [(0, 0), (1, 0), (2, 2), (3, 2)]
    saved = torch.load(tmp_path / "4.ckpt", weights_only=True)["callbacks"]
    assert {"SyncStateCallback{'name': 'one'}", "SyncStateCallback{'name': 'two'}"} <= set(saved)
    with refuses("shared: the trainer has several SyncStateCallbacks; give name=, one of 'one', 'two'"):
        shared(trainer)


def test_two_callbacks_of_one_name_are_refused() -> None:
    callbacks = [SyncStateCallback(drawing()[0]) for _ in range(2)]
    with refuses(
        "the trainer has 2 callbacks with the key SyncStateCallback{'name': 'syncstate'}, and a checkpoint holds one "
        "of them; give each a name of its own: SyncStateCallback(state, name=...)"
    ):
        fit(make_trainer(*callbacks))


def test_shared_finds_the_state_from_all_that_knows_the_trainer() -> None:
    state, _ = drawing()
    found: list[SharedState] = []

    class Data(LightningDataModule):
        def train_dataloader(self) -> Any:
            found.append(shared(self))
            return DataLoader(TensorDataset(torch.ones(1, 1)))

    trainer = make_trainer(SyncStateCallback(state), max_epochs=1)
    with quiet():
        trainer.fit(Model(act=lambda model: found.extend([shared(model), shared(model.trainer)])), datamodule=Data())
    assert [one is state for one in found] == [True] * 3


def test_shared_names_the_line_that_is_missing() -> None:
    missing = "shared: the trainer has no such callback; make it with Trainer(callbacks=[SyncStateCallback(state)])"
    with refuses(missing):
        shared(make_trainer())
    with refuses(missing):
        fit(make_trainer())
    with refuses("this Model has no trainer; call shared() inside trainer.fit, validate, test or predict"):
        shared(Model())
    with refuses(
        "shared: the trainer has no such callback (it has 'syncstate'); make it with "
        "Trainer(callbacks=[SyncStateCallback(state, name='other')])"
    ):
        shared(make_trainer(SyncStateCallback(drawing()[0])), "other")


# ---------------------------------------------------------------- settings


def test_the_keywords_are_those_of_the_engine() -> None:
    engine, callback = (inspect.signature(kind).parameters for kind in (SyncEngine, SyncStateCallback))
    mine = {"state", "name", "log"}
    assert [p for name, p in callback.items() if name not in mine] == [p for n, p in engine.items() if n != "state"]
    assert {name: callback[name].default for name in ("name", "log")} == {"name": "syncstate", "log": True}


def test_impossible_settings_are_refused_at_once() -> None:
    with refuses("SyncStateCallback: state must be a SharedState, got None"):
        SyncStateCallback(None)  # type: ignore[arg-type]
    with refuses("SyncStateCallback: name must be a non-empty string, got ''"):
        SyncStateCallback(SharedState(), name="")
    with refuses("engine: on_error must be 'raise' or 'keep', got 'stop'"):
        SyncStateCallback(SharedState(), on_error="stop")


def test_the_callback_is_built_from_a_config() -> None:
    node = {
        "schedule": {"steps": 3},
        "values": {"seed": {"source": {"_target_": "syncstate.values.Seed", "base": 5}}},
        "seed": 7,
    }
    callback = SyncStateCallback.from_config(node, name="mine", log=False)
    plain = SharedState()
    plain.add("seed", Seed(base=5), every=Every(steps=3))
    twin = SyncStateCallback(plain, seed=7)
    assert (callback.name, callback.state.names) == ("mine", ("seed",))
    assert fit(make_trainer(callback)).read == fit(make_trainer(twin)).read


def test_loading_into_a_running_trainer_is_refused() -> None:
    callback = SyncStateCallback(drawing()[0])
    saved = callback.state_dict()
    with pytest.raises(ConfigError, match="the engine has started"):
        fit(make_trainer(callback), Model(act=lambda model: callback.load_state_dict(saved)))


def test_ctrl_c_ends_the_fit_as_lightning_does_and_the_next_one_works() -> None:
    def interrupt(model: Model) -> None:
        if model.trainer.global_step == 3:
            raise KeyboardInterrupt

    state, draws = drawing()
    callback = SyncStateCallback(state)
    with pytest.raises(SystemExit):
        fit(make_trainer(callback), Model(act=interrupt))
    assert draws["draw"].points == [(0, 0), (2, 0)]
    fit(make_trainer(callback, max_epochs=1))
    assert draws["draw"].points == [(0, 0), (2, 0), (0, 0), (2, 0), (4, 0)]


# ---------------------------------------------------------------- which Lightning


def test_the_lightning_that_the_program_uses_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert import_lightning() is sys.modules["lightning.pytorch"]
    other = ModuleType("pytorch_lightning")
    monkeypatch.setitem(sys.modules, "pytorch_lightning", other)
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    assert import_lightning() is other


def test_without_lightning_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'syncstate\[lightning\]'"):
        import_lightning()
