"""Break an engine on purpose and see what every rank makes of it: the whole matrix, or random faults for a while.

python recipes/fault_matrix.py                              # fault x rank x world size x mode, as a table
python recipes/fault_matrix.py --modes async --hosts lightning accelerate
python recipes/fault_matrix.py --faults is_killed --repeat 200
python recipes/fault_matrix.py --minutes 20 --seed 7        # random cells; the seed that it prints repeats them
"""

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from fault_hosts import HOSTS, preload
from faults import FAULTS, MODES, Cell, cells, play


def main() -> int:
    """Run what the command line asks for; the exit status says whether anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="+", choices=sorted(FAULTS), help="only these")
    parser.add_argument("--world-sizes", nargs="+", type=int, default=[2, 3, 4, 8])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="blocking values, asynchronous ones")
    parser.add_argument("--hosts", nargs="+", choices=HOSTS, default=list(HOSTS), help="what trains")
    parser.add_argument("--repeat", type=int, default=1, help="how often each cell is run")
    parser.add_argument("--minutes", type=float, help="run random cells for so long instead of the whole matrix once")
    parser.add_argument("--seed", type=int, default=None, help="of the random cells; drawn and printed if not given")
    given = parser.parse_args()
    matrix = [
        cell
        for cell in cells(tuple(given.world_sizes), tuple(given.modes))
        if (not given.faults or cell.fault in given.faults) and cell.host in given.hosts
    ]
    preload({cell.host for cell in matrix})
    if given.minutes is not None:
        return _at_random(matrix, given.minutes, given.seed)
    return _matrix(matrix, given.repeat)


def _matrix(matrix: list[Cell], repeat: int) -> int:
    print(
        f"{'fault':38} {'mode':>8} {'ranks':>5} {'rank':>4} {'store':>5} {'host':>10} {'runs':>4} {'wrong':>5} "
        f"{'slowest rank':>12}"
    )
    failed = 0
    for cell in matrix:
        verdicts = [play(cell) for _ in range(repeat)]
        wrong = [line for verdict in verdicts for line in verdict.wrong]
        slowest = max(verdict.seconds for verdict in verdicts)
        bad = sum(bool(verdict.wrong) for verdict in verdicts)
        failed += bad
        print(
            f"{cell.fault:38} {cell.mode:>8} {cell.world_size:5} {cell.who:4} {cell.store:>5} {cell.host:>10} "
            f"{repeat:4} {bad:5} {slowest:10.2f} s",
            flush=True,
        )
        for line in wrong[:5]:
            print("    " + line.replace("\n", "\n    "))
    print(f"{len(matrix) * repeat} runs, {failed} wrong")
    return int(failed > 0)


def _at_random(matrix: list[Cell], minutes: float, seed: int | None) -> int:
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    draw = random.Random(seed)
    print(f"seed {seed}", flush=True)
    runs: Counter[str] = Counter()
    bad = 0
    end = time.monotonic() + 60.0 * minutes
    while time.monotonic() < end:
        cell = draw.choice(matrix)
        verdict = play(cell)
        runs[f"{cell.fault:38} {cell.mode:>8}"] += 1
        if verdict.wrong:
            bad += 1
            print(f"run {runs.total()}: {cell}")
            for line in verdict.wrong:
                print("    " + line.replace("\n", "\n    "), flush=True)
    for fault, count in sorted(runs.items()):
        print(f"{fault} {count:5}")
    print(f"seed {seed}: {runs.total()} runs, {bad} wrong")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
