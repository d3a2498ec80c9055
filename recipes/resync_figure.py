"""The figure of the recipe about resyncs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["draw"]

_FLOOR = 1e-13  # where a difference of nothing is drawn, on an axis that has no zero


class Report(Protocol):
    """A resync that found something."""

    @property
    def step(self) -> int: ...


class Run(Protocol):
    """What is drawn of one training."""

    steps: list[int]
    losses: list[list[float]]
    apart: list[float]

    @property
    def reports(self) -> Sequence[Report]: ...


def draw(path: Path, with_: Run, without: Run, disturbances: Sequence[tuple[int, int, str]], mode: str) -> None:
    """Draw how good each rank's replica is, and how far the replicas are apart, with and without resyncs.

    Args:
        path: The file, a PNG.
        with_, without: The trainings.
        disturbances: Step, rank and tensor of each.
        mode: What the resyncs did.
    """
    figure = Figure(figsize=(15, 4.6), layout="constrained")  # not pyplot's, which looks for a display
    left, middle, right = figure.subplots(1, 3)
    top = 1.1 * max(max(map(max, run.losses)) for run in (with_, without))
    bottom = 0.9 * min(min(map(min, run.losses)) for run in (with_, without))
    for axes, run, title in (
        (left, without, "without resync"),
        (middle, with_, f"with resync ({mode})"),
    ):
        for rank, losses in enumerate(np.array(run.losses).T):
            axes.plot(run.steps, losses, color=f"C{rank}", label=f"replica of rank {rank}", linewidth=1.6 - 0.4 * rank)
        axes.set(title=f"Test loss {title}", xlabel="optimizer steps", ylabel="cross-entropy (nats)")
        axes.set(yscale="log", ylim=(bottom, top))
    for run, name, color in ((without, "without resync", "tab:red"), (with_, f"with resync ({mode})", "tab:green")):
        right.plot(run.steps, np.maximum(run.apart, _FLOOR), color=color, label=name, drawstyle="steps-post")
    right.set(title="Replicas apart", xlabel="optimizer steps", ylabel="largest difference of a parameter")
    right.set(yscale="log", ylim=(_FLOOR / 3, None))
    ticks = [tick for tick in 10.0 ** np.arange(-11, 4, 2) if tick <= 10 * max(*without.apart, *with_.apart, 1e-5)]
    right.set_yticks([_FLOOR, *ticks], ["equal", *(f"$10^{{{round(np.log10(tick))}}}$" for tick in ticks)])
    right.minorticks_off()
    for axes in (left, middle, right):
        _mark(axes, [step for step, *_ in disturbances], "disturbed", "black", ":")
    for axes in (middle, right):
        _mark(axes, [report.step for report in with_.reports], "found", "tab:green", "--")
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _mark(axes: Axes, steps: Sequence[int], name: str, color: str, style: str) -> None:
    for number, step in enumerate(steps):
        axes.axvline(step, color=color, linestyle=style, linewidth=1, alpha=0.7, label=None if number else name)
