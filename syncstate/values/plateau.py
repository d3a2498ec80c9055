"""When a metric no longer gets better: a predicate for `Decision`, for early stopping."""

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from syncstate.context import Context
from syncstate.errors import ConfigError
from syncstate.schedule import whole

__all__ = ["Plateau"]

_BEST = {"min": math.inf, "max": -math.inf}


class Plateau:
    """True once a metric has not become better in `patience` measurements in a row.

    Each call is a measurement, so give the value a schedule as frequent as the metric: `Every(epochs=1)` for one that
    is validated in each epoch. The metric is main's; reduce it over the ranks before, as Lightning does with
    `self.log(..., sync_dist=True)`.

    Args:
        metric: `metric(ctx)`, a number or a tensor of one, or None where there is none yet, which is no measurement.
            Or a name under which a Lightning `Trainer` has logged it.
        patience: Measurements without a better one that are enough.
        min_delta: By how much a measurement must be better to count.
        mode: `"min"` or `"max"`: which are better. NaN is never better.

    Raises:
        ConfigError: A metric that cannot be called, or a number out of range.

    Example::

        stop = Decision(Plateau("val_loss", patience=3), reduce="main", stop_host=True)
        state.add("stop", stop, every=Every(epochs=1))
    """

    def __init__(
        self,
        metric: str | Callable[[Context], Any],
        patience: int = 3,
        *,
        min_delta: float = 0.0,
        mode: str = "min",
    ) -> None:
        if not callable(metric) and not (isinstance(metric, str) and metric):
            raise ConfigError(f"Plateau: metric must be a function metric(ctx) or a name, got {metric!r}")
        if not _is_number(min_delta) or not 0 <= min_delta < math.inf:
            raise ConfigError(f"Plateau: min_delta must be a finite number of at least 0, got {min_delta!r}")
        if mode not in _BEST:
            raise ConfigError(f"Plateau: mode must be min or max, got {mode!r}")
        self.metric = metric
        self.patience = whole("Plateau", "patience", patience, 1)
        self.min_delta = float(min_delta)
        self.mode = str(mode)
        self.best = _BEST[self.mode]
        self.without = 0

    def __call__(self, ctx: Context) -> bool:
        """Measure; whether it has been long enough."""
        given = self.metric(ctx) if callable(self.metric) else _logged(self.metric, ctx.host)
        if given is not None:
            self._measure(given)
        return self.without >= self.patience

    def _measure(self, given: Any) -> None:
        number = given.item() if hasattr(given, "item") else given
        if not _is_number(number):
            raise ConfigError(f"Plateau: the metric must be a number or None, got {given!r}")
        better = self.best - number if self.mode == "min" else number - self.best
        if better > self.min_delta:
            self.best, self.without = float(number), 0
        else:
            self.without += 1

    def state_dict(self) -> dict[str, Any]:
        """The best measurement, and how many have passed since."""
        return {"best": self.best, "without": self.without}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from an earlier run."""
        self.best, self.without = float(state["best"]), int(state["without"])


def _is_number(given: Any) -> bool:
    return isinstance(given, Real) and not isinstance(given, bool)


def _logged(name: str, host: Any) -> Any:
    """What a Trainer has logged under a name; None if nothing yet."""
    metrics = getattr(host, "callback_metrics", None)
    if metrics is None:
        raise ConfigError(
            f"Plateau: metric={name!r} is a name, for which the host must be a Lightning Trainer, got "
            f"{type(host).__name__}; give a function metric(ctx)"
        )
    return metrics.get(name)
