"""The Accelerate hook under the launchers that people start their scripts with."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "accelerate_train.py"
LAUNCHERS = {
    # Without MPI, `accelerate launch --cpu` starts one process, whatever --num_processes says. This way it starts them
    # all, and the script itself asks for the CPU.
    "accelerate launch": [
        *("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
    ],
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
}


def launch(launcher: str, folder: Path) -> list[dict[str, Any]]:
    """Run the script; returns what its processes reported, by rank."""
    root = str(SCRIPT.parents[2])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        "HF_HOME": str(folder / "huggingface"),  # no configuration of this machine's user
        "OMP_NUM_THREADS": "1",
        "RES_OPTIONS": "timeout:1 attempts:1",
    }
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, "-m", *LAUNCHERS[launcher], str(SCRIPT), str(folder)]
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            code = process.wait(timeout=90)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert code == 0, log.read_text()
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launched_processes_hold_what_main_computed(launcher: str, tmp_path: Path) -> None:
    reports = launch(launcher, tmp_path)
    assert [(report.pop("rank"), report.pop("world_size")) for report in reports] == [(0, 2), (1, 2)]
    # Seven batches an epoch and three a step: steps end with batches 3, 6, 7, 10, 13 and 14.
    assert [report.pop("computed") for report in reports] == [[0, 2, 4, 6], []]
    assert reports[0] == reports[1]
    assert reports[0]["thresholds"] == [0.0] * 5 + [0.2] * 4 + [0.4] * 4 + [0.6]
    assert reports[0]["seen"] == [6, 1]
    assert reports[0]["wrapped"] == "DistributedDataParallel"
    assert [len(set(sampled)) for sampled in reports[0]["sampled"]] == [8, 8]
