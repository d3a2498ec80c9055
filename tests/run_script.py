"""Run a script in processes that have its libraries loaded already, which is most of what a fresh interpreter does.

For tests of what a script does. How it is started, and by whom, is for tests that start it: `hydra_project.run_in`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path

from ranks import returned, run_ranks

__all__ = ["Ended", "run_script"]

_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclasses.dataclass(frozen=True)
class Ended:
    """What a script left.

    Attributes:
        returncode: 0, or what it gave to `sys.exit`.
        stdout: What it printed.
        stderr: The end of what it wrote to stderr.
    """

    returncode: int
    stdout: str
    stderr: str


def run_script(
    folder: Path, script: str | Path, *arguments: str, ranks: int = 0, env: Mapping[str, str] | None = None
) -> list[Ended]:
    """Run a script as ``python script arguments...`` would in this folder, syncstate not yet imported.

    Args:
        folder: Where it runs.
        script: Its file.
        *arguments: What follows it on the command line.
        ranks: As a launcher starts this many of it, which sets RANK and the like and RUN_ID, and has no store; 0: as a
            user starts one, without any of this.
        env: Further variables.
    """
    alone = dict.fromkeys(_LAUNCHED)
    variables = {**(alone if ranks == 0 else {"RUN_ID": "run"}), **(env or {})}
    args = (str(folder), str(script), arguments)
    outcomes = run_ranks(_run, ranks or 1, *args, init=False, env=variables, timeout=100.0)
    ends = zip(returned(outcomes), outcomes, strict=True)
    return [Ended(code, stdout, outcome.stderr) for (code, stdout), outcome in ends]


def _run(rank: int, folder: str, script: str, arguments: tuple[str, ...]) -> tuple[int, str]:
    os.chdir(folder)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    for name in [name for name in sys.modules if name.split(".")[0] == "syncstate"]:
        del sys.modules[name]  # what the script leaves out of its imports is missing
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            runpy.run_path(script, run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return code, printed.getvalue()
