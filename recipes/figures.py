"""The recipes' figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

__all__ = ["draw_curriculum"]


class Curves(Protocol):
    """What is drawn of one training."""

    thresholds: list[tuple[int, float]]
    losses: list[float]
    accuracies: list[float]


def draw_curriculum(path: Path, with_: Sequence[Curves], without: Sequence[Curves]) -> None:
    """Draw the threshold, the training loss and the accuracy with and without a curriculum.

    Args:
        path: The file, a PNG.
        with_, without: The trainings, one of each for every seed.
    """
    figure = Figure(figsize=(13, 4), layout="constrained")  # not pyplot's, which looks for a display
    left, middle, right = figure.subplots(1, 3)
    steps, thresholds = zip(*with_[0].thresholds, strict=True)
    left.step(steps, thresholds, where="post", color="tab:green", label="threshold in force")
    left.plot(steps, thresholds, ".", color="tab:green", label="refresh")
    left.set(title="Shared threshold", xlabel="optimizer steps", ylabel="largest loss (nats)", ylim=(0, None))
    left.legend()

    for runs, name, color in ((without, "without curriculum", "tab:orange"), (with_, "with curriculum", "tab:blue")):
        _band(middle, [run.losses for run in runs], name, color)
        _band(right, [run.accuracies for run in runs], name, color)
    middle.set(
        title="Training loss of the samples kept", xlabel="epochs", ylabel="cross-entropy (nats)", ylim=(0, None)
    )
    right.set(title="Accuracy on clean test data", xlabel="epochs", ylabel="digits that are recognised", ylim=(None, 1))
    right.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    for axes in (middle, right):
        title = f"mean and range of {len(with_)} seeds" if len(with_) > 1 else None
        axes.legend(title=title, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, frameon=False)
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _band(axes: Axes, curves: list[list[float]], name: str, color: str) -> None:
    """The mean over seeds as a line, the range of all seeds around it."""
    values = np.array(curves)
    epochs = np.arange(1, values.shape[1] + 1)
    axes.plot(epochs, values.mean(axis=0), color=color, label=name)
    axes.fill_between(epochs, values.min(axis=0), values.max(axis=0), color=color, alpha=0.2, linewidth=0)
