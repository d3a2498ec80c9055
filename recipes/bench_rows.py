"""The rows of the benchmark. A row is a function: what is done, over what, the figure to reach, and the peers.

A new row is one more function here. Its name is what the config calls it.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from bench_hosts import accelerate_hook, lightning_callback
from bench_lab import Lab
from bench_peers import accelerate_dict, ignite_each, installed, object_list, raw, shape_first
from bench_resync import average_all, compare_equal, copy_all, repair_one
from bench_training import train_with_syncs

from syncstate import Every, SharedState, SyncEngine

__all__ = ["ROWS", "Row"]


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        title: What is done.
        unit: `"x"`, a ratio; `"%"`; `"us"`, microseconds; or `"collectives"`.
        measured: What the numbers are.
        measure: Takes the readings, on every rank; None where they are taken over a slow link, by `bench_link`.
    """

    title: str
    unit: str
    measured: str
    measure: Callable[[Lab], None] | None


ROWS: dict[str, Row] = {}


def row(title: str, unit: str, measured: str) -> Callable[[Callable[[Lab], None]], Callable[[Lab], None]]:
    """Make a row of a function."""

    def add(measure: Callable[[Lab], None]) -> Callable[[Lab], None]:
        ROWS[measure.__name__] = Row(title, unit, measured, measure)
        return measure

    return add


@row("20 numbers in one sync", "x", "time over one raw broadcast of the same bytes")
def scalars(lab: Lab) -> None:
    numbers = _floats(20, torch.float64)
    with lab.shared(numbers.tolist()) as sync:
        lab.ratio("syncstate", sync, over=raw(numbers), want=numbers.tolist(), target={2: 1.15, 4: 1.15})


@row("20 small tensors in one sync", "x", "time over one raw broadcast of the same bytes")
def tensors(lab: Lab) -> None:
    packed = _floats((20, lab.settings.small), torch.float32)
    values = list(packed)
    with lab.shared(values) as sync:
        lab.ratio("syncstate", sync, over=raw(packed), want=values, target={2: 1.3, 4: 1.3})
    peers: dict[str, Any] = {
        "object list": lambda: object_list(values),
        "accelerate, a dict": lambda: accelerate_dict({f"value_{i}": value for i, value in enumerate(values)}),
        "ignite, each tensor": lambda: ignite_each(values),
    }
    for name, peer in installed(peers if lab.settings.peers else {}):
        lab.ratio(name, peer, over=raw(packed), want=values)


@row("Indices, their number known to main only", "x", "time over one raw broadcast of the same bytes")
def indices(lab: Lab) -> None:
    order = torch.randperm(lab.settings.indices, generator=torch.Generator().manual_seed(0))
    with lab.shared([order]) as sync:
        lab.ratio("syncstate", sync, over=raw(order[None]), want=[order], target={2: 1.25, 4: 1.4}, share=1 / 3)
    peers: dict[str, Any] = {
        "object list": lambda: object_list([order]),
        "shape first, then accelerate": lambda: shape_first(order),
    }
    for name, peer in installed(peers if lab.settings.peers else {}):
        lab.ratio(name, peer, over=raw(order[None]), want=[order], share=1 / 2)


@row("A step with nothing due, 10 values", "us", "time of one call")
def idle(lab: Lab) -> None:
    with SyncEngine(ten_values()) as engine:
        engine.start()
        steps = itertools.count(1)

        def step(calls: int) -> None:
            for number in itertools.islice(steps, calls):
                engine.step(number, 0)

        lab.microseconds("syncstate, engine", step, target={2: 1.0, 4: 1.0})
    lightning_callback(lab, ten_values(), target={2: 3.0, 4: 3.0})
    accelerate_hook(lab, ten_values(), target={2: 3.0, 4: 3.0})


@row("Collectives of one sync", "collectives", "counted by torch's profiler")
def collectives(lab: Lab) -> None:
    packed = _floats((20, lab.settings.small), torch.float32)
    values, large = list(packed), torch.arange(lab.settings.indices)
    with lab.shared(values) as sync:
        lab.collectives("syncstate, 20 small tensors", sync, target={2: 1})
    with lab.shared([large]) as sync:
        lab.collectives("syncstate, more than a frame", sync, target={2: 2})
    with lab.shared([0], collect=lambda ctx: ctx.rank) as sync:
        lab.collectives("syncstate, with collect", sync, target={2: 2})
    with lab.shared([0], collect=lambda ctx: large) as sync:
        lab.collectives("syncstate, with a large collect", sync, target={2: 3})
    with lab.shared([[values] * lab.ranks], deliver="scatter") as sync:
        lab.collectives("syncstate, scatter", sync, target={2: 1})
    with lab.shared([[large] * lab.ranks], deliver="scatter") as sync:
        lab.collectives("syncstate, a large scatter", sync, target={2: 2})
    peers: dict[str, Any] = {
        "object list, either": lambda: object_list(values),
        "accelerate, dict of 20": lambda: accelerate_dict({f"value_{i}": value for i, value in enumerate(values)}),
        "ignite, 20 tensors": lambda: ignite_each(values),
        "shape first, then accelerate": lambda: shape_first(large),
    }
    for name, peer in installed(peers if lab.settings.peers else {}):
        lab.collectives(name, peer)


@row("Training with a sync every 10 steps", "%", "how much longer ten steps take than without")
def training(lab: Lab) -> None:
    train_with_syncs(lab, target={2: 1.0, 4: 1.0})


@row("Resync of 256 tensors, nothing has drifted", "x", "time over one raw broadcast of the same bytes")
def resync_equal(lab: Lab) -> None:
    compare_equal(lab)


@row("Resync, one number has drifted", "x", "time over a check and the broadcast of a bucket of 25 MB")
def resync_one(lab: Lab) -> None:
    repair_one(lab)


@row("Resync, a full copy", "x", "time over one raw broadcast and two memory copies of the same bytes")
def resync_copy(lab: Lab) -> None:
    copy_all(lab)


@row("Resync, an average", "x", "time over one raw all_reduce and two memory copies of the same bytes")
def resync_average(lab: Lab) -> None:
    average_all(lab)


# These are measured together, in one run on two hosts.
ROWS |= {
    "link": Row("After each step over a slow link", "%", "of what a blocking sync adds to a step", None),
    "link_wait": Row("Waiting for a slow link, idle processor", "%", "of the time on the wire", None),
    "link_busy": Row(
        "Computing steps, over a slow link", "x", "step time over that with a bare async_op broadcast", None
    ),
}


def ten_values() -> SharedState:
    """Ten values that are due at step 0 and then not for a long time."""
    state = SharedState()
    for index in range(10):
        state.add(f"value_{index}", lambda ctx: ctx.step, every=Every(steps=1_000_000_000))
    return state


def _floats(size: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The same random numbers on every rank."""
    return torch.rand(size, dtype=dtype, generator=torch.Generator().manual_seed(0))
