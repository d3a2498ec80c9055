"""What runs on either end of the slow link: the same training with the same value, shared in four ways.

A step is 30 ms in which the processor is idle, as when an accelerator computes, or 30 ms of matrix products. After each
one 250 KB are shared: not at all, by a blocking sync, by an asynchronous one, or by a bare `async_op` broadcast that is
waited for as many steps later. The ways take turns in blocks of steps, in an order that is drawn, within one run.
"""

import gc
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from bench_namespaces import ADDRESSES, DEVICE, run_on_two_hosts

from syncstate import Context, Every, SharedState, SyncEngine

__all__ = ["ASYNCHRONOUS", "BARE", "BLOCKING", "NONE", "Block", "Link", "Trace", "run_link"]

NONE, BLOCKING, ASYNCHRONOUS, BARE = "no sync", "blocking", "async", "bare async_op"
_PORT = 29500  # in a namespace of its own every port is free
_WARM_UP = 3
_RAW = 20  # timed broadcasts, for the time on the wire
_SIDE = 192  # of the matrices


@dataclass(frozen=True)
class Link:
    """What is measured; see `configs/experiment/benchmark.yaml`."""

    mbit: float
    nbytes: int
    milliseconds: float
    lag: int
    steps: int
    rounds: int


@dataclass
class Block:
    """Steps of one way in a row, on one rank.

    Attributes:
        way: How the value was shared.
        seconds: Of each step.
        waits: The part of each step that was spent in the call that shares.
    """

    way: str
    seconds: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)


@dataclass
class Trace:
    """What one rank has measured.

    Attributes:
        wire: Seconds that one blocking raw broadcast of the same bytes takes.
        idle, busy: Blocks with an idle and with a computing processor, in the order in which they ran; the same ways
            in the same order on both ranks.
    """

    wire: float
    idle: list[Block]
    busy: list[Block]


def run_link(link: Link, timeout: float) -> list[Trace]:
    """One run, in fresh processes on two hosts.

    Args:
        link: What is measured.
        timeout: Seconds until it is given up.

    Returns:
        What each of the two ranks has measured.

    Raises:
        NoLink: Two hosts cannot be had here.
        RuntimeError, TimeoutError: A rank failed, or was not done in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        answers = [Path(folder, str(rank)) for rank in range(2)]
        jobs = [json.dumps([rank, timeout, asdict(link), str(path)]) for rank, path in enumerate(answers)]
        env = {"GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"}
        run_on_two_hosts([sys.executable, __file__], jobs, mbit=link.mbit, timeout=timeout, env=env)
        return [_trace(json.loads(path.read_text())) for path in answers]


def _trace(told: Mapping[str, Any]) -> Trace:
    idle, busy = ([Block(**block) for block in told[kind]] for kind in ("idle", "busy"))
    return Trace(told["wire"], idle, busy)


# ---------------------------------------------------------------- on a rank


class _Way(Protocol):
    """One way to share a value."""

    def step(self, number: int) -> object:
        """Called after each step, as often as there are steps, on both ranks."""

    def rest(self) -> object:
        """Called after a block: wait for what is on its way."""

    def held(self) -> int | None:
        """The step whose value this rank holds; None where there is none."""


class _Nothing:
    def step(self, number: int) -> None:
        return

    def rest(self) -> None:
        return

    def held(self) -> None:
        return


class _Engine:
    """The library's way: a value that is computed anew at every step."""

    def __init__(self, link: Link, **options: Any) -> None:
        payload = torch.zeros(link.nbytes // 4)
        state = SharedState()

        @state.shared(every=Every(steps=1))
        def value(ctx: Context) -> torch.Tensor:
            return payload.fill_(ctx.step)

        self._value = value
        self.engine = SyncEngine(state, **options)
        self.step, self.rest = self.engine.step, self.engine.drain

    def held(self) -> int:
        return _only(self._value.value)


class _Bare:
    """What one would write by hand, with the buffers for it: one for each broadcast that can be on its way."""

    def __init__(self, link: Link) -> None:
        self._lag = link.lag
        self._buffers = itertools.cycle([torch.zeros(link.nbytes // 4) for _ in range(link.lag + 1)])
        self._flying: deque[tuple[Any, torch.Tensor]] = deque()
        self._is_main = dist.get_rank() == 0
        self._held = torch.zeros(1)

    def step(self, number: int) -> None:
        if len(self._flying) >= self._lag:
            self._land()
        buffer = next(self._buffers)
        if self._is_main:
            buffer.fill_(number)
        self._flying.append((dist.broadcast(buffer, src=0, async_op=True), buffer))

    def _land(self) -> None:
        work, self._held = self._flying.popleft()
        work.wait()

    def rest(self) -> None:
        # What comes into force later is not looked at before; its wire time must not reach into the next block.
        for work, _ in self._flying:
            work.wait()

    def held(self) -> int:
        return _only(self._held)


def _only(held: torch.Tensor) -> int:
    """The number that all elements are equal to."""
    if not bool((held == held[0]).all()):
        raise RuntimeError("half of one value and half of another")
    return int(held[0])


@contextmanager
def _ways(link: Link) -> Iterator[dict[str, tuple[_Way, int]]]:
    """All ways by name, and the steps from that of a value to that in which it is held."""
    blocking, later = _Engine(link), _Engine(link, async_op=True, lag=link.lag)
    with blocking.engine, later.engine:
        for way in (blocking, later):
            way.engine.start()
        yield {NONE: (_Nothing(), 0), BLOCKING: (blocking, 0), ASYNCHRONOUS: (later, link.lag),
               BARE: (_Bare(link), link.lag)}  # fmt: skip
        dist.barrier()  # a rank that ends earlier is missed by one that still shares


def _measure(link: Link) -> Trace:
    """All blocks on this rank."""
    order = random.Random(0)  # the same on both ranks
    seconds = link.milliseconds / 1000
    products = _calibrated(seconds)
    kinds: dict[str, Callable[[], object]] = {"idle": lambda: time.sleep(seconds), "busy": lambda: _compute(products)}
    found: dict[str, list[Block]] = {kind: [] for kind in kinds}
    with _ways(link) as ways:
        steps = {name: itertools.count(1) for name in ways}
        for name, (way, lag) in ways.items():
            _run(name, way, lag, steps[name], lambda: None, _WARM_UP + lag, lag)
        # Python would once look through all that importing has left, in 80 ms, and in the middle of whatever way it is.
        gc.collect()
        gc.freeze()
        for _ in range(link.rounds):
            for kind, work in kinds.items():
                for name in order.sample(list(ways), len(ways)):
                    way, lag = ways[name]
                    found[kind].append(_run(name, way, lag, steps[name], work, link.steps + link.lag, link.lag))
    return Trace(_wire(link), found["idle"], found["busy"])


def _run(
    name: str, way: _Way, lag: int, steps: Iterator[int], work: Callable[[], object], count: int, skipped: int
) -> Block:
    """A block of `count` steps, of which the first are not noted: nothing arrives in them."""
    block = Block(name)
    dist.barrier()
    number = 0
    for index in range(count):
        begun = time.perf_counter()
        work()
        number = next(steps)
        called = time.perf_counter()
        way.step(number)
        ended = time.perf_counter()
        if index >= skipped:
            block.seconds.append(ended - begun)
            block.waits.append(ended - called)
    held = way.held()
    if held is not None and held != number - lag:
        raise RuntimeError(f"{name}: at step {number} rank {dist.get_rank()} holds the value of step {held}")
    way.rest()
    return block


def _wire(link: Link) -> float:
    """Seconds of one raw broadcast: the median, of the rank that it takes longest."""
    buffer, times = torch.zeros(link.nbytes // 4), []
    for _ in range(_RAW):
        dist.barrier()
        begun = time.perf_counter()
        dist.broadcast(buffer, src=0)
        times.append(time.perf_counter() - begun)
    middle = torch.tensor(times).median()
    dist.all_reduce(middle, dist.ReduceOp.MAX)
    return float(middle)


def _calibrated(seconds: float) -> int:
    """How many matrix products take this long, as both ranks see it who compute at the same time."""
    dist.barrier()
    products, end = 0, time.perf_counter() + max(10 * seconds, 0.1)
    begun = time.perf_counter()
    while time.perf_counter() < end:
        _compute(10)
        products += 10
    found = torch.tensor(products * seconds / (time.perf_counter() - begun))
    dist.all_reduce(found)
    return max(1, round(float(found) / dist.get_world_size()))


def _compute(products: int) -> None:
    for _ in range(products):
        torch.mm(_MATRIX, _MATRIX, out=_PRODUCT)


_MATRIX, _PRODUCT = torch.full((_SIDE, _SIDE), 1 / _SIDE), torch.empty(_SIDE, _SIDE)


def _rank_main() -> None:
    """One of the two ranks: reads its job when the link is up, and writes what it has measured."""
    rank, timeout, link, answer = json.loads(sys.stdin.read())
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore(ADDRESSES[0], _PORT, 2, rank == 0, limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    Path(answer).write_text(json.dumps(asdict(_measure(Link(**link)))))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank_main()
