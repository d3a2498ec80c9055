"""Faults to inject into an engine, and what every rank must see of each.

`recipes/fault_matrix.py` and the tests run them.

A fault is one function that every rank runs, and a line in the `ROWS` of a module `fault_rows*` that says what must
come of it. It gets a `Scene`, breaks something on the rank `scene.who`, and returns or raises like a training loop.
"""

import dataclasses
import itertools
import time
from typing import Any, Literal

import fault_rows
import fault_rows_ends
import fault_rows_kinds
import torch
import torch.distributed as dist
from fault_hosts import HOSTS
from fault_scene import MODES, Fault, Mode, Scene
from ranks import Outcome, run_ranks

from syncstate import Every, SharedState, SyncEngine

__all__ = ["FAULTS", "MODES", "Cell", "Fault", "Mode", "Verdict", "cells", "play"]

HANG = 30.0  # seconds after which a rank counts as hanging; every fault is over in a few

FAULTS = {fault.run.__name__: fault for fault in (*fault_rows.ROWS, *fault_rows_ends.ROWS, *fault_rows_kinds.ROWS)}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell of the matrix."""

    fault: str
    world_size: int
    who: int
    store: Literal["file", "tcp"] = "file"
    host: str = "plain"
    mode: Mode = "blocking"

    def __str__(self) -> str:
        return f"{self.fault}[{self.world_size} ranks, rank {self.who}, {self.store}, {self.host}, {self.mode}]"

    @property
    def row(self) -> Fault:
        """The line of the table that it is judged by."""
        return FAULTS[self.fault].within(self.mode)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of a cell: `wrong` is empty when every rank did what it must; `seconds` is the slowest rank's."""

    wrong: list[str]
    seconds: float


def cells(world_sizes: tuple[int, ...] = (2, 3, 4, 8), modes: tuple[Mode, ...] = MODES) -> list[Cell]:
    """The whole matrix: main, a neighbour of it, and a leaf; faults that kill main also on a store that main hosts."""
    matrix = []
    for name in FAULTS:
        for mode, world_size in itertools.product(modes, world_sizes):
            fault = FAULTS[name].within(mode)
            if mode not in fault.modes:
                continue
            others = sorted({1, world_size - 1}) if fault.anyone else []
            for who in ([0] if fault.main else []) + others:
                matrix.append(Cell(name, world_size, who, fault.store, mode=mode))
                if "died" in fault.culprit and who == 0:
                    matrix.append(Cell(name, world_size, who, "tcp", mode=mode))
                if world_size == 2 and fault.hosted:
                    hosts = [host for host in HOSTS if host != "plain"]
                    matrix += [Cell(name, world_size, who, fault.store, host, mode) for host in hosts]
    return matrix


def _act(rank: int, cell: Cell) -> tuple[Any, str | None]:
    """A rank of a cell: the fault, then a look at what is left."""
    fault = cell.row
    error: BaseException | None = None
    result = None
    begun = time.monotonic()
    try:
        result = fault.run(Scene(rank, cell.world_size, cell.who, cell.host, cell.mode))
    except BaseException as raised:
        error = raised
    seconds = time.monotonic() - begun
    told = None if error is None else (type(error).__name__, str(error))
    del error  # its traceback would keep the group alive
    after = None
    if fault.group_usable and "died" not in fault.culprit:
        after = _afterwards(rank, cell.world_size)
    return (told, result, seconds), after


def _afterwards(rank: int, world_size: int) -> str | None:
    """The default group works, and a new engine on it."""
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    if total.item() != world_size * (world_size + 1) / 2:
        return f"all_reduce gives {total.item()}"
    state = SharedState()
    state.add("again", lambda ctx: [ctx.step, "fine"])
    with SyncEngine(state, every=Every(steps=1), timeout=20.0) as engine:
        engine.start(step=7)
        return None if state["again"] == [7, "fine"] else f"a new engine gives {state['again']}"


def play(cell: Cell) -> Verdict:
    """Run one cell and compare what every rank saw with the table."""
    outcomes = run_ranks(_act, cell.world_size, cell, timeout=HANG, store=cell.store, group_timeout=6.0)
    wrong = []
    seconds = 0.0
    results = []
    for outcome in outcomes:
        said = _judge(cell, outcome)
        if said:
            wrong.append(said)
        if outcome.status == "returned":
            _, result, took = outcome.value[0]
            seconds = max(seconds, took)
            results.append(result)
    if cell.row.others is None and any(result != results[0] for result in results):
        wrong.append(f"the ranks end with different values: {results}")
    return Verdict(wrong, seconds)


def _judge(cell: Cell, outcome: Outcome) -> str:
    fault, rank = cell.row, outcome.rank
    if rank == cell.who and "died" in fault.culprit:
        return "" if outcome.status == "died" else f"rank {rank} should have died: {outcome}"
    if outcome.status != "returned":
        return f"rank {rank}: {outcome}"
    (told, _, _), after = outcome.value
    if after is not None:
        return f"rank {rank}, afterwards: {after}"
    name = None if told is None else told[0]
    if rank == cell.who:
        return "" if name in fault.culprit else f"rank {rank}, the culprit: {told}, not {fault.culprit}"
    lost = cell.store != fault.store and cell.who == 0  # the store dies too, so nobody can say who it was
    if name != fault.others and not (lost and name == "PeerError"):
        return f"rank {rank}: {told}, not {fault.others}"
    missing = [] if told is None or lost else [part for part in fault.says if part.format(who=cell.who) not in told[1]]
    return f"rank {rank}: {told} does not say {missing}" if missing else ""
