"""The recipe about replicas that part shows what was disturbed, what was found, and where the replicas end."""

import re
from pathlib import Path

import matplotlib.image
import pytest
from hydra import compose, initialize_config_dir
from hydra_project import run_in
from run_script import run_script

from syncstate import Every
from syncstate.config import build
from syncstate.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
RECIPE = str(ROOT / "recipes" / "periodic_resync.py")
CONFIGS = str(ROOT / "configs" / "experiment")
SHORT = (
    "training.steps=24",
    "syncstate.schedule.steps=5",
    "disturbances=[{step: 6, rank: 1, tensor: 2.weight, how: noise, size: 0.3},"
    "{step: 12, rank: 1, tensor: 4.bias, how: ulp, size: 1}]",
)


def run(folder: Path, *command: str) -> str:
    result = run_in(folder, RECIPE, *command, timeout=110)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


def found_in(output: str) -> list[tuple[int, str, str]]:
    """Step, tensor and ranks of what was found."""
    rows = re.findall(r"^(\d+) +([\w.]+) +([\d,]+) +[\d.e+-]+$", output.split("found at step")[-1], re.MULTILINE)
    return [(int(step), name, ranks) for step, name, ranks in rows]


def test_what_was_disturbed_is_found_and_repaired_and_drawn(tmp_path: Path) -> None:
    output = run(tmp_path, *SHORT)
    assert found_in(output) == [(10, "2.weight", "1"), (15, "4.bias", "1")]
    without, with_ = re.findall(r"^with.* ([\d.e+-]+)$", output, re.MULTILINE)
    assert float(without) > 0.1
    assert float(with_) == 0
    (figure,) = tmp_path.glob("outputs/periodic_resync/*/resync.png")
    assert f"figure: {figure}" in output
    pixels = matplotlib.image.imread(figure)
    assert pixels.shape[:2] == (552, 1800)
    assert len({tuple(pixel) for pixel in pixels[::4, ::4, :3].reshape(-1, 3).tolist()}) > 10


def test_a_majority_of_three_puts_main_right(tmp_path: Path) -> None:
    main, *others = run_script(
        tmp_path, RECIPE, *SHORT[:2], "ranks=3", "syncstate.resync.source=majority",
        "disturbances=[{step: 6, rank: 0, tensor: 0.bias, how: scale, size: 2}]", ranks=3,
    )  # fmt: skip
    assert [ended.returncode for ended in (main, *others)] == [0, 0, 0]
    assert found_in(main.stdout) == [(10, "0.bias", "0")]


@pytest.mark.parametrize("mode", ["check", "repair", "copy", "average"])
def test_the_mode_and_the_source_are_chosen_by_config(mode: str) -> None:
    overrides = [f"syncstate/resync={mode}", "syncstate/schedule@syncstate.resync.every=every_n_steps"]
    overrides.append("syncstate.resync.every.steps=3")
    with initialize_config_dir(CONFIGS, version_base="1.3"):
        _, options = build(compose("periodic_resync", overrides).syncstate)
    assert options["resync"].agreed() == {
        "every": str(Every(steps=3)),
        "mode": mode,
        "source": "main",
        "include": ["parameters", "buffers"],
        "exclude": [],
        "optimizers": 0,
        "bucket_bytes": 25 << 20,
        "on_drift": "warn",
    }


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["syncstate.resync.mode=fix"], "syncstate.resync: resync: mode must be 'check' or"),
        (["syncstate.resync.exclude=[3]"], "syncstate.resync: resync: exclude takes name patterns"),
        (["+syncstate.resync.evry=3"], "unknown key syncstate.resync.evry; allowed are _target_, module, every"),
        (["syncstate/resync=copy", "syncstate.resync.source=majority"], "mode must be 'check' or 'repair', got 'copy'"),
    ],
)
def test_an_impossible_setting_names_its_key(overrides: list[str], told: str) -> None:
    with initialize_config_dir(CONFIGS, version_base="1.3"), pytest.raises(Exception, match=re.escape(told)):
        build(compose("periodic_resync", overrides).syncstate)


def test_functions_classes_and_several_resyncs_come_from_configs() -> None:
    node = {
        "mode": "check",
        "every": {"epochs": 2},
        "exclude": ["head.*", {"_target_": "hydra.utils.get_class", "path": "torch.nn.BatchNorm2d"}],
        "on_drift": "builtins.print",
    }
    _, options = build({"schedule": {"steps": 40}, "resync": [node, {"mode": "average"}]})
    first, second = options["resync"]
    assert first.agreed()["exclude"] == ["head.*", "BatchNorm2d"]
    assert first.agreed()["on_drift"] == "callable"
    assert (first.every, second.every) == (Every(epochs=2), Every(steps=40))
    assert "resync" not in build({"resync": None})[1]
    with pytest.raises(TypeError, match=r"chosen with a slash: syncstate/resync=repair"):
        build({"resync": "repair"})
    with pytest.raises(ConfigError, match=r"^syncstate\.resync\.0: resync: mode must be"):
        build({"resync": [{"mode": 3}]})
