"""The benchmark's picture: one panel for each unit, one line for each contender, the figures to reach as marks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from bench_report import Figure, Machine, told
from bench_rows import ROWS

matplotlib.use("Agg")  # to a file, also where there is no display
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

__all__ = ["draw"]

_LABELS = {"x": "ratio", "%": "percent", "us": "microseconds", "collectives": "number"}
_COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown")
_INCHES = 0.3  # of a line
_SPREAD = 0.5  # of a line, over which the numbers of ranks are spread


def draw(path: Path, figures: Sequence[Figure], machine: Machine) -> None:
    """Draw all figures.

    Args:
        path: The file, a PNG.
        figures: What was found.
        machine: Where.
    """
    groups = {unit: [figure for figure in figures if figure.unit == unit] for unit in _LABELS}
    panels = [_Panel(unit, found) for unit, found in groups.items() if found]
    sizes = sorted({figure.ranks for figure in figures})
    colors = {ranks: _COLORS[index % len(_COLORS)] for index, ranks in enumerate(sizes)}
    heights = [panel.lines for panel in panels]
    picture, axes = plt.subplots(
        len(panels), 1, figsize=(10.5, _INCHES * sum(heights) + 0.8 * len(panels) + 1.0),
        height_ratios=heights, squeeze=False, layout="constrained",
    )  # fmt: skip
    for number, (panel, place) in enumerate(zip(panels, axes[:, 0], strict=True)):
        panel.draw(place, colors, head=number == 0)
    _legend(picture, sizes, colors, any(figure.reached is False for figure in figures))
    picture.suptitle(
        f"syncstate {machine.versions['syncstate']} and peers, gloo on loopback, torch {machine.versions['torch']}, "
        f"{machine.processors} processors (load {machine.load_before:.1f} before the start)",
        fontsize=11,
    )
    picture.savefig(path, dpi=120)
    plt.close(picture)


class _Panel:
    """All rows of one unit, one above the other.

    Args:
        unit: The rows' unit.
        figures: In the order in which they are drawn.
    """

    def __init__(self, unit: str, figures: Sequence[Figure]) -> None:
        self.unit = unit
        self.figures = figures
        self.heads: dict[str, int] = {}  # row -> line
        self.places: dict[tuple[str, str], int] = {}  # row and contender -> line
        self.lines = 0
        for figure in figures:
            if figure.row not in self.heads:
                self.heads[figure.row] = self.lines
                self.lines += 1
            if (figure.row, figure.contender) not in self.places:
                self.places[figure.row, figure.contender] = self.lines
                self.lines += 1

    def draw(self, axes: Axes, colors: dict[int, str], *, head: bool) -> None:
        """Draw the panel; `head` asks for the titles of the columns beside it."""
        axes.set(ylim=(self.lines - 0.4, -0.6), xlabel=_LABELS[self.unit])
        axes.set_yticks(list(self.places.values()), [contender for _, contender in self.places])
        axes.tick_params(axis="y", length=0)
        ours = {(figure.row, figure.contender) for figure in self.figures if figure.target is not None}
        for place, label in zip(self.places, axes.get_yticklabels(), strict=True):
            label.set_fontweight("bold" if place in ours else "normal")
        axes.spines[["top", "right", "left"]].set_visible(False)
        for row, line in self.heads.items():
            across = axes.get_yaxis_transform()
            axes.text(-0.005, line, ROWS[row].title, transform=across,
                      ha="right", va="center", fontsize=11, color="0.35", style="italic")  # fmt: skip
            axes.text(0.01, line, ROWS[row].measured, transform=across, va="center", fontsize=9, color="0.45")
        for line in self.places.values():
            axes.axhspan(line - 0.42, line + 0.42, color="0.96", zorder=0)
        self._scale(axes)
        sizes = list(colors)
        for figure in self.figures:
            self._point(axes, figure, sizes.index(figure.ranks), len(sizes), colors[figure.ranks])
        if head:
            for index, ranks in enumerate(sizes):
                _beside(axes, index, 0, f"{ranks} ranks", colors[ranks])

    def _scale(self, axes: Axes) -> None:
        """A logarithmic axis where the numbers span more than one order of magnitude."""
        marks = [number for f in self.figures for number in (f.value, *f.runs, f.target) if number]
        low, high = min(marks), max(marks)
        if 0 < low < high / 10:
            axes.set_xscale("log")
            axes.set_xlim(low / 1.4, high * 1.4)
            axes.xaxis.set_major_locator(LogLocator(subs=(1,) if high > 1000 * low else (1, 2, 5)))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:g}"))
            axes.xaxis.set_minor_locator(NullLocator())
        else:
            axes.set_xlim(min(0, 1.15 * low), 1.15 * high)
        if self.unit == "x":
            axes.axvline(1, color="0.6", linewidth=0.8, zorder=1)
        axes.grid(axis="x", color="0.88", linewidth=0.6)
        axes.set_axisbelow(True)

    def _point(self, axes: Axes, figure: Figure, index: int, count: int, color: str) -> None:
        """The median of the runs, the range of the runs, and the figure to reach."""
        step = _SPREAD / count
        y = self.places[figure.row, figure.contender] + (index - (count - 1) / 2) * step
        axes.plot([min(figure.runs), max(figure.runs)], [y, y], color=color, linewidth=1.6, alpha=0.6, zorder=2)
        inside = "white" if figure.reached is False else color
        axes.plot(figure.value, y, "o", color=color, markerfacecolor=inside, markersize=5.5, zorder=4)
        if figure.target is not None:
            half = step / 2 + 0.08
            axes.plot([figure.target] * 2, [y - half, y + half], color="black", linewidth=1.8, zorder=3)
        _beside(axes, index, self.places[figure.row, figure.contender], told(figure.value, self.unit), color)


def _beside(axes: Axes, column: int, line: int, text: str, color: str) -> None:
    """Write into a column right of the panel, as wide whatever the panel's width is."""
    axes.annotate(
        text, (1, line), xytext=(55 + 55 * column, 0), xycoords=axes.get_yaxis_transform(), textcoords="offset points",
        ha="right", va="center", color=color, fontsize=9, annotation_clip=False,
    )  # fmt: skip


def _legend(picture: Any, sizes: Sequence[int], colors: dict[int, str], missed: bool) -> None:
    dot = {"marker": "o", "markersize": 5.5}
    keys = [_key(f"{n} ranks: median and range of the runs", color=colors[n], linewidth=1.6, **dot) for n in sizes]
    if missed:
        keys.append(_key("not reached", color="0.3", markerfacecolor="white", linestyle="", **dot))
    keys.append(_key("figure to reach", color="black", marker="|", markersize=11, markeredgewidth=1.8, linestyle=""))
    picture.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False, fontsize=9)


def _key(label: str, **style: Any) -> Line2D:
    return Line2D([], [], label=label, **style)
