"""Rows of the fault table: what a source, an applying function, a plan or a call can do wrong."""

import time
from typing import Any

import torch
from fault_scene import BOOM, PACE, SHORT, STEP, Fault, Scene, main_fails

from syncstate import Context, Every, SharedState, TensorSpec

__all__ = ["ROWS"]


def compute_raises(scene: Scene) -> Any:
    """The source raises once; the next sync works."""

    def source(ctx: Context) -> int:
        if ctx.step == STEP:
            raise ValueError("boom")
        return ctx.step

    return scene.goes_on(source)


def cannot_travel(scene: Scene) -> Any:
    """The value cannot be encoded once; the next sync works."""
    return scene.goes_on(lambda ctx: {"a": [1, object()]} if ctx.step == STEP else ctx.step)


def breaks_its_spec(scene: Scene) -> Any:
    """The value has another type than promised once; the next sync works."""
    return scene.goes_on(lambda ctx: "text" if ctx.step == STEP else ctx.step, spec=int)


def breaks_its_tensor_spec(scene: Scene) -> Any:
    """A tensor has another shape than promised once; the next sync works."""
    spec = TensorSpec((2,), torch.int64)
    return scene.goes_on(lambda ctx: torch.full((3 if ctx.step == STEP else 2,), ctx.step), spec=spec)


def apply_raises(scene: Scene) -> Any:
    """One rank cannot apply what all received."""

    def apply(value: int, ctx: Context) -> None:
        if scene.here and ctx.step == STEP:
            raise ValueError("cannot apply")

    return scene.train(scene.driver(apply=apply))


def apply_raises_last(scene: Scene) -> Any:
    """One rank cannot apply the last value; no later sync would tell the others."""

    def apply(value: int, ctx: Context) -> None:
        if scene.here and ctx.step == STEP:
            raise ValueError("cannot apply")

    return scene.train(scene.driver(apply=apply), last=STEP + scene.lag)


def schedule_differs(scene: Scene) -> Any:
    return scene.train(scene.driver(every=2 if scene.here else 1))


def name_differs(scene: Scene) -> Any:
    state = SharedState()
    state.add("y" if scene.here else "x", scene.value)
    return scene.train(scene.drive(state, every=Every(steps=1)))


def spec_differs(scene: Scene) -> Any:
    return scene.train(scene.driver(spec=float if scene.here else int))


def frame_size_differs(scene: Scene) -> Any:
    return scene.train(scene.driver(options={"frame_bytes": 2048 if scene.here else 4096}))


def config_differs(scene: Scene) -> Any:
    return scene.train(scene.driver(options={"config": {"model": {"width": 8 if scene.here else 4}}}))


def skips_a_step(scene: Scene) -> Any:
    """One rank makes one call too few, and is a step ahead from then on."""
    with scene.driver(options={"timeout": SHORT * 4}).engine as engine:
        engine.start()
        for step in range(1, scene.last + 1):
            time.sleep(PACE if step > STEP else 0.0)
            if not (scene.here and step == STEP):
                engine.step(step)
    return engine.state["x"]


def syncs_out_of_order(scene: Scene) -> Any:
    """One rank asks for a sync that nobody else makes."""
    driver = scene.driver(options={"timeout": SHORT if scene.asynchronous else SHORT * 4})
    return scene.train(driver, lambda: driver.engine.sync("x") if scene.here else None, pace=PACE, lingers=True)


ROWS = (
    main_fails(compute_raises, "step 2", *BOOM),
    main_fails(cannot_travel, "step 2", "CodecError", "a[1]"),
    Fault(breaks_its_spec, "MismatchError", ("MismatchError",), ("'x'", "step 2", "int", "str"), anyone=False),
    Fault(breaks_its_tensor_spec, "MismatchError", ("MismatchError",), ("[2]", "[3]"), anyone=False, hosted=False),
    Fault(apply_raises, "PeerError", ("ValueError",), ("'x'", "step 2", "rank {who}", "ValueError: cannot apply")),
    Fault(apply_raises_last, "PeerError", ("ValueError",), ("'x'", "step 2", "rank {who}", "ValueError: cannot apply")),
    Fault(schedule_differs, "MismatchError", ("MismatchError",), ("x.every", "rank {who}")),
    Fault(name_differs, "MismatchError", ("MismatchError",), ("values.y", "missing")),
    Fault(spec_differs, "MismatchError", ("MismatchError",), ("x.spec", "float", "int")),
    Fault(frame_size_differs, "MismatchError", ("MismatchError",), ("frame_bytes", "2048", "4096")),
    Fault(config_differs, "MismatchError", ("MismatchError",), ("config.model.width", "8", "4")),
    Fault(skips_a_step, "MismatchError", ("MismatchError",), ("step 2", "step 3"), hosted=False),
    Fault(
        syncs_out_of_order,
        "MismatchError",
        ("MismatchError",),
        ("step 1", "step 2"),
        # It waits on connections that the asynchronous syncs of the others do not use: no frames pair.
        in_async={
            "others": "SyncTimeout",
            "culprit": ("SyncTimeout",),
            "says": ("'x'", "1.5 s", "rank {who} at step 1", "the same calls of the engine"),
        },
    ),
)
