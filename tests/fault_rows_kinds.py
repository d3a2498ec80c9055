"""Rows of the fault table: values in flight, what ranks collect, items that are scattered, replicas that drift."""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from fault_hosts import Driver
from fault_scene import BOOM, LATE, PACE, SHORT, STEP, Fault, Scene, main_fails

from syncstate import Context, Every, ParameterResync
from syncstate.wire.lane import Lane

__all__ = ["ROWS"]


# In flight


def raises_with_two_others_in_flight(scene: Scene) -> Any:
    """The source raises when the values of two steps before are still on their way; these and later ones arrive."""
    scene.lag = 3

    def source(ctx: Context) -> int:
        if ctx.step == STEP + 1:
            raise ValueError("boom")
        return ctx.step

    return scene.goes_on(source, STEP + 1)


def raises_at_the_end(scene: Scene) -> Any:
    """The source raises in the last sync, whose value would come into force after the end."""

    def source(ctx: Context) -> int:
        if ctx.step == STEP:
            raise ValueError("boom")
        return ctx.step

    return scene.train(scene.driver(source=source), last=STEP)


def fails_with_a_body_in_flight(scene: Scene) -> Any:
    """The training code of one rank raises while many megabytes are on the wire."""

    def fail() -> None:
        if scene.here:
            raise LookupError("no data")

    return scene.train(_with_bodies(scene), fail, pace=PACE, lingers=True)


def is_killed_with_a_body_in_flight(scene: Scene) -> Any:
    """One rank dies between two calls while many megabytes are on the wire."""
    return scene.train(
        _with_bodies(scene),
        lambda: os.kill(os.getpid(), signal.SIGKILL) if scene.here else None,
        pace=PACE,
        lingers=True,
    )


def _with_bodies(scene: Scene) -> Driver:
    driver = scene.driver()
    driver.state.add("large", lambda ctx: torch.full((3_000_000,), ctx.step), every=Every(steps=1))
    return driver


def is_slow(scene: Scene) -> Any:
    """One rank takes ten times as long for a step as the others."""
    return scene.train(scene.driver(), last=12, pace=0.1 if scene.here else 0.01)


# Collected


def collect_raises(scene: Scene) -> Any:
    """One rank cannot collect once; the next sync works."""

    def collect(ctx: Context) -> int:
        if scene.here and ctx.step == STEP:
            raise ValueError("no loss")
        return 10 * ctx.step + scene.rank

    return scene.goes_on(_summing(scene), collect=collect)


def collects_what_cannot_travel(scene: Scene) -> Any:
    """What one rank collected cannot be encoded once; the next sync works."""

    def collect(ctx: Context) -> Any:
        return {"a": [1, object()]} if scene.here and ctx.step == STEP else 10 * ctx.step + scene.rank

    return scene.goes_on(_summing(scene), collect=collect)


def _summing(scene: Scene) -> Callable[[Context], int]:
    def source(ctx: Context) -> int:
        if ctx.collected != [10 * ctx.step + rank for rank in range(scene.world_size)]:
            raise AssertionError(f"collected {ctx.collected}")
        return ctx.step

    return source


def is_killed_while_it_collects(scene: Scene) -> Any:
    return _collecting(scene, lambda: os.kill(os.getpid(), signal.SIGKILL))


def collects_too_long(scene: Scene) -> Any:
    """One rank needs longer than the timeout to collect."""
    return _collecting(scene, lambda: time.sleep(LATE), SHORT)


def is_interrupted_while_it_collects(scene: Scene) -> Any:
    def interrupt() -> None:
        raise KeyboardInterrupt

    return _collecting(scene, interrupt)


def _collecting(scene: Scene, hit: Callable[[], object], timeout: float = 20.0) -> Any:
    def collect(ctx: Context) -> int:
        if scene.here and ctx.step == STEP:
            hit()
        return scene.rank

    return scene.train(scene.driver(collect=collect, options={"timeout": timeout}))


# Scattered


def scatters_too_few_items(scene: Scene) -> Any:
    """Main has one item too few once; the next sync works."""
    return scene.goes_on(lambda ctx: [ctx.step] * (scene.world_size - (ctx.step == STEP)), deliver="scatter")


def an_item_cannot_travel(scene: Scene) -> Any:
    """One item cannot be encoded once; the next sync works."""
    return scene.goes_on(
        lambda ctx: [object() if ctx.step == STEP and rank == 1 else ctx.step for rank in range(scene.world_size)],
        deliver="scatter",
    )


def apply_of_an_item_raises(scene: Scene) -> Any:
    """One rank cannot apply its item."""

    def apply(value: int, ctx: Context) -> None:
        if scene.here and ctx.step == STEP:
            raise ValueError("cannot apply")

    return scene.train(scene.driver(source=lambda ctx: [ctx.step] * scene.world_size, deliver="scatter", apply=apply))


def is_killed_in_a_scatter(scene: Scene) -> Any:
    """One rank dies while many megabytes are on the wire, others for each rank."""
    driver = scene.driver()
    driver.state.add(
        "large", lambda ctx: [torch.full((2_000_000 * (ctx.step == STEP),), ctx.step)] * scene.world_size,
        every=Every(steps=1), deliver="scatter",
    )  # fmt: skip
    scatter = Lane.scatter

    def hit_soon(lane: Lane, *args: Any) -> Any:
        threading.Timer(0.002, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        return scatter(lane, *args)

    lane_class: Any = Lane
    if scene.here:
        lane_class.scatter = hit_soon
    return scene.train(driver, pace=PACE, lingers=True)


# Resynced


def drifts(scene: Scene) -> Any:
    """One replica changes by itself: all raise, after the repair."""
    tensors = {"w": torch.zeros(3)}

    def drift() -> None:
        tensors["w"][1] += float(scene.here)

    resync = ParameterResync(tensors, every=Every(steps=1), on_drift="raise")
    try:
        return scene.train(scene.driver(options={"resync": resync}), drift)
    finally:
        if tensors["w"].tolist() != [0.0, float(scene.who == 0), 0.0]:
            raise AssertionError(f"not repaired: {tensors['w']}")


def structure_differs(scene: Scene) -> Any:
    """One replica has another shape from the start."""
    tensors = {"w": torch.zeros(4 if scene.here else 3)}
    return scene.train(scene.driver(options={"resync": ParameterResync(tensors, every=Every(steps=1))}))


def structure_changes(scene: Scene) -> Any:
    """One replica gets another shape while training runs."""
    tensors = {"w": torch.zeros(3)}

    def change() -> None:
        if scene.here:
            tensors["w"] = torch.zeros(4)

    return scene.train(scene.driver(options={"resync": ParameterResync(tensors, every=Every(steps=1))}), change)


_COLLECTED = ("'x'", "step 2", "rank {who}")
_LEFT = ("KeyboardInterrupt", "SystemExit")

ROWS = (
    main_fails(raises_with_two_others_in_flight, "step 3", *BOOM, modes=("async",)),
    main_fails(raises_at_the_end, "step 2", *BOOM, modes=("async",)),
    Fault(
        fails_with_a_body_in_flight,
        "PeerError",
        ("LookupError",),
        ("rank {who}", "LookupError: ", "no data"),
        modes=("async",),
    ),
    Fault(is_killed_with_a_body_in_flight, "PeerError", ("died",), ("rank {who}",), modes=("async",)),
    Fault(is_slow, None, (None,)),
    Fault(collect_raises, "ComputeError", ("ComputeError",), (*_COLLECTED, "ValueError: no loss", "Traceback")),
    Fault(collects_what_cannot_travel, "ComputeError", ("ComputeError",), (*_COLLECTED, "CodecError", "a[1]")),
    Fault(is_killed_while_it_collects, "PeerError", ("died",), ("rank {who}",)),
    Fault(collects_too_long, "SyncTimeout", ("SyncTimeout", "PeerError"), ("'x'", "1.5 s", "rank {who}")),
    Fault(is_interrupted_while_it_collects, "PeerError", _LEFT, ("rank {who}", "KeyboardInterrupt")),
    main_fails(scatters_too_few_items, "step 2"),
    main_fails(an_item_cannot_travel, "step 2", "CodecError"),
    Fault(apply_of_an_item_raises, "PeerError", ("ValueError",), (*_COLLECTED, "ValueError: cannot apply")),
    Fault(is_killed_in_a_scatter, "PeerError", ("died",), ("rank {who}",)),
    Fault(drifts, "DriftError", ("DriftError",), ("w",)),
    Fault(structure_differs, "MismatchError", ("MismatchError",), ("tensors.w", "rank {who}")),
    Fault(structure_changes, "MismatchError", ("MismatchError",), ("w", "rank {who}")),
)
