"""A yes or no that all ranks agree on: to stop, to skip, to save."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from syncstate.context import Context
from syncstate.errors import ConfigError
from syncstate.values.requests import Tally

__all__ = ["Decision"]

_WORDS = ("any", "all", "main", "majority")


class Decision:
    """True or false, the same on every rank from the same step on. Every rank has a vote in each sync.

    A rank votes true if its predicate says so, or if `request()` was called there since the sync before. A flag that
    one rank sets reaches the others only with a sync, so that no rank stops a step before another:

        stop = Decision()
        state.add("stop", stop, every=Every(steps=10))
        signal.signal(signal.SIGTERM, lambda *_: stop.request())
        ...
            engine.step(step, epoch)
            if state["stop"]:  # on all ranks in the same step
                break

    A decision is restored with a checkpoint: an early stop stays decided. Where the resumed run shall go on, as after
    a preemption, add it with `checkpoint=False`.

    Args:
        predicate: `predicate(ctx) -> bool`, run on every rank in each sync. None: only requests count. One that keeps
            something from call to call has `state_dict()` and `load_state_dict(d)`; checkpoints hold that of main,
            so it needs `reduce="main"`. `syncstate.values.plateau.Plateau` is one, for early stopping.
        reduce: Whose votes make it true: `"any"` rank's, `"all"` ranks', `"main"`'s, the `"majority"` (more than half),
            or the share of the ranks that is enough, above 0 and at most 1.
        stop_host: True: when it comes into force as true, the host is told to stop, on every rank: a Lightning
            `Trainer` (`should_stop`, which heeds `min_epochs` and `min_steps`), a Hugging Face `Trainer` or its control
            (`should_training_stop`), an `Accelerator` (`set_trigger`, for the loop's own `check_trigger`). A plain
            loop reads the value itself. A restored decision stops nothing.

    Raises:
        ConfigError: An unknown `reduce`, a predicate that cannot be called, or a state that `reduce` would lose.

    Example::

        state.add("stop", Decision(lambda ctx: time.time() > deadline, stop_host=True), every=Every(steps=100))
    """

    initial = False  # until the first sync, unless `state.add(..., initial=...)` says otherwise

    def __init__(
        self,
        predicate: Callable[[Context], bool] | None = None,
        *,
        reduce: str | float = "any",
        stop_host: bool = False,
    ) -> None:
        if predicate is not None and not callable(predicate):
            raise ConfigError(f"Decision: predicate must be a function predicate(ctx) -> bool, got {predicate!r}")
        if not isinstance(stop_host, bool):
            raise ConfigError(f"Decision: stop_host must be true or false, got {stop_host!r}")
        self.predicate = predicate
        self.rule = _checked_rule(reduce)
        self.stop_host = stop_host
        if self.rule != "main" and hasattr(predicate, "state_dict"):
            raise ConfigError(
                f"Decision: the predicate {predicate!r} has a state, of which checkpoints hold only main's, so that a "
                f'resumed run would decide otherwise with reduce={reduce!r}; give reduce="main"'
            )
        self._requests = 0  # made on this rank since the beginning
        self._tally = Tally()

    def request(self) -> None:
        """Vote true once, in the next sync that succeeds. Local; also from a signal handler or another thread."""
        self._requests += 1

    def collect(self, ctx: Context) -> tuple[bool, int]:
        """What the predicate says on this rank, and how many requests there have been."""
        return self.predicate is not None and _truth(self.predicate(ctx)), self._requests

    def compute(self, ctx: Context) -> bool:
        """What the votes of all ranks come to. Without an engine, which collects them, this process votes alone."""
        collected = [self.collect(ctx)] if ctx.collected is None else ctx.collected
        if not isinstance(collected, Sequence):
            return bool(collected)  # reduced already, as somebody asked for
        # Plain votes stand for ranks without requests, in tests of predicates.
        pairs = [one if isinstance(one, Sequence) else (bool(one), 0) for one in collected]
        requested = self._tally.new([made for _, made in pairs], ctx)
        votes = [said or new for (said, _), new in zip(pairs, requested, strict=True)]
        if self.rule == "main":
            return votes[ctx.rank]
        share = sum(votes) / len(votes)
        if self.rule in ("any", "majority"):
            return share > (0 if self.rule == "any" else 0.5)
        return share >= (1 if self.rule == "all" else float(self.rule))

    # Each is there only where there is something to do, so that the engine spends nothing on it.
    @property
    def apply(self) -> Callable[[bool, Context], None] | None:
        """Tells the host to stop; None unless `stop_host`."""
        return _stop if self.stop_host else None

    @property
    def state_dict(self) -> Callable[[], Mapping[str, Any]]:
        """The predicate's `state_dict`; missing where it has none."""
        return self.predicate.state_dict  # type: ignore[union-attr, no-any-return]

    @property
    def load_state_dict(self) -> Callable[[Mapping[str, Any]], None]:
        """The predicate's `load_state_dict`; missing where it has none."""
        return self.predicate.load_state_dict  # type: ignore[union-attr, no-any-return]


def _stop(value: bool, ctx: Context) -> None:
    """Tell the host of this rank to stop, in its own way."""
    host = ctx.host
    if not value or host is None:
        return
    control = getattr(host, "control", host)
    if hasattr(host, "should_stop"):
        host.should_stop = True
    elif hasattr(control, "should_training_stop"):
        control.should_training_stop = True
    elif hasattr(host, "set_trigger"):
        host.set_trigger()
    else:
        raise ConfigError(
            f"Decision: stop_host knows no way to stop a {type(host).__name__}; leave it out and read the value"
        )


def _truth(given: Any) -> bool:
    """A bool of Python, NumPy or torch; anything else was hardly meant as one."""
    answer = given.item() if hasattr(given, "item") else given
    if not isinstance(answer, bool):
        raise ConfigError(f"Decision: the predicate must return true or false, got {given!r}")
    return answer


def _checked_rule(reduce: Any) -> str | float:
    if isinstance(reduce, str) and str(reduce) in _WORDS:
        return str(reduce)
    number = isinstance(reduce, (int, float)) and not isinstance(reduce, bool)
    if not number or not 0 < reduce <= 1:
        raise ConfigError(
            f"Decision: reduce must be one of {', '.join(_WORDS)} or a share of the ranks above 0 and at most 1, "
            f"got {reduce!r}"
        )
    return float(reduce)
