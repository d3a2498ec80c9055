"""What the environment of a rank is like changes nothing: hash seed, locale, time zone, -O, torch's debug level."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from syncstate.context import generator

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests" / "scripts" / "odd_rank.py"
ODD = (
    {"PYTHONHASHSEED": "0", "TZ": "UTC", "LC_ALL": "C"},
    {"PYTHONHASHSEED": "12345", "TZ": "Asia/Kathmandu", "LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "utf-8"},
    {"PYTHONHASHSEED": "random", "TZ": "America/St_Johns", "LC_ALL": "POSIX", "LANG": "C"},
)


@pytest.mark.parametrize("optimized", [False, True], ids=["plain", "python -O and DETAIL"])
def test_ranks_with_different_hash_seeds_locales_and_time_zones_hold_the_same(optimized: bool, tmp_path: Path) -> None:
    ranks = []
    for rank, odd in enumerate(ODD):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **odd}
        if optimized:
            environment["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        command = [sys.executable, *(["-O"] if optimized else []), str(SCRIPT)]
        arguments = [str(rank), str(len(ODD)), str(tmp_path / "store")]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ranks.append(subprocess.Popen([*command, *arguments], env=environment, text=True, **pipes))  # type: ignore[call-overload]
    printed = []
    try:
        for process in ranks:
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
            printed.append(ast.literal_eval(out))
    finally:
        for process in ranks:
            process.kill()
            process.communicate()  # closes its pipes
    assert printed[0] == printed[1] == printed[2]
    _, text, path, number, order, draw, debug = printed[0]
    assert text == "\u017e\ud83d \u00e9".encode("utf-8", "surrogatepass")
    assert path == "a/\u00e9".encode()
    assert number == 2.1
    assert order == ["k3", "k1", "k2"]
    assert draw == generator(0, "words", 3).integers(1 << 40, size=3).tolist()
    assert debug is not optimized
    assert np.dtype("<i8").itemsize == 8
