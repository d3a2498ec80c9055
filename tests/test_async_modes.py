"""Values in flight in every mode that a training loop can be in, and programs of calls drawn at random."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from ranks import returned, run_ranks

from syncstate import Context, Every, SharedState, SyncEngine
from syncstate.context import generator

PATIENCE = 300.0
EACH = Every(steps=1)


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def modes(rank: int, numel: int) -> list[Any]:
    """Each call is made in another mode than the one before."""
    kinds: list[Any] = [
        lambda: torch.inference_mode(),
        lambda: torch.no_grad(),
        lambda: default_device("meta"),
        lambda: default_dtype(torch.float64),
        lambda: torch.inference_mode(False),
    ]

    def tensor(value: int) -> torch.Tensor:
        return torch.full((numel,), float(value), device="cpu", dtype=torch.float32, requires_grad=True)

    state = SharedState()
    state.add("same", lambda ctx: tensor(ctx.step), every=EACH, async_op=True, lag=3)
    state.add("held", lambda ctx: tensor(ctx.step), every=EACH, lag=2)
    state.add("all", lambda ctx: [float(part[0]) for part in ctx.collected], every=EACH, async_op=True,
              collect=lambda ctx: tensor(10 * ctx.step + rank))  # fmt: skip
    state.add("now", lambda ctx: [float(part[0]) for part in ctx.collected], every=EACH,
              collect=lambda ctx: tensor(10 * ctx.step + rank))  # fmt: skip
    for name, async_op in (("item", True), ("item now", False)):
        state.add(name, lambda ctx: [tensor(10 * ctx.step + peer) for peer in range(2)], deliver="scatter",
                  every=EACH, async_op=async_op)  # fmt: skip
    found: list[Any] = []
    with SyncEngine(state, timeout=PATIENCE) as engine:
        for step in range(12):
            with kinds[step % len(kinds)]():
                engine.step(step)
            row: list[Any] = [state["all"], state["now"]]
            for name in ("same", "held", "item", "item now"):
                value = state[name]
                plain = (value.dtype, value.device.type, value.requires_grad, value.is_inference(), len(value))
                assert plain == (torch.float32, "cpu", False, False, numel)
                row.append({float(number) for number in value[[0, -1]]})
            found.append(row)
    return found


@pytest.mark.parametrize("numel", [4, 50_000])
def test_values_in_flight_arrive_whatever_mode_the_training_loop_is_in(numel: int) -> None:
    for rank, found in enumerate(returned(run_ranks(modes, 2, numel))):
        for step, (every, now, same, held, item, item_now) in enumerate(found):
            collected, later = max(0, step - 2), max(0, step - 1)
            assert every == [10 * collected, 10 * collected + 1]
            assert now == [10 * step, 10 * step + 1]
            assert same == {max(0, step - 3)}
            assert held == {max(0, step - 2)}
            assert item == {10 * later + rank}
            assert item_now == {10 * step + rank}


# Programs drawn at random


class Value(NamedTuple):
    """One value of a program."""

    name: str
    async_op: bool
    lag: int
    steps: int
    collects: bool
    scattered: bool
    growth: int
    fails: list[int]


def program(seed: int) -> tuple[list[Value], list[tuple[Any, ...]]]:
    """Values of all kinds, and calls of an engine with them."""
    draw = random.Random(seed)
    values = []
    for index in range(draw.randint(1, 6)):
        async_op, collects = draw.random() < 0.6, draw.random() < 0.3
        lag = max(1 + collects, draw.choice([1, 2, 3, 5, 12])) if async_op else draw.choice([0, 0, 1, 2, 4])
        fails = draw.sample(range(1, 40), draw.choice([0, 0, 3]))
        growth = draw.choice([0, 0, 30, 200])
        values.append(
            Value(
                f"v{index}", async_op, lag, draw.choice([1, 1, 2, 3, 7]), collects, draw.random() < 0.25, growth, fails
            )
        )
    calls: list[tuple[Any, ...]] = []
    step = 0
    for _ in range(draw.randint(15, 40)):
        kind = draw.choices(("step", "jump", "drain", "sync", "restart", "resume"), (75, 5, 5, 5, 3, 4))[0]
        if kind in ("step", "jump"):
            step += 1 if kind == "step" else draw.randint(2, 6)
            calls.append(("step", step))
        elif kind == "sync":
            calls.append(("sync", *draw.sample([value.name for value in values], draw.randint(1, len(values)))))
        else:
            calls.append((kind, step))
    return values, calls


def computation(value: Value, ctx: Context) -> Any:
    """Made from the step, the random numbers, the value before and what the ranks sent."""
    if ctx.step in value.fails:
        raise ValueError("boom")
    before = ctx.previous[0] if value.scattered and ctx.previous else ctx.previous
    chain = float(ctx.rng.random()) + (0.5 * before[1] if before else 0.0)
    result = [ctx.step, chain, ctx.collected, [ctx.step] * (value.growth * ctx.step)]
    return [[*result, peer] for peer in range(ctx.world_size)] if value.scattered else result


def short(value: list[Any]) -> list[Any]:
    return [*value[:3], len(value[3]), set(value[3]), *value[4:]]


def played(rank: int, seed: int, main: int) -> list[Any]:
    """What is in force after each call."""
    values, calls = program(seed)
    pause = random.Random(rank)

    def build() -> SyncEngine:
        state = SharedState()
        for v in values:
            state.add(
                v.name,
                lambda ctx, v=v: computation(v, ctx),
                collect=(lambda ctx: ctx.step * 10 + ctx.rank) if v.collects else None,
                deliver="scatter" if v.scattered else "broadcast",
                every=Every(steps=v.steps), async_op=v.async_op, lag=v.lag,
            )  # fmt: skip
        return SyncEngine(state, seed=seed, main=main, on_error="keep", frame_bytes=1024, timeout=PATIENCE)

    engine = build()
    engine.start()
    found = []
    for kind, *rest in (("step", 0), *calls):
        time.sleep(pause.random() * 0.003 if pause.random() < 0.2 else 0)
        if kind == "step":
            engine.step(rest[0])
        elif kind == "drain":
            engine.drain()
        elif kind == "sync":
            engine.sync(*rest)
        else:
            content = engine.state_dict()
            engine.close()
            if kind == "resume":
                engine = build()
                engine.load_state_dict(content)
            engine.start(rest[0])
        state = engine.state
        found.append({name: [short(state[name]), *state.info(name)[:3]] for name in state})
    engine.close()
    return found


class Expected:
    """The same program in one process, from what schedules, lags and failures mean.

    Args:
        rank, world_size: Whose values to work out.
        seed: Of the program.
    """

    def __init__(self, rank: int, world_size: int, seed: int) -> None:
        self.rank, self.world_size, self.seed, self.seen = rank, world_size, seed, -1
        self.values = {value.name: value for value in program(seed)[0]}
        self.held: dict[str, list[Any]] = {}
        self.last: dict[str, tuple[int, Any]] = {}
        self.flights: list[tuple[int, dict[str, int], dict[str, Any]]] = []

    def frame(self, names: list[str], step: int) -> dict[str, Any]:
        """What main computes for one frame: nothing if any computation fails."""
        results = {}
        for name in names:
            version, previous = self.last.get(name, (0, None))
            collected = [10 * step + peer for peer in range(self.world_size)] if self.values[name].collects else None
            rng = generator(self.seed, name, version + 1)
            ctx = Context(step=step, world_size=self.world_size, previous=previous, rng=rng, collected=collected)
            try:
                results[name] = version + 1, computation(self.values[name], ctx)
            except ValueError:
                return {}
        self.last.update(results)
        return {name: value for name, (_, value) in results.items()}

    def put(self, name: str, value: Any, computed_at: int, step: int) -> None:
        version = self.held[name][1] if name in self.held else 0
        mine = value[self.rank] if self.values[name].scattered else value
        self.held[name] = [short(mine), version + 1, computed_at, step]

    def arrive(self, step: int) -> None:
        for launched, pending, results in self.flights:
            for name in [name for name, apply_at in pending.items() if apply_at <= step]:
                self.put(name, results[name], launched, step)
                del pending[name]

    def refresh(self, names: list[str], step: int, *, prompt: bool = False) -> None:
        later = [n for n in names if self.values[n].async_op and n in self.held and not prompt]
        now = [n for n in names if n not in later]
        results = self.frame(now, step)
        held = {n: step + self.values[n].lag for n in results if n in self.held and self.values[n].lag and not prompt}
        for name in results if prompt else ():
            for _, pending, _ in self.flights:
                self.held[name][1] += pending.pop(name, None) is not None
        self.flights.append((step, held, results))
        for name in results.keys() - held.keys():
            self.put(name, results[name], step, step)
        for collects in (False, True):
            results = self.frame([n for n in later if self.values[n].collects == collects], step)
            self.flights.append((step, {n: step + self.values[n].lag for n in results}, results))

    def play(self) -> list[Any]:
        found = []
        for kind, *rest in (("step", 0), *program(self.seed)[1]):
            if kind == "step":
                self.arrive(rest[0])
                due = [n for n, v in sorted(self.values.items()) if rest[0] // v.steps > self.seen // v.steps]
                self.refresh(due, rest[0])
                self.seen = rest[0]
            elif kind == "sync":
                self.refresh(sorted(rest), self.seen, prompt=True)
            elif kind != "drain":
                self.refresh([name for name in sorted(self.values) if name not in self.held], self.seen)
            found.append({name: list(one) for name, one in self.held.items()})
        return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_programs_drawn_at_random_bring_what_schedules_and_lags_mean(world_size: int) -> None:
    for seed in range(world_size, 40, 8):
        found = returned(run_ranks(played, world_size, seed, seed // 8 % world_size))
        for rank in range(world_size):
            assert found[rank] == Expected(rank, world_size, seed).play(), (seed, rank)
