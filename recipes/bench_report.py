"""What the benchmark found: figures over all runs, as a table and as JSON. The picture is drawn in `bench_picture`."""

import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bench_lab import Reading
from bench_rows import ROWS

import syncstate

__all__ = ["Figure", "Machine", "combine", "table", "told", "write_json"]

_OTHERS = ("accelerate", "lightning", "pytorch-ignite")
_HEAD = ["", "ranks", "figure", "to reach", "", "runs", "quartiles", "time", "baseline"]
_SIDES = "<>>><<<>>"  # to which the columns are aligned


@dataclass(frozen=True)
class Figure:
    """One contender of one row on one number of ranks, over all runs.

    Attributes:
        row, contender: Which.
        unit: The row's.
        ranks: How many.
        value: Median of the runs.
        runs: The value of each run.
        low, high: Medians of the runs' quartiles.
        target: The largest value that is good enough; None for a peer.
        reached: Whether the value is; None for a peer.
        seconds, baseline: Medians of the runs' times of the operation and its baseline; None where nothing is timed.
    """

    row: str
    contender: str
    unit: str
    ranks: int
    value: float
    runs: list[float]
    low: float
    high: float
    target: float | None
    reached: bool | None
    seconds: float | None
    baseline: float | None


@dataclass(frozen=True)
class Machine:
    """Where and when it was measured.

    Attributes:
        load_before, load_after: Processes that ran or waited for a processor, in the minute before and at the end. The
            second holds the benchmark's own.
        seconds: What the measurement took.
    """

    date: str
    processors: int
    system: str
    python: str
    versions: dict[str, str]
    load_before: float
    load_after: float
    seconds: float

    @classmethod
    def here(cls, load_before: float, seconds: float) -> "Machine":
        """This machine, at the end of a measurement."""
        versions = {"syncstate": syncstate.__version__, "torch": torch.__version__}
        for name in _OTHERS:
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return cls(
            date=time.strftime("%Y-%m-%d %H:%M:%S"),
            processors=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            system=f"{platform.system()} {platform.machine()}",
            python=platform.python_version(),
            versions=versions,
            load_before=load_before,
            load_after=os.getloadavg()[0],
            seconds=seconds,
        )


def combine(row: str, ranks: int, runs: Sequence[Mapping[str, Sequence[Reading]]]) -> Iterator[Figure]:
    """The figures of a row over several runs.

    Args:
        row: Its name.
        ranks: On how many.
        runs: The readings of each run, by row; the same contenders in each.
    """
    for readings in zip(*(run[row] for run in runs), strict=True):
        value, target = statistics.median(reading.value for reading in readings), readings[0].target
        yield Figure(
            row=row,
            contender=readings[0].contender,
            unit=ROWS[row].unit,
            ranks=ranks,
            value=value,
            runs=[reading.value for reading in readings],
            low=statistics.median(reading.low for reading in readings),
            high=statistics.median(reading.high for reading in readings),
            target=target,
            reached=None if target is None else value <= target,
            seconds=_median([reading.seconds for reading in readings]),
            baseline=_median([reading.baseline for reading in readings]),
        )


def _median(numbers: Sequence[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return statistics.median(known) if known else None


def write_json(path: Path, figures: Sequence[Figure], machine: Machine, config: Any) -> None:
    """Write everything that was found, and how.

    Args:
        path: The file.
        figures: What was found.
        machine: Where.
        config: The composed config, as plain containers.
    """
    rows = {name: {"title": row.title, "unit": row.unit, "measured": row.measured} for name, row in ROWS.items()}
    content = {
        "machine": asdict(machine),
        "config": config,
        "rows": {name: rows[name] for name in config["rows"]},
        "figures": [asdict(figure) for figure in figures],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def told(number: float, unit: str) -> str:
    """A figure with its unit, to three digits."""
    if unit == "collectives":
        return f"{number:.0f}"
    digits = 2 if abs(number) < 10 else 1 if abs(number) < 100 else 0
    return f"{number:.{digits}f}" + {"x": "", "us": " us", "%": " %"}[unit]


def table(figures: Sequence[Figure], machine: Machine) -> str:
    """Everything as text, with the figures to reach beside the reached ones."""
    cells = [_HEAD]
    titles: dict[int, str] = {}
    for index, figure in enumerate(figures):
        if index == 0 or figure.row != figures[index - 1].row:
            titles[len(cells)] = f"{ROWS[figure.row].title} ({ROWS[figure.row].measured})"
        cells.append(_line(figure))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [f"syncstate and peers on {machine.processors} processors, gloo on loopback, {machine.date}"]
    for number, line in enumerate(cells):
        if number in titles:
            lines += ["", titles[number]]
        aligned = (f"{cell:{side}{w}}" for cell, side, w in zip(line, _SIDES, widths, strict=True))
        lines.append("  " + "  ".join(aligned).rstrip())
    ours = [figure for figure in figures if figure.reached is not None]
    reached = sum(figure.reached is True for figure in ours)
    lines += ["", f"{reached} of {len(ours)} figures reached; measured in {machine.seconds:.0f} s"]
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    lines.append(f"{machine.system}, python {machine.python}, {versions}")
    if machine.load_before > 0.5:
        lines.append(
            f"Other programs kept this machine busy (load {machine.load_before:.1f} before the start), and the ranks "
            "waited for processors: the figures are larger and vary more than on a quiet machine."
        )
    return "\n".join(lines)


def _line(figure: Figure) -> list[str]:
    unit = figure.unit
    counted = unit == "collectives"
    return [
        figure.contender,
        str(figure.ranks),
        told(figure.value, unit),
        "" if figure.target is None else f"<= {told(figure.target, unit)}",
        {None: "", True: "reached", False: "MISSED"}[figure.reached],
        "" if counted else _span(min(figure.runs), max(figure.runs), unit),
        "" if counted else _span(figure.low, figure.high, unit),
        "" if figure.seconds is None or unit == "us" else f"{1000 * figure.seconds:.3f} ms",
        "" if figure.baseline is None else f"{1000 * figure.baseline:.3f} ms",
    ]


def _span(low: float, high: float, unit: str) -> str:
    return f"{told(low, unit).split()[0]} to {told(high, unit)}"
