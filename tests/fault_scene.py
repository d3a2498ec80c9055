"""What the rows of the fault table are made of: the scene on one rank, and the line that says what must come of it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from fault_hosts import HOSTS, Driver

from syncstate import Context, Every, SharedState

__all__ = ["BOOM", "LAG", "LAST", "LATE", "MODES", "PACE", "SHORT", "STEP", "Fault", "Mode", "Scene", "main_fails"]

Mode = Literal["blocking", "async"]

STEP = 2  # where the fault happens
LAST = 5  # where training ends, and a lag later where there is one
LAG = 2  # of asynchronous values
PACE = 0.4  # seconds a step, where news has to travel while ranks that miss nothing go on
SHORT = 1.5  # seconds, the timeout of the engines that must run into it
LATE = SHORT + 2.5  # seconds after which the others have given up, a roll-call of a second included
BOOM = ("ValueError: boom", "Traceback")  # what is told of a source that raises
MODES: tuple[Mode, ...] = ("blocking", "async")


class Scene:
    """What a fault has to work with on one rank.

    Args:
        rank, world_size: This rank.
        who: The rank that misbehaves.
        host: What trains.
        mode: Whether training waits for the values.

    Attributes:
        here: Whether this is the rank that misbehaves.
        lag: Steps from the computation of a value to the step from which it is in force.
    """

    def __init__(self, rank: int, world_size: int, who: int, host: str, mode: Mode) -> None:
        self.host = host
        self.rank = rank
        self.world_size = world_size
        self.who = who
        self.here = rank == who
        self.asynchronous = mode == "async"
        self.lag = LAG if self.asynchronous else 0

    @property
    def last(self) -> int:
        """The step at which training ends."""
        return LAST + self.lag

    def value(self, ctx: Context) -> Any:
        """The source of the shared value: the step, as a number."""
        return ctx.step

    def driver(self, *, source: Any = None, every: int = 1, options: Any = None, **add: Any) -> Driver:
        """Training with one value, `x`."""
        state = SharedState()
        state.add("x", self.value if source is None else source, every=Every(steps=every), **add)
        return self.drive(state, **(options or {}))

    def drive(self, state: SharedState, **options: Any) -> Driver:
        """Training with these values, in the mode of the scene."""
        mode: dict[str, Any] = {"async_op": True, "lag": self.lag} if self.asynchronous else {}
        return HOSTS[self.host](state, {"timeout": 20.0, **mode, **options}, self.lag)

    def train(
        self,
        driver: Driver,
        at_step: Callable[[], object] = lambda: None,
        last: int | None = None,
        pace: float = 0.0,
        lingers: bool = False,
    ) -> Any:
        """Train; the fault happens before the sync of `STEP`.

        Args:
            driver: What trains.
            at_step: The fault.
            last: The step at which training ends.
            pace: Seconds that each step after the fault takes.
            lingers: Whether asynchronous training goes on for some seconds, where there are ranks that miss nothing:
                they hear of it in the first step a second later.
        """
        if lingers and self.asynchronous and self.world_size > 2:
            last, pace = STEP + round(2 * LATE / PACE), PACE
        driver.train(self.last if last is None else last, STEP, at_step, pace)
        return driver.state["x"]

    def goes_on(self, source: Callable[[Context], Any], fails: int = STEP, **add: Any) -> Any:
        """Train with a sync that fails, the one of a step; a plain loop goes on, and must find old and later values."""
        driver = self.driver(source=source, **add)
        if self.host != "plain":
            try:
                return self.train(driver)
            except Exception as raised:
                if driver.reached != fails + self.lag:
                    raise AssertionError(f"an error at step {driver.reached}") from raised
                raise
        error: BaseException | None = None
        with driver.engine as engine:
            for step in range(self.last + 1):
                try:
                    engine.step(step)
                except Exception as raised:
                    if step != fails + self.lag:
                        raise AssertionError(f"an error at step {step}") from raised
                    error = raised
                computed = max(step - self.lag, 0)
                wanted = fails - 1 if computed == fails else computed
                if torch.as_tensor(engine.state["x"]).reshape(-1)[0] != wanted:
                    raise AssertionError(f"{engine.state['x']!r} is in force at step {step}, not {wanted}")
        if error is None:
            raise AssertionError("no error")
        raise error


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
        modes: With which values it can happen: those that training waits for, asynchronous ones.
        in_async: What else holds for asynchronous values: attributes of this class.
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
    modes: tuple[Mode, ...] = MODES
    in_async: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def within(self, mode: Mode) -> "Fault":
        """The row in one mode."""
        return dataclasses.replace(self, in_async={}, **self.in_async) if mode == "async" else self


def main_fails(run: Callable[[Scene], Any], *says: str, modes: tuple[Mode, ...] = MODES) -> Fault:
    """A row in which main cannot compute or encode `x`: all ranks raise the same error, and go on."""
    return Fault(run, "ComputeError", ("ComputeError",), ("'x'", *says), anyone=False, modes=modes)
