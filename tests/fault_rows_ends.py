"""Rows of the fault table: ranks that are late, stopped, killed, interrupted, or leave, and bytes that are no frame."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from fault_scene import LATE, PACE, SHORT, STEP, Fault, Scene

from syncstate import Context, Every
from syncstate.wire import channel as _channel
from syncstate.wire.frame import Frame
from syncstate.wire.lane import Lane

__all__ = ["ROWS"]


def comes_late(scene: Scene) -> Any:
    """One rank arrives after the timeout."""
    driver = scene.driver(options={"timeout": SHORT})
    return scene.train(driver, lambda: time.sleep(LATE) if scene.here else None, lingers=True)


def sticks_in_a_training_collective(scene: Scene) -> Any:
    """One rank waits in a collective of the default group that the others never join."""

    def stick() -> None:
        if scene.here:
            dist.barrier()

    return scene.train(scene.driver(options={"timeout": SHORT}), stick, lingers=True)


def is_stopped(scene: Scene) -> Any:
    """One rank is stopped by a signal and goes on after the timeout."""
    driver = scene.driver(options={"timeout": SHORT})
    return scene.train(driver, lambda: _stop() if scene.here else None, lingers=True)


def store_host_is_stopped(scene: Scene) -> Any:
    """Main, which hosts the store too, is stopped by a signal: for a while nobody can say or hear anything."""
    return is_stopped(scene)


def _stop() -> None:
    """Stop this process until the others have run into their timeout."""
    parent = os.getpid()
    if os.fork() == 0:
        time.sleep(LATE)
        os.kill(parent, signal.SIGCONT)
        os._exit(0)
    os.kill(parent, signal.SIGSTOP)


def is_killed(scene: Scene) -> Any:
    die = lambda: os.kill(os.getpid(), signal.SIGKILL) if scene.here else None  # noqa: E731
    return scene.train(scene.driver(), die, lingers=True)


def is_killed_in_the_engine(scene: Scene) -> Any:
    """One rank dies while it applies a value."""

    def apply(value: int, ctx: Context) -> None:
        if scene.here and ctx.step == STEP:
            os.kill(os.getpid(), signal.SIGKILL)

    return scene.train(scene.driver(apply=apply, options={"timeout": SHORT * 2}), lingers=True)


def is_killed_in_a_body(scene: Scene) -> Any:
    """One rank dies while many megabytes are on the wire."""
    return _in_a_body(scene, lambda: os.kill(os.getpid(), signal.SIGKILL), 20.0)


def is_stopped_in_a_body(scene: Scene) -> Any:
    """One rank is stopped while many megabytes are on the wire, and goes on after the timeout."""
    return _in_a_body(scene, _stop, SHORT)


def _in_a_body(scene: Scene, hit: Callable[[], object], timeout: float) -> Any:
    driver = scene.driver(options={"timeout": timeout})
    large = lambda ctx: torch.full((5_000_000,), ctx.step) if ctx.step == STEP else None  # noqa: E731
    driver.state.add("large", large, every=Every(steps=1))
    broadcast = Lane.broadcast

    def hit_soon(lane: Lane, *args: Any) -> Any:
        operation = broadcast(lane, *args)
        if any(isinstance(one, torch.Tensor) and one.numel() > 1 << 20 for one in args):
            threading.Timer(0.002, hit).start()
        return operation

    lane_class: Any = Lane
    try:
        if scene.here:
            lane_class.broadcast = hit_soon
        return scene.train(driver, pace=PACE, lingers=True)
    finally:
        lane_class.broadcast = broadcast


def forks_and_exits(scene: Scene) -> Any:
    """One process forks a child that leaves the engine by `sys.exit`; that is not the end of the rank."""
    parent = os.getpid()

    def fork() -> None:
        if scene.here:
            child = os.fork()
            if child == 0:
                sys.exit(3)
            end = time.monotonic() + 5.0
            while os.waitpid(child, os.WNOHANG) == (0, 0):
                if time.monotonic() > end:
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    raise AssertionError("the child hangs")
                time.sleep(0.01)

    try:
        return scene.train(scene.driver(), fork)
    finally:
        if os.getpid() != parent:
            os._exit(3)  # before it reports as if it were the rank


def is_killed_while_connecting(scene: Scene) -> Any:
    """One rank dies when all have met and the private group is being made."""
    channel: Any = _channel
    if scene.here:
        channel.connect = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return scene.train(scene.driver(options={"timeout": SHORT}))


def fails_while_connecting(scene: Scene) -> Any:
    """One rank fails when all have met and the private group is being made."""

    def fail(*_: Any) -> None:
        raise OSError("no descriptors left")

    channel: Any = _channel
    kept = channel.connect
    try:
        if scene.here:
            channel.connect = fail
        return scene.train(scene.driver())
    finally:
        channel.connect = kept


def exits(scene: Scene) -> Any:
    """One process ends without a word."""
    return scene.train(scene.driver(), lambda: os._exit(3) if scene.here else None, lingers=True)


def leaves_early(scene: Scene) -> Any:
    """One rank has less data and ends in good order."""
    return scene.train(scene.driver(), last=STEP if scene.here else None, pace=PACE)


def computes_too_long(scene: Scene) -> Any:
    """Main needs longer than the timeout."""
    return scene.train(scene.driver(source=_slow(LATE), options={"timeout": SHORT}))


def computes_long_with_its_own_timeout(scene: Scene) -> Any:
    """Main needs longer than the engine's timeout, but not than the value's."""
    return scene.train(scene.driver(source=_slow(SHORT + 1.0), timeout=60.0, options={"timeout": SHORT}))


def _slow(seconds: float) -> Callable[[Context], int]:
    def source(ctx: Context) -> int:
        if ctx.step == STEP:
            time.sleep(seconds)
        return ctx.step

    return source


def fails_outside(scene: Scene) -> Any:
    """The training code of one rank raises."""

    def fail() -> None:
        if scene.here:
            raise LookupError("no data")

    return scene.train(scene.driver(), fail, lingers=True)


def fails_before_the_start(scene: Scene) -> Any:
    """One rank raises before it has started, while the others wait for it."""
    with scene.driver().engine as engine:
        if scene.here:
            raise LookupError("no data")
        engine.start()
    return engine.state["x"]


def cannot_open(scene: Scene) -> Any:
    """One rank has a setting that is impossible there only."""
    return scene.train(scene.driver(options={"events": 5 if scene.here else None}))


def source_is_interrupted(scene: Scene) -> Any:
    def source(ctx: Context) -> int:
        if ctx.step == STEP:
            raise KeyboardInterrupt
        return ctx.step

    return scene.train(scene.driver(source=source))


def is_interrupted_while_it_waits(scene: Scene) -> Any:
    """Ctrl-C reaches a rank that waits for main, at once and not at the timeout."""
    parent = os.getpid()

    def interrupt() -> None:
        if scene.here and os.fork() == 0:
            time.sleep(0.5)
            os.kill(parent, signal.SIGINT)
            os._exit(0)

    return scene.train(scene.driver(source=_slow(2.5)), interrupt)


def sends_no_frame(scene: Scene) -> Any:
    """Main sends bytes that are no frame."""
    frame_class: Any = Frame
    write = Frame.write

    def spoiled(frame: Frame, *args: Any) -> Any:
        body = write(frame, *args)
        frame.buffer[:8] = 255
        return body

    def spoil() -> None:
        if scene.here:
            frame_class.write = spoiled

    try:
        return scene.train(scene.driver(), spoil)
    finally:
        frame_class.write = write


ROWS = (
    Fault(
        comes_late,
        "SyncTimeout",
        ("SyncTimeout", "PeerError"),
        ("'x'", "1.5 s", "rank {who} did not report"),
        main=False,
    ),
    Fault(
        sticks_in_a_training_collective,
        "SyncTimeout",
        ("SyncTimeout",),
        ("1.5 s", "rank {who} did not report"),
        group_usable=False,
    ),
    Fault(is_stopped, "SyncTimeout", ("SyncTimeout", "PeerError"), ("1.5 s", "rank {who} did not report")),
    Fault(
        store_host_is_stopped,
        "SyncTimeout",
        ("SyncTimeout", "PeerError"),
        ("1.5 s", "the key-value store of the process group no longer answers"),
        anyone=False,
        store="tcp",
    ),
    Fault(
        is_stopped_in_a_body,
        "SyncTimeout",
        ("SyncTimeout", "PeerError"),
        ("1.5 s", "rank {who} did not report"),
        # Ranks that train meanwhile may be silent for a second too, on a busy machine.
        in_async={"says": ("1.5 s", "did not report")},
    ),
    Fault(is_killed_in_a_body, "PeerError", ("died",), ("rank {who}",)),
    Fault(forks_and_exits, None, (None,)),
    Fault(is_killed, "PeerError", ("died",), ("rank {who}",)),
    Fault(is_killed_in_the_engine, "PeerError", ("died",), ()),
    Fault(is_killed_while_connecting, "SyncTimeout", ("died",), ("rank {who} did not report",)),
    Fault(fails_while_connecting, "PeerError", ("OSError",), ("rank {who}", "OSError: no descriptors left")),
    Fault(exits, "PeerError", ("died",), ("rank {who}",)),
    Fault(leaves_early, "PeerError", (None, "PeerError"), ("rank {who} ended at step 2",)),
    Fault(computes_too_long, "SyncTimeout", ("SyncTimeout",), ("rank {who}", "main process"), anyone=False),
    Fault(computes_long_with_its_own_timeout, None, (None,), anyone=False),
    Fault(fails_before_the_start, "PeerError", ("LookupError",), ("rank {who}", "no data"), hosted=False),
    Fault(cannot_open, "PeerError", ("ConfigError",), ("rank {who}", "ConfigError: events must be")),
    Fault(fails_outside, "PeerError", ("LookupError",), ("rank {who}", "LookupError: ", "no data")),
    Fault(
        source_is_interrupted,
        "PeerError",
        ("KeyboardInterrupt", "SystemExit"),
        ("rank {who}", "KeyboardInterrupt"),
        anyone=False,
    ),
    Fault(
        is_interrupted_while_it_waits,
        "PeerError",
        ("KeyboardInterrupt", "SystemExit"),
        ("rank {who}", "KeyboardInterrupt"),
        main=False,
    ),
    Fault(sends_no_frame, "CodecError", ("CodecError",), ("no frame",), anyone=False),
)
