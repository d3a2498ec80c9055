"""The configs reach a project by installing the wheel, and by nothing else.

The wheel is built from a copy of the sources and installed into a new environment. A `.pth` file there names the folder
in which Hydra and torch are installed, so that they need no second installation. Python does not read `.pth` files in a
folder that a `.pth` file named, so an editable installation of this repository stays unseen.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import hydra
import pytest
from hydra_project import write_project
from omegaconf import DictConfig, OmegaConf

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "syncstate", "configs", "hydra_plugins")

COMPOSE_ALL = """
import json, sys
from hydra import compose, initialize
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
import syncstate

composed = []
with initialize(config_path=None, version_base="1.3"):
    loader = GlobalHydra.instance().config_loader()
    groups = ["syncstate"]
    while groups:
        group = groups.pop()
        groups += [f"{group}/{name}" for name in loader.list_groups(group)]
        for option in loader.get_group_options(group):
            name = f"[{option}]" if group.endswith("values") else option
            chosen = ["+syncstate=default"] + ([f"{group}={name}"] if group != "syncstate" else [])
            OmegaConf.to_yaml(compose(overrides=chosen), resolve=True)
            composed.append(f"{group}/{option}")
    node = compose(overrides=["+callbacks=syncstate"])
    composed.append(node.callbacks.syncstate._target_)
print(json.dumps({"file": syncstate.__file__, "composed": composed, "torch": "torch" in sys.modules}))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command without this session's PYTHONPATH; its stdout, or a failure with all that it said."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, tree / name)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", tree, cwd=tree)
    (built,) = (tree / "dist").glob("syncstate-*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment into which the wheel was installed."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=True, symlinks=True)
    python = home / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=home)
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip()
    (Path(packages) / "tests.pth").write_text(f"{Path(hydra.__file__).parents[1]}\n")
    return python


def test_the_wheel_holds_every_config_and_a_namespace_for_hydra(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    configs = {f"syncstate/configs/{path.relative_to(ROOT / 'configs')}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert configs <= names
    assert "syncstate/configs/__init__.py" in names
    assert [name for name in names if name.startswith("hydra_plugins/")] == ["hydra_plugins/syncstate_searchpath.py"]
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"syncstate", "hydra_plugins"}


def test_every_option_composes_after_installation_without_torch(python: Path, tmp_path: Path) -> None:
    told = json.loads(run(python, "-c", COMPOSE_ALL, cwd=tmp_path))
    assert Path(told["file"]).is_relative_to(python.parents[1])
    folder = ROOT / "configs"
    options = [str(path.relative_to(folder).with_suffix("")) for path in folder.glob("syncstate/**/*.yaml")]
    assert sorted(told["composed"]) == sorted([*options, "syncstate.lightning.SyncStateCallback.from_config"])
    assert told["torch"] is False


def test_a_lightning_project_finds_the_callback_after_installation(python: Path, tmp_path: Path) -> None:
    project = write_project(tmp_path)
    chosen = ("callbacks=[default,syncstate]", "syncstate/values=[seed,hard]")
    cfg = OmegaConf.create(run(python, "src/train.py", "--cfg", "job", *chosen, cwd=project))
    assert isinstance(cfg, DictConfig)
    assert list(cfg["callbacks"]) == ["model_checkpoint", "early_stopping", "syncstate"]
    assert list(cfg["syncstate"]["values"]) == ["seed", "hard"]
