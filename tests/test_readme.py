"""The code in the README runs as it stands, and what the README says about files, options and names is true."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import returned, run_ranks
from run_script import run_script

import syncstate.errors

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
LAST_LINES = {  # what the script prints last, by a name that only its block holds
    "Seed(base=1234)": r"\d+ 1\.0 Info\(version=5, computed_at=8, applied_at=8, nbytes=\d+\)",
    "SyncStateCallback": r"0\.37 4",
    "SyncStateHook": r"\[(\d+, ){7}\d+\]",
    "class Doubling": r"",
    "out_of_data": r"",
    "SharedBatchSampler": r"\[\['sh', 'va'\], \['in', 'wor'\]\]",
    "ParameterResync(model": r"False \[\]",
}


def written(name: str, folder: Path) -> Path:
    """The script that holds the name, in a file."""
    (block,) = [block for block in BLOCKS if name in block]
    script = folder / "script.py"
    script.write_text(block, encoding="utf-8")
    return script


@pytest.mark.parametrize("name", LAST_LINES)
def test_a_script_of_the_readme_runs_as_it_stands_and_prints_what_it_should(name: str, tmp_path: Path) -> None:
    (done,) = run_script(tmp_path, written(name, tmp_path))
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(LAST_LINES[name], done.stdout.strip().rsplit("\n", 1)[-1]), done.stdout


def test_the_first_script_of_the_readme_needs_nothing_but_an_interpreter(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(written("Seed(base=1234)", tmp_path))],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(LAST_LINES["Seed(base=1234)"], done.stdout.strip().rsplit("\n", 1)[-1]), done.stdout


def test_every_script_of_the_readme_is_run() -> None:
    assert len(BLOCKS) == len(LAST_LINES)
    assert all(any(name in block for name in LAST_LINES) for block in BLOCKS)


def stop_together(rank: int, block: str) -> int:
    names: dict[str, int] = {}
    batches = [1.0] * (3 + 2 * rank)  # rank 0 runs out first
    exec(block.replace("[1.0, 2.0, 3.0]", repr(batches)), names)
    return names["step"]


def test_the_ranks_of_the_readme_stop_together_when_one_has_run_out_of_data() -> None:
    (block,) = [block for block in BLOCKS if "out_of_data" in block]
    assert returned(run_ranks(stop_together, 3, block)) == [4, 4, 4]


def test_every_error_that_a_user_can_see_stands_in_the_table_of_the_readme_and_exists() -> None:
    table = README[README.index("## When something goes wrong") :]
    named = set(re.findall(r"`(\w*(?:Error|Timeout|NotReady)\w*)`", table))
    others = {"MismatchError", "SyncTimeout", "PeerError", "DriftError"}
    assert named == {"NotReady", "ConfigError", "ComputeError", *others}
    assert named <= set(syncstate.errors.__all__)


def test_every_file_and_make_target_that_the_readme_names_is_there() -> None:
    for path in re.findall(r"\brecipes/\w+\.py", README):
        assert (ROOT / path).is_file(), path
    targets = set(re.findall(r"^make (\w+)", README, re.MULTILINE))
    rules = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets == {"demo", "test"}
    assert all(re.search(rf"^{target}:", rules, re.MULTILINE) for target in targets)
