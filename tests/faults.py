"""Faults to inject into an engine, and what every rank must see of each.

`recipes/fault_matrix.py` and the tests run them.

A fault is one function that every rank runs, and a line in `FAULTS` that says what must come of it. It gets a `Scene`,
breaks something on the rank `scene.who`, and returns or raises like a user's training loop.
"""

import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from fault_hosts import HOSTS, Driver
from ranks import Outcome, run_ranks

from syncstate import Context, Every, SharedState, SyncEngine, TensorSpec
from syncstate.wire import channel as _channel
from syncstate.wire.frame import Frame
from syncstate.wire.lane import Lane

__all__ = ["FAULTS", "Cell", "Fault", "Verdict", "cells", "play"]

STEP = 2  # where the fault happens
LAST = 5
_PACE = 0.4  # seconds a step, where news has to travel while ranks that miss nothing go on
SHORT = 1.5  # seconds, the timeout of the engines that must run into it
HANG = 30.0  # seconds after which a rank counts as hanging; every fault is over in a few


class Scene:
    """What a fault has to work with on one rank.

    Args:
        rank, world_size: This rank.
        who: The rank that misbehaves.
        host: What trains.
    """

    def __init__(self, rank: int, world_size: int, who: int, host: str) -> None:
        self.host = host
        self.rank = rank
        self.world_size = world_size
        self.who = who
        self.here = rank == who
        self.computed = 0

    def value(self, ctx: Context) -> Any:
        """The source of the shared value: the step, as a number."""
        self.computed += 1
        return ctx.step

    def driver(self, *, source: Any = None, every: int = 1, options: Any = None, **add: Any) -> Driver:
        """Training with one value, `x`."""
        state = SharedState()
        state.add("x", self.value if source is None else source, every=Every(steps=every), **add)
        return HOSTS[self.host](state, {"timeout": 20.0, **(options or {})})

    def train(
        self, driver: Driver, at_step: Callable[[], object] = lambda: None, last: int = LAST, pace: float = 0.0
    ) -> Any:
        """Train, a step in `pace` seconds after the fault, which happens before the sync of `STEP`."""
        driver.train(last, STEP, at_step, pace)
        return driver.state["x"]


@dataclasses.dataclass(frozen=True)
class Fault:
    """One row of the table.

    Attributes:
        run: What every rank does.
        others: The class of the error on the other ranks; None when they must end without one.
        culprit: The classes that the rank `who` may raise; `"died"` when it dies.
        says: Parts of the message on every other rank; `{who}` is the rank.
        anyone: Whether ranks other than main can do it.
        main: Whether main can do it.
        group_usable: Whether the default group must work afterwards, where all ranks live.
        hosted: Whether it can happen in a host, which calls the engine itself.
        store: What the ranks meet over; `"tcp"` where it must be one that rank 0 hosts.
    """

    run: Callable[[Scene], Any]
    others: str | None
    culprit: tuple[str | None, ...]
    says: tuple[str, ...] = ()
    anyone: bool = True
    main: bool = True
    group_usable: bool = True
    hosted: bool = True
    store: Literal["file", "tcp"] = "file"


def compute_raises(scene: Scene) -> Any:
    """The source raises once; the next sync works."""

    def source(ctx: Context) -> int:
        if ctx.step == STEP:
            raise ValueError("boom")
        return ctx.step

    return _goes_on(scene, source)


def cannot_travel(scene: Scene) -> Any:
    """The value cannot be encoded once; the next sync works."""
    return _goes_on(scene, lambda ctx: {"a": [1, object()]} if ctx.step == STEP else ctx.step)


def breaks_its_spec(scene: Scene) -> Any:
    """The value has another type than promised once; the next sync works."""
    return _goes_on(scene, lambda ctx: "text" if ctx.step == STEP else ctx.step, spec=int)


def breaks_its_tensor_spec(scene: Scene) -> Any:
    """A tensor has another shape than promised once; the next sync works."""
    spec = TensorSpec((2,), torch.int64)
    return _goes_on(scene, lambda ctx: torch.full((3 if ctx.step == STEP else 2,), ctx.step), spec=spec)


def _goes_on(scene: Scene, source: Callable[[Context], Any], **add: Any) -> Any:
    if scene.host != "plain":
        return scene.train(scene.driver(source=source, **add))
    error: BaseException | None = None
    with scene.driver(source=source, **add).engine as engine:
        for step in range(LAST + 1):
            try:
                engine.step(step)
            except Exception as raised:
                error = raised
                if step != STEP or torch.as_tensor(engine.state["x"]).reshape(-1)[0] != STEP - 1:
                    raise AssertionError("the old value did not stay") from raised
        if torch.as_tensor(engine.state["x"]).reshape(-1)[0] != LAST:
            raise AssertionError("later syncs do not work")
    if error is None:
        raise AssertionError("no error")
    raise error


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

    return scene.train(scene.driver(apply=apply), last=STEP)


def schedule_differs(scene: Scene) -> Any:
    return scene.train(scene.driver(every=2 if scene.here else 1))


def name_differs(scene: Scene) -> Any:
    state = SharedState()
    state.add("y" if scene.here else "x", scene.value)
    return scene.train(HOSTS[scene.host](state, {"every": Every(steps=1)}))


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
        for step in range(1, LAST + 1):
            time.sleep(_PACE if step > STEP else 0.0)
            if not (scene.here and step == STEP):
                engine.step(step)
    return engine.state["x"]


def syncs_out_of_order(scene: Scene) -> Any:
    """One rank asks for a sync that nobody else makes."""
    driver = scene.driver(options={"timeout": SHORT * 4})
    return scene.train(driver, lambda: driver.engine.sync("x") if scene.here else None, pace=_PACE)


def comes_late(scene: Scene) -> Any:
    """One rank arrives after the timeout."""
    return scene.train(scene.driver(options={"timeout": SHORT}), lambda: time.sleep(3 * SHORT) if scene.here else None)


def sticks_in_a_training_collective(scene: Scene) -> Any:
    """One rank waits in a collective of the default group that the others never join."""

    def stick() -> None:
        if scene.here:
            dist.barrier()

    return scene.train(scene.driver(options={"timeout": SHORT}), stick)


def is_stopped(scene: Scene) -> Any:
    """One rank is stopped by a signal and goes on after the timeout."""

    return scene.train(scene.driver(options={"timeout": SHORT}), lambda: _stop() if scene.here else None)


def store_host_is_stopped(scene: Scene) -> Any:
    """Main, which hosts the store too, is stopped by a signal: for a while nobody can say or hear anything."""
    return is_stopped(scene)


def _stop() -> None:
    """Stop this process until the others have run into their timeout."""
    parent = os.getpid()
    if os.fork() == 0:
        time.sleep(3 * SHORT)
        os.kill(parent, signal.SIGCONT)
        os._exit(0)
    os.kill(parent, signal.SIGSTOP)


def is_killed(scene: Scene) -> Any:
    return scene.train(scene.driver(), lambda: os.kill(os.getpid(), signal.SIGKILL) if scene.here else None)


def is_killed_in_the_engine(scene: Scene) -> Any:
    """One rank dies while it applies a value."""

    def apply(value: int, ctx: Context) -> None:
        if scene.here and ctx.step == STEP:
            os.kill(os.getpid(), signal.SIGKILL)

    return scene.train(scene.driver(apply=apply, options={"timeout": SHORT * 2}))


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

    def hit_soon(lane: Lane, buffer: torch.Tensor, *rest: Any) -> Any:
        operation = broadcast(lane, buffer, *rest)
        if buffer.numel() > 1 << 20:
            threading.Timer(0.002, hit).start()
        return operation

    lane_class: Any = Lane
    try:
        if scene.here:
            lane_class.broadcast = hit_soon
        return scene.train(driver, pace=_PACE)
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
    return scene.train(scene.driver(), lambda: os._exit(3) if scene.here else None)


def leaves_early(scene: Scene) -> Any:
    """One rank has less data and ends in good order."""
    return scene.train(scene.driver(), last=STEP if scene.here else LAST, pace=_PACE)


def computes_too_long(scene: Scene) -> Any:
    """Main needs longer than the timeout."""
    return scene.train(scene.driver(source=_slow, options={"timeout": SHORT}))


def computes_long_with_its_own_timeout(scene: Scene) -> Any:
    """Main needs longer than the engine's timeout, but not than the value's."""
    return scene.train(scene.driver(source=_slow, timeout=60.0, options={"timeout": SHORT}))


def _slow(ctx: Context) -> int:
    if ctx.step == STEP:
        time.sleep(3 * SHORT)
    return ctx.step


def fails_outside(scene: Scene) -> Any:
    """The training code of one rank raises."""

    def fail() -> None:
        if scene.here:
            raise LookupError("no data")

    return scene.train(scene.driver(), fail)


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

    return scene.train(scene.driver(source=_slow), interrupt)


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


FAULTS = {
    fault.run.__name__: fault
    for fault in (
        Fault(
            compute_raises,
            "ComputeError",
            ("ComputeError",),
            ("'x'", "step 2", "ValueError: boom", "Traceback"),
            anyone=False,
        ),
        Fault(cannot_travel, "ComputeError", ("ComputeError",), ("'x'", "step 2", "CodecError", "a[1]"), anyone=False),
        Fault(breaks_its_spec, "MismatchError", ("MismatchError",), ("'x'", "step 2", "int", "str"), anyone=False),
        Fault(breaks_its_tensor_spec, "MismatchError", ("MismatchError",), ("[2]", "[3]"), anyone=False, hosted=False),
        Fault(apply_raises, "PeerError", ("ValueError",), ("'x'", "step 2", "rank {who}", "ValueError: cannot apply")),
        Fault(
            apply_raises_last, "PeerError", ("ValueError",), ("'x'", "step 2", "rank {who}", "ValueError: cannot apply")
        ),
        Fault(schedule_differs, "MismatchError", ("MismatchError",), ("x.every", "rank {who}")),
        Fault(name_differs, "MismatchError", ("MismatchError",), ("values.y", "missing")),
        Fault(spec_differs, "MismatchError", ("MismatchError",), ("x.spec", "float", "int")),
        Fault(frame_size_differs, "MismatchError", ("MismatchError",), ("frame_bytes", "2048", "4096")),
        Fault(config_differs, "MismatchError", ("MismatchError",), ("config.model.width", "8", "4")),
        Fault(skips_a_step, "MismatchError", ("MismatchError",), ("step 2", "step 3"), hosted=False),
        Fault(syncs_out_of_order, "MismatchError", ("MismatchError",), ("step 1", "step 2")),
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
            is_stopped_in_a_body, "SyncTimeout", ("SyncTimeout", "PeerError"), ("1.5 s", "rank {who} did not report")
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
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell of the matrix."""

    fault: str
    world_size: int
    who: int
    store: Literal["file", "tcp"] = "file"
    host: str = "plain"

    def __str__(self) -> str:
        return f"{self.fault}[{self.world_size} ranks, rank {self.who}, {self.store}, {self.host}]"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of a cell: `wrong` is empty when every rank did what it must; `seconds` is the slowest rank's."""

    wrong: list[str]
    seconds: float


def cells(world_sizes: tuple[int, ...] = (2, 3, 4, 8)) -> list[Cell]:
    """The whole matrix: main, a neighbour of it, and a leaf; faults that kill main also on a store that main hosts."""
    matrix = []
    for name, fault in FAULTS.items():
        for world_size in world_sizes:
            others = sorted({1, world_size - 1}) if fault.anyone else []
            for who in ([0] if fault.main else []) + others:
                matrix.append(Cell(name, world_size, who, fault.store))
                if "died" in fault.culprit and who == 0:
                    matrix.append(Cell(name, world_size, who, "tcp"))
                if world_size == 2 and fault.hosted:
                    matrix += [Cell(name, world_size, who, fault.store, host) for host in HOSTS if host != "plain"]
    return matrix


def _act(rank: int, cell: Cell) -> tuple[Any, str | None]:
    """A rank of a cell: the fault, then a look at what is left."""
    fault = FAULTS[cell.fault]
    error: BaseException | None = None
    result = None
    begun = time.monotonic()
    try:
        result = fault.run(Scene(rank, cell.world_size, cell.who, cell.host))
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
    outcomes = run_ranks(_act, cell.world_size, cell, timeout=HANG, store=cell.store, group_timeout=8.0)
    wrong = []
    seconds = 0.0
    for outcome in outcomes:
        fault = f"{_judge(cell, outcome)}"
        if fault:
            wrong.append(fault)
        if outcome.status == "returned":
            seconds = max(seconds, outcome.value[0][2])
    return Verdict(wrong, seconds)


def _judge(cell: Cell, outcome: Outcome) -> str:
    fault, rank = FAULTS[cell.fault], outcome.rank
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
