"""The figures that syncstate wants to reach, measured on this machine, beside what people use today.

Ranks are processes of this machine. They talk over loopback, by gloo; for the rows named `link` they are on two hosts
with a slow link between them, which are network namespaces: where the user may not make those, the rows are left out.

Each run starts fresh ranks, measures every row, and takes the median over its repetitions of the slowest rank's time.
Ratios are taken within a run; the figure is the median of the runs. What else the machine does goes into the numbers,
so the load is written beside them.

    python recipes/benchmark.py
    python recipes/benchmark.py world_sizes=[2] 'rows=[scalars,idle]' peers=false
"""

import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import hydra
from bench_lab import Lab, Reading, Settings
from bench_link import Link, Trace, run_link
from bench_link_rows import draw_link, link_readings
from bench_namespaces import NoLink
from bench_picture import draw
from bench_ranks import run_on_ranks
from bench_report import Figure, Machine, combine, table, write_json
from bench_rows import ROWS
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

__all__ = ["check", "main", "measure"]

_PRELOAD = ["syncstate", "lightning.pytorch", "accelerate", "ignite.distributed"]


def measure(rows: list[str], settings: Settings) -> dict[str, list[Reading]]:
    """One run, on one rank: the readings of each row."""
    lab, found = Lab(settings), {}
    for name in rows:
        take = ROWS[name].measure
        if take is not None:
            take(lab)
            found[name] = lab.take()
    return found


def measure_all(cfg: DictConfig, folder: Path) -> list[Figure]:
    """All runs on all numbers of ranks; a slow change of the machine's load meets every number of ranks.

    Args:
        cfg: The config.
        folder: For the picture of the steps over the slow link.
    """
    settings = Settings(**{key: cfg[key] for key in Settings.__dataclass_fields__})
    rows = [name for name in cfg.rows if ROWS[name].measure is not None]
    linked = [name for name in cfg.rows if name not in rows]
    sizes = list(cfg.world_sizes) if rows else []
    readings: dict[int, list[dict[str, list[Reading]]]] = {ranks: [] for ranks in sizes}
    over_link: list[dict[str, list[Reading]]] = []
    for run in range(cfg.runs):
        for ranks in sizes:
            begun = time.monotonic()
            found = run_on_ranks(
                measure, ranks, rows, settings, threads=cfg.threads, timeout=cfg.timeout, preload=_PRELOAD
            )
            readings[ranks].append(found)
            print(f"run {run + 1} of {cfg.runs}, {ranks} ranks: {time.monotonic() - begun:.0f} s", flush=True)
        begun = time.monotonic()
        traces = _link_traces(cfg) if linked else None
        if traces is None:
            linked = []
            continue
        over_link.append(link_readings(traces))
        draw_link(folder / "benchmark_link.png", traces, Link(**cfg.link))
        print(f"run {run + 1} of {cfg.runs}, two hosts: {time.monotonic() - begun:.0f} s", flush=True)
    figures = [figure for name in rows for ranks in sizes for figure in combine(name, ranks, readings[ranks])]
    return figures + [figure for name in linked for figure in combine(name, 2, over_link)]


def _link_traces(cfg: DictConfig) -> list[Trace] | None:
    """One run on two hosts; None where they cannot be had."""
    try:
        return run_link(Link(**cfg.link), cfg.timeout)
    except NoLink as error:
        print(f"  what needs a slow link is left out: {error}", flush=True)
        return None


def check(cfg: DictConfig) -> None:
    """End on an impossible setting, before any rank is started."""
    if "RANK" in os.environ:
        sys.exit("the benchmark starts its ranks itself: run it with python, not with torchrun or another launcher")
    unknown = [name for name in cfg.rows if name not in ROWS]
    if unknown:
        sys.exit(f"rows: no row {unknown[0]!r}; there are {', '.join(ROWS)}")
    least = {"runs": 1, "repetitions": 1, "peer_repetitions": 1, "blocks": 1, "calls": 1, "threads": 1}
    for key, smallest in least.items():
        if cfg[key] < smallest:
            sys.exit(f"{key} must be at least {smallest}, got {cfg[key]}")
    _check_all("world_sizes", cfg.world_sizes, 2)
    _check_all("small and indices", (cfg.small, cfg.indices), 1)
    _check_all("link: steps, rounds and lag", (cfg.link.steps, cfg.link.rounds, cfg.link.lag), 1)
    _check_all("link.nbytes", (cfg.link.nbytes,), 4)


def _check_all(key: str, numbers: Iterable[int], smallest: int) -> None:
    for number in numbers:
        if number < smallest:
            sys.exit(f"{key} must be at least {smallest}, got {number}")


@hydra.main(version_base="1.3", config_path="../configs/experiment", config_name="benchmark")
def main(cfg: DictConfig) -> None:
    """Measure, then write the table, the JSON file and the pictures into the run directory."""
    check(cfg)
    folder = Path(HydraConfig.get().runtime.output_dir)
    load = os.getloadavg()[0]
    begun = time.monotonic()
    figures = measure_all(cfg, folder)
    machine = Machine.here(load, time.monotonic() - begun)
    text = table(figures, machine)
    print(f"\n{text}\n")
    (folder / "benchmark.txt").write_text(text + "\n")
    write_json(folder / "benchmark.json", figures, machine, OmegaConf.to_container(cfg, resolve=True))
    if figures:
        draw(folder / "benchmark.png", figures, machine)
    print(f"written to {folder}: {', '.join(sorted(path.name for path in folder.glob('benchmark*.*')))}")


if __name__ == "__main__":
    main()
