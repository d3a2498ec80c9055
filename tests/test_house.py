"""How the house is built: imports run one way, the public names are these, the package holds what it should."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import syncstate
from syncstate import errors

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# A module imports from the rows above its own, never from its own row or from below. Inside a folder it may.
ROWS = (
    {"errors", "configs"},
    {"schedule", "topology", "digest", "events", "spec"},
    {"wire"},
    {"context", "transport"},
    {"definition", "record", "observed"},
    {"handle"},
    {"state"},
    {"loop"},
    {"engine", "resync", "values", "samplers"},
    {"config", "hosts"},
    {"lightning", "accelerate", "transformers", "testing", "report"},
    {"cli"},
)
HEIGHT = {room: height for height, row in enumerate(ROWS) for room in row}

PUBLIC = {
    "syncstate": {"SharedState", "SyncEngine", "Every", "At", "Once", "Context", "TensorSpec", "ParameterResync"},
    "syncstate.values": {"Seed", "SampledIndices", "CurriculumThreshold", "Decision", "RunInfo"},
    "syncstate.samplers": {"SharedIndexSampler", "SharedBatchSampler", "SharedDataset"},
    "syncstate.errors": {
        *("SyncStateError", "ConfigError", "NotReady", "CodecError", "ComputeError"),
        *("MismatchError", "SyncTimeout", "PeerError", "DriftError"),
    },
    "syncstate.lightning": {"SyncStateCallback", "shared"},
    "syncstate.accelerate": {"SyncStateHook"},
    "syncstate.config": {"build"},
    "syncstate.wire": {"encode", "decode"},
}

OPTIONAL = {
    *("lightning", "pytorch_lightning", "accelerate", "transformers"),
    *("hydra", "omegaconf", "matplotlib", "sklearn"),
}


# ---------------------------------------------------------------- imports


def library() -> dict[str, str]:
    """The source of every module of the package, by its dotted name."""
    found = {}
    for folder, package in ((ROOT / "syncstate", "syncstate"), (ROOT / "configs", "syncstate.configs")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join([package, *parts]).removesuffix(".__init__")] = path.read_text()
    return found


def room_of(module: str) -> str | None:
    """The part of the house a module stands in: ``"wire"`` for ``"syncstate.wire.codec"``; None for the front door."""
    return module.split(".")[1] if "." in module else None


def imported(module: str, tree: ast.Module, modules: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """Line and full name of whatever of syncstate a module imports: inside functions and TYPE_CHECKING blocks too."""
    is_package = any(name.startswith(f"{module}.") for name in modules)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join([*above[: len(above) - node.level + 1], *([base] if base else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func).rsplit(".", 1)[-1]
            names = [str(node.args[0].value)] if called in ("import_module", "__import__") else []
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "syncstate")


def violations(modules: Mapping[str, str]) -> list[str]:
    found = []
    for module, source in modules.items():
        here = room_of(module)
        if here is None:
            continue  # the front door names everything, and loads it when it is first used
        if here not in HEIGHT:
            found.append(f"{module}: {here!r} has no place in ROWS yet")
            continue
        for line, name in imported(module, ast.parse(source), modules):
            there = room_of(name)
            if there not in HEIGHT and f"syncstate.{there}" not in modules:
                found.append(f"{module}:{line} imports {name}: import it from the module that defines it")
            elif there != here and HEIGHT.get(there or "", -1) >= HEIGHT[here]:
                found.append(f"{module}:{line} imports {name}, which does not stand above it")
    return found


def test_imports_run_one_way() -> None:
    assert violations(library()) == []


@pytest.mark.parametrize(
    "line",
    [
        "import syncstate.engine",
        "from syncstate.engine import SyncEngine",
        "from syncstate import engine",
        "from ..engine import SyncEngine",
        "from .. import engine",
        "if TYPE_CHECKING:\n    from syncstate.engine import SyncEngine",
        "def late():\n    from syncstate.engine import SyncEngine",
        "importlib.import_module('syncstate.engine')",
    ],
)
def test_an_import_from_below_is_found_however_it_is_written(line: str) -> None:
    house = {"syncstate": "", "syncstate.engine": "", "syncstate.wire": "", "syncstate.wire.codec": line}
    (found,) = violations(house)
    assert found.startswith("syncstate.wire.codec:")
    assert "syncstate.engine" in found


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("lightning", "from syncstate.accelerate import SyncStateHook"),
        ("definition", "from syncstate.record import Record"),
        ("errors", "from syncstate.topology import Topology"),
        ("engine", "from syncstate.config import build"),
        ("engine", "from syncstate import SharedState"),
        ("attic", ""),
    ],
)
def test_hosts_peers_the_front_door_and_new_rooms_are_no_exception(module: str, line: str) -> None:
    assert len(violations({"syncstate": "", f"syncstate.{module}": line})) == 1


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("syncstate", "from syncstate.engine import SyncEngine"),
        ("syncstate.engine", "from syncstate.wire.codec import encode"),
        ("syncstate.wire.codec", "from syncstate.wire.arrays import pack\nfrom .arrays import pack"),
        ("syncstate.accelerate", "from accelerate import Accelerator"),
    ],
)
def test_an_import_from_above_passes(module: str, line: str) -> None:
    assert violations({"syncstate": "", module: line, "syncstate.wire.arrays": ""}) == []


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("module", PUBLIC)
def test_the_public_names_are_these(module: str) -> None:
    loaded = importlib.import_module(module)
    assert sorted(loaded.__all__) == sorted(PUBLIC[module])
    assert [name for name in loaded.__all__ if not hasattr(loaded, name)] == []


def test_the_errors_are_this_tree() -> None:
    assert {name: tuple(base.__name__ for base in getattr(errors, name).__bases__) for name in errors.__all__} == {
        "SyncStateError": ("RuntimeError",),
        "ConfigError": ("SyncStateError", "ValueError"),
        "NotReady": ("SyncStateError", "KeyError"),
        "CodecError": ("SyncStateError", "TypeError"),
        "ComputeError": ("SyncStateError",),
        "MismatchError": ("SyncStateError",),
        "SyncTimeout": ("SyncStateError", "TimeoutError"),
        "PeerError": ("SyncStateError",),
        "DriftError": ("SyncStateError",),
    }


# ---------------------------------------------------------------- what an import costs


def loaded_by(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after the code ran."""
    ask = f"{code}\nimport json, sys\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_importing_the_package_loads_no_host_no_hydra_and_not_even_torch() -> None:
    assert loaded_by("import syncstate") & (OPTIONAL | {"torch"}) == set()


def test_using_every_name_of_the_package_loads_no_host_and_no_hydra() -> None:
    loaded = loaded_by("import syncstate, syncstate.values, syncstate.samplers\nfrom syncstate import *")
    assert "torch" in loaded
    assert loaded & OPTIONAL == set()


def test_importing_the_configs_loads_no_torch() -> None:
    assert "torch" not in loaded_by("import syncstate.configs")


# ---------------------------------------------------------------- the files


def test_no_file_of_the_package_exceeds_300_lines() -> None:
    lengths = {module: source.count("\n") for module, source in library().items()}
    assert {module: n for module, n in lengths.items() if n > 300} == {}


def test_the_package_never_asserts() -> None:
    found = [
        f"{module}:{node.lineno}"
        for module, source in library().items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assert)
    ]
    assert found == []


# ---------------------------------------------------------------- the package


def requirements() -> dict[str, set[str]]:
    """Names of the distributions that each extra asks for, ``""`` for the core; references to other extras left out."""
    project = PROJECT["project"]
    listed = {"": project["dependencies"], **project["optional-dependencies"]}
    names = {extra: {re.split(r"[\[<>=]", line)[0] for line in lines} for extra, lines in listed.items()}
    return {extra: found - {"syncstate"} for extra, found in names.items()}


def test_every_folder_with_modules_is_packaged() -> None:
    folders = {module for module in library() if any(other.startswith(f"{module}.") for other in library())}
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(folders | {"syncstate.configs", "hydra_plugins"})


def test_every_requirement_is_pinned() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==([\w.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert set().union(*requirements().values()) - set(pins) == set()
    # A local version would tie everybody to one build.
    assert [
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if "+" in line and line[0] != "#"
    ] == []


def test_the_version_is_the_same_everywhere() -> None:
    assert syncstate.__version__ == PROJECT["project"]["version"]
