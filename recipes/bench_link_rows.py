"""What was measured over the slow link: as readings of the benchmark's rows, and as a picture of the steps."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from bench_lab import Reading, quartiles
from bench_link import ASYNCHRONOUS, BARE, BLOCKING, NONE, Block, Link, Trace
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["draw_link", "link_readings"]

_COLORS = {NONE: "0.45", BLOCKING: "tab:orange", ASYNCHRONOUS: "tab:blue", BARE: "tab:green"}
_WIDTHS = {NONE: 1.0, BLOCKING: 1.4, ASYNCHRONOUS: 1.8, BARE: 1.0}


def link_readings(traces: Sequence[Trace]) -> dict[str, list[Reading]]:
    """The readings of one run, by row. Ways are compared within a round, and the median of the rounds is told.

    Args:
        traces: What each rank has measured.
    """
    steps = {kind: _rounds([getattr(trace, kind) for trace in traces], "seconds") for kind in ("idle", "busy")}
    waits = _rounds([trace.idle for trace in traces], "waits")
    wire = [max(trace.wire for trace in traces)] * len(waits[NONE])
    idle, busy = steps["idle"], steps["busy"]
    return {
        "link": [
            _reading("syncstate, idle processor", *_added(idle, ASYNCHRONOUS), 100, target=5.0),
            _reading(f"{BARE}, idle processor", *_added(idle, BARE), 100),
            _reading("syncstate, computing", *_added(busy, ASYNCHRONOUS), 100),
            _reading(f"{BARE}, computing", *_added(busy, BARE), 100),
        ],
        "link_wait": [
            _reading("syncstate", waits[ASYNCHRONOUS], wire, 100, target=5.0),
            _reading(BARE, waits[BARE], wire, 100),
        ],
        "link_busy": [
            _reading("syncstate", busy[ASYNCHRONOUS], busy[BARE], target=1.1),
            _reading("syncstate, blocking", busy[BLOCKING], busy[BARE]),
            _reading(NONE, busy[NONE], busy[BARE]),
        ],
    }


def _rounds(ranks: Sequence[Sequence[Block]], part: str) -> dict[str, list[float]]:
    """Seconds a step by way, one number for each round: the mean of its steps on the slowest rank."""
    found: dict[str, list[float]] = {}
    for blocks in zip(*ranks, strict=True):
        slowest = max(statistics.mean(getattr(block, part)) for block in blocks)
        found.setdefault(blocks[0].way, []).append(slowest)
    return found


def _added(steps: Mapping[str, Sequence[float]], way: str) -> tuple[list[float], list[float]]:
    """What a way adds to a step in each round, and what a blocking sync adds."""
    mine, none, blocking = steps[way], steps[NONE], steps[BLOCKING]
    return [a - b for a, b in zip(mine, none, strict=True)], [a - b for a, b in zip(blocking, none, strict=True)]


def _reading(
    contender: str, mine: Sequence[float], over: Sequence[float], scale: float = 1, target: float | None = None
) -> Reading:
    low, middle, high = quartiles([scale * a / (b or 1e-9) for a, b in zip(mine, over, strict=True)])
    return Reading(contender, middle, low, high, target, statistics.median(mine), statistics.median(over))


def draw_link(path: Path, traces: Sequence[Trace], link: Link) -> None:
    """Draw the time of each step, of all ways one over the other, with an idle and with a computing processor.

    Args:
        path: The file, a PNG.
        traces: What each rank has measured in one run.
        link: What was measured.
    """
    figure = Figure(figsize=(12, 5), layout="constrained")  # not pyplot's, which looks for a display
    titles = {"idle": "Steps in which the processor is idle", "busy": "Steps in which it computes"}
    for axes, (kind, title) in zip(figure.subplots(1, 2, sharey=True), titles.items(), strict=True):
        _panel(axes, [getattr(trace, kind) for trace in traces])
        axes.set(title=title, xlabel="steps")
    figure.axes[0].set(ylabel="ms, the slowest rank", ylim=(0, None))
    figure.suptitle(
        f"{link.nbytes / 1000:g} KB shared after each step over {link.mbit:g} Mbit/s "
        f"({1000 * max(trace.wire for trace in traces):.1f} ms on the wire), lag {link.lag}",
        fontsize=11,
    )
    figure.savefig(path, dpi=120)


def _panel(axes: Axes, ranks: Sequence[Sequence[Block]]) -> None:
    lines: dict[str, list[float]] = {}
    for blocks in zip(*ranks, strict=True):
        slowest = 1000 * np.max([block.seconds for block in blocks], axis=0)
        lines.setdefault(blocks[0].way, []).extend(slowest.tolist())
    for way in (BLOCKING, BARE, ASYNCHRONOUS, NONE):
        middle = statistics.median(lines[way])
        axes.plot(lines[way], color=_COLORS[way], linewidth=_WIDTHS[way], label=f"{way}: {middle:.1f} ms")
    axes.grid(alpha=0.3)
    axes.legend(title="median", loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, frameon=False)
