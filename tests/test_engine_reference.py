"""Which steps sync, against a reference that looks at every step and epoch one by one."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from syncstate import At, Context, Every, Once, SharedState, SyncEngine
from syncstate.context import generator
from syncstate.errors import ComputeError
from syncstate.schedule import Schedule

SEED = 11
FAR = 300  # no step of a trail lies beyond: 18 calls of at most 12 steps


@dataclass
class Expected:
    """What a value should be."""

    schedule: Schedule
    checkpoint: bool
    version: int = 0
    computed_at: int | None = None
    value: Any = None
    ready: bool = False

    @property
    def points(self) -> set[int]:
        """Every point of the schedule, found by counting."""
        schedule = self.schedule
        if isinstance(schedule, Once):
            return set()
        if isinstance(schedule, At):
            return set(schedule.steps)
        period = schedule.steps or schedule.epochs
        assert period is not None
        end = FAR if schedule.stop is None else schedule.stop
        return {t for t in range(schedule.start, end) if (t - schedule.start) % period == 0}

    def hit(self, last: tuple[int, int], now: tuple[int, int]) -> bool:
        clock = int(isinstance(self.schedule, Every) and self.schedule.epochs is not None)
        return any(last[clock] < point <= now[clock] for point in self.points)


@dataclass
class Reference:
    """What the engine should do; nothing here knows how it does it."""

    values: dict[str, Expected]
    seen: tuple[int, int] = (-1, -1)
    started: bool = False
    closed: bool = False

    def due_at_start(self, step: int, epoch: int) -> list[str]:
        back = step < self.seen[0] or epoch < self.seen[1]
        due = []
        for name, value in sorted(self.values.items()):
            if value.version == 0:
                hit = isinstance(value.schedule, Once) or value.hit((-1, -1), (step, epoch))
            elif back:
                hit = value.hit((step - 1, epoch - 1), (step, epoch))
            else:
                hit = value.hit(self.seen, (step, epoch))
            if hit:
                due.append(name)
        return due

    def call(self, what: str, step: int, epoch: int, names: list[str], failing: str | None) -> list[str] | None:
        """The names that come into force, or None where the call must raise."""
        if what == "sync":
            step, epoch = self.seen
            due = sorted(set(names) or self.values)
        elif what == "start" or not self.started:
            due = self.due_at_start(step, epoch)
            if not self.started:
                # What is computed at every start counts as never computed.
                again = [n for n, v in self.values.items() if isinstance(v.schedule, Once) and not v.checkpoint]
                due = sorted({*due, *again})
        else:
            due = [name for name, value in sorted(self.values.items()) if value.hit(self.seen, (step, epoch))]
        if failing in due:
            if what == "step" and self.started:
                self.seen = step, epoch
            return None
        for name in due:
            value = self.values[name]
            previous, value.version = value.value, value.version + 1
            value.computed_at, value.ready = step, True
            value.value = [
                step,
                epoch,
                value.version,
                draw(generator(SEED, name, value.version)),
                previous and previous[0],
            ]
        self.seen, self.started = (step, epoch), True
        return due

    def resumed(self) -> None:
        for value in self.values.values():
            if not value.checkpoint:
                value.version, value.value, value.ready, value.computed_at = 0, None, False, None


def draw(rng: np.random.Generator) -> int:
    return int(rng.integers(1 << 62))


every = st.builds(
    lambda unit, n, start, length: Every(
        **{unit: n}, start=start, stop=None if length is None else start + length
    ),  # a mapping of one unit
    st.sampled_from(["steps", "epochs"]),
    st.integers(1, 9),
    st.integers(0, 12),
    st.none() | st.integers(1, 30),
)
schedules: st.SearchStrategy[Schedule] = (
    every | st.builds(At, st.lists(st.integers(0, 40), min_size=1, max_size=4)) | st.just(Once())
)
calls = st.tuples(
    st.sampled_from(["step"] * 8 + ["start"] * 3 + ["sync", "close", "resume", "save", "reload"]),
    st.integers(-6, 12),  # how far the step moves; back only in a start
    st.sampled_from([None, 0, 0, 0, 1, 2, -1, -1]),  # how far the epoch moves; None is not given
    st.lists(st.sampled_from("abc"), max_size=2),  # what sync asks for
    st.sampled_from([None, None, None, "a", "b", "c"]),  # which source fails
)


def engine_for(values: dict[str, Expected], failing: list[str | None]) -> SyncEngine:
    def source(name: str) -> Callable[[Context], list[Any]]:
        def compute(ctx: Context) -> list[Any]:
            if failing[0] == name:
                raise ValueError(name)
            version = state.info(name).version + 1
            return [ctx.step, ctx.epoch, version, draw(ctx.rng), ctx.previous and ctx.previous[0]]

        return compute

    state = SharedState()
    for name, value in values.items():
        state.add(name, source(name), every=value.schedule, checkpoint=value.checkpoint)
    return SyncEngine(state, seed=SEED)


@settings(max_examples=200)
@given(
    plans=st.fixed_dictionaries({name: st.tuples(schedules, st.booleans()) for name in "abc"}),
    trail=st.lists(calls, max_size=18),
)
def test_every_call_brings_what_a_step_by_step_search_finds(
    plans: dict[str, tuple[Schedule, bool]], trail: list[tuple[str, int, int | None, list[str], str | None]]
) -> None:
    reference = Reference({name: Expected(*plan) for name, plan in plans.items()})
    failing: list[str | None] = [None]
    saved: tuple[dict[str, Any], dict[str, Expected], tuple[int, int]] | None = None
    engine = engine_for(reference.values, failing)
    for what, moved, turned, names, failing[0] in trail:
        if what == "sync" and not reference.started:
            what = "step"
        if what == "save":
            saved = engine.state_dict(), deepcopy(reference.values), reference.seen
        elif what in ("close", "resume", "reload"):
            content = engine.state_dict()
            engine.close()
            reference.started, reference.closed = False, True
            if what == "resume":  # in another process
                engine = engine_for(reference.values, failing)
                engine.load_state_dict(content)
                reference.resumed()
                reference.closed = False
            elif what == "reload" and saved is not None:  # what was saved earlier, in this process
                engine.load_state_dict(saved[0])
                reference.values, reference.seen = deepcopy(saved[1]), saved[2]
                reference.resumed()
        if what in ("save", "close", "resume", "reload"):
            continue
        if reference.closed:  # such an engine begins again by start only
            what, reference.closed = "start", False
        least = reference.seen if what == "step" and reference.started else (0, 0)
        step = max(reference.seen[0] + moved, least[0], 0)
        epoch = max(reference.seen[1] + (turned or 0), least[1], 0)
        expected = reference.call(what, step, epoch, names, failing[0])
        try:
            if what == "sync":
                came = engine.sync(*names)
            else:
                came = getattr(engine, what)(step, *([] if turned is None and what == "step" else [epoch]))
        except ComputeError:
            assert expected is None, f"{what}({step}, {epoch}) raised, {expected} are due"
        else:
            assert list(came) == expected, f"{what}({step}, {epoch})"
        assert engine.seen == reference.seen
        for name, value in reference.values.items():
            info = engine.state.info(name)
            assert info[:3] == (value.version, value.computed_at, value.computed_at)
            assert engine.state.get(name) == value.value
            assert (name in engine.state) == value.ready
    engine.close()
