"""How the benchmark measures. A row of `bench_rows` says what, and calls one of the three methods of `Lab`.

All times are those of the slowest rank. Ranks meet in a barrier before every timed operation, on a group of its own: it
leaves that group warm, and what used it next would gain by that. An operation is timed in alternation with its baseline
and with nothing else, so that its ratio does not depend on which others are measured; the order within each pair is
drawn, the same on every rank.
"""

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from syncstate import Context, Every, SharedState, SyncEngine

__all__ = ["Lab", "Operation", "Reading", "Settings", "quartiles"]

_WARM_UP = 5


@dataclass(frozen=True)
class Settings:
    """What the rows need of the config; see `configs/experiment/benchmark.yaml`."""

    repetitions: int
    peers: bool
    peer_repetitions: int
    small: int
    indices: int
    calls: int
    blocks: int
    resync: int = 66_406


class Operation(NamedTuple):
    """What is timed.

    Attributes:
        run: Brings data from rank 0 to this rank. Every rank calls it.
        held: What this rank holds afterwards, as a list of tensors and numbers.
    """

    run: Callable[[], object]
    held: Callable[[], Sequence[Any]]


@dataclass(frozen=True)
class Reading:
    """What one run says about one contender.

    Attributes:
        contender: Its name.
        value: The figure in the row's unit.
        low, high: Quartiles over the repetitions, in the row's unit.
        target: The largest value that is good enough; None for a peer.
        seconds, baseline: Medians of the operation and of the baseline, where there is one.
    """

    contender: str
    value: float
    low: float
    high: float
    target: float | None = None
    seconds: float | None = None
    baseline: float | None = None


class Lab:
    """Takes readings on one rank of several. Every rank makes the same calls.

    Args:
        settings: From the config.

    Attributes:
        settings: As given.
        rank, ranks, is_main: This process in the group.
        readings: What was measured since `take`, the same on every rank.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.is_main = self.rank == 0
        self.readings: list[Reading] = []
        self._order = random.Random(0)
        self._meeting = dist.new_group()

    def take(self) -> list[Reading]:
        """The readings, of which none is left behind."""
        taken, self.readings = self.readings, []
        return taken

    def meet(self) -> None:
        """Wait for the other ranks."""
        dist.barrier(self._meeting)

    def ratio(
        self,
        contender: str,
        operation: Operation,
        *,
        over: Operation,
        want: Sequence[Any],
        target: Mapping[int, float] | None = None,
        share: float = 1.0,
        excess: bool = False,
    ) -> None:
        """Time an operation over a baseline.

        Args:
            contender: Who does the operation.
            operation, over: The operation and its baseline.
            want: What every rank must hold after either; looked at before anything is timed.
            target: World size -> the ratio to reach; None for a peer.
            share: Of the configured repetitions, for operations that take long.
            excess: Tell by how many percent it takes longer, in place of the ratio.
        """
        given = self.settings.peer_repetitions if target is None else self.settings.repetitions
        pair = (over, operation)
        for one in pair:
            for _ in range(_WARM_UP):
                self.meet()
                one.run()
            if not _same(one.held(), want):
                raise RuntimeError(f"{contender}: rank {self.rank} does not hold what rank 0 sent")
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(max(1, round(given * share))):
            for index in self._order.sample((0, 1), 2):
                times[index].append(self._timed(pair[index].run))
        (_, base, _), found = (quartiles(self._slowest(taken)) for taken in times)
        low, middle, high = (100 * (x / base - 1) if excess else x / base for x in found)
        self._note(contender, target, middle, low, high, seconds=found[1], baseline=base)

    def microseconds(
        self,
        contender: str,
        block: Callable[[int], object],
        *,
        target: Mapping[int, float] | None = None,
        together: bool = False,
    ) -> None:
        """Time one call.

        Args:
            contender: Who is called.
            block: Makes the given number of calls.
            target: World size -> the microseconds to reach; None for a peer.
            together: For calls that communicate: one at a time, on all ranks at once. Others are timed in blocks, on
                one rank after the other, so that ranks do not take the processor from each other.
        """
        calls = 1 if together else self.settings.calls
        block(calls)
        times = []
        for _ in range(self.settings.blocks):
            if together:
                times.append(self._timed(lambda: block(1)))
                continue
            for turn in range(self.ranks):
                self.meet()
                if turn == self.rank:
                    times.append(_seconds(lambda: block(calls)))
        low, middle, high = quartiles([taken / calls * 1e6 for taken in self._slowest(times)])
        self._note(contender, target, middle, low, high, seconds=middle / 1e6)

    def collectives(self, contender: str, operation: Operation, *, target: Mapping[int, float] | None = None) -> None:
        """Count the collectives of an operation, as torch's profiler sees them on any group.

        Args:
            contender: Who does the operation.
            operation: The operation.
            target: World size -> the number to reach; None for a peer.
        """
        operation.run()
        with _without_stderr(), torch.autograd.profiler.profile(use_kineto=False) as profiler:
            operation.run()
        count = sum(event.name.startswith("gloo:") for event in profiler.function_events)
        (most,) = self._slowest([float(count)])
        self._note(contender, target, most, most, most)

    @contextmanager
    def shared(self, values: Sequence[Any], **options: Any) -> Iterator[Operation]:
        """An engine that shares these values, each under a name of its own, at every step.

        Args:
            values: What main computes; the other ranks' are not looked at.
            options: Further arguments of `SharedState.add`.
        """
        state = SharedState()
        for index, value in enumerate(values):
            state.add(f"value_{index}", _source(value), every=Every(steps=1), **options)
        step = 0

        def run() -> None:
            nonlocal step
            step += 1
            engine.step(step)

        with SyncEngine(state) as engine:
            engine.start()
            yield Operation(run, lambda: list(state.values()))
            self.meet()  # a rank that ends earlier is missed by one that still shares

    def _timed(self, run: Callable[[], object]) -> float:
        self.meet()
        return _seconds(run)

    def _slowest(self, mine: Sequence[float]) -> list[float]:
        """Element by element the largest number that any rank has."""
        numbers = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._meeting)
        return numbers.tolist()

    def _note(
        self,
        contender: str,
        target: Mapping[int, float] | None,
        value: float,
        low: float,
        high: float,
        seconds: float | None = None,
        baseline: float | None = None,
    ) -> None:
        # Where no figure was set for so many ranks, that for the most ranks below holds.
        limit = None if target is None else target[max((n for n in target if n <= self.ranks), default=min(target))]
        self.readings.append(Reading(contender, value, low, high, limit, seconds, baseline))


def _source(value: object) -> Callable[[Context], object]:
    return lambda ctx: value


def _seconds(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def quartiles(numbers: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(numbers) == 1:
        return numbers[0], numbers[0], numbers[0]
    low, middle, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return low, middle, high


def _same(held: Sequence[Any], want: Sequence[Any]) -> bool:
    """Whether tensors and numbers are equal one by one; a number equals a tensor that holds just that."""
    plain = [[part.tolist() if isinstance(part, torch.Tensor) else part for part in parts] for parts in (held, want)]
    return plain[0] == plain[1]


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Some builds of torch write a line there whenever a profiler starts or stops."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(nowhere)
        os.close(kept)
