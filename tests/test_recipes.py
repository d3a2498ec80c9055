"""The recipes do what they say, in small variants of themselves: as a user starts them, with every launcher."""

import re
import sys
from pathlib import Path
from subprocess import CompletedProcess

import matplotlib.image
import pytest
from hydra import compose, initialize_config_dir
from hydra_project import run_in
from run_script import run_script

from syncstate import At, Context, Every, Once
from syncstate.config import build

ROOT = Path(__file__).resolve().parents[1]
LIGHTNING = str(ROOT / "recipes" / "lightning_curriculum.py")
ACCELERATE = str(ROOT / "recipes" / "accelerate_curriculum.py")
CONFIGS = str(ROOT / "configs" / "experiment")
# On two ranks 11 optimizer steps with the digits, 14 with the text.
SHORT = {
    LIGHTNING: ("seeds=[0]", "trainer.max_epochs=1"),
    ACCELERATE: (
        "data.characters=60000",
        "data.batch_size=32",
        "epochs=1",
        "length.last=32",
        "syncstate.schedule.steps=3",
    ),
}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def run(folder: Path, *command: str) -> CompletedProcess[str]:
    """Start it as a user does: in interpreters that have everything to import yet."""
    return run_in(folder, *command, timeout=110)


def succeeded(result: CompletedProcess[str]) -> str:
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


def tables(output: str) -> dict[str, list[list[str]]]:
    """For each table in the output the line above it, and its rows by rank, without the rank."""
    found = {}
    for title, rows in re.findall(r"(.*)\n  rank .*\n((?:  \d+ .*\n)+)", output):
        cells = [re.split(r"\s{2,}", row.strip()) for row in rows.splitlines()]
        assert [int(row[0]) for row in cells] == list(range(len(cells)))
        found[title] = [row[1:] for row in cells]
    return found


def one_directory(folder: Path) -> Path:
    """The only run directory below the folder, written by one rank only."""
    (made,) = (folder / "outputs").glob("*/*")
    assert [path.parent for path in folder.rglob(".hydra")] == [made]
    assert len(list(folder.rglob("*.log"))) == 1
    return made


@pytest.fixture(scope="module")
def lightning_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a whole run, of one seed."""
    folder = tmp_path_factory.mktemp("lightning")
    return folder, succeeded(run(folder, LIGHTNING, "seeds=[0]", "syncstate.schedule.steps=7"))


def test_the_lightning_recipe_shows_that_the_ranks_agree(lightning_run: tuple[Path, str]) -> None:
    _, output = lightning_run
    found = tables(output)
    shown = zip((0, 7, 21, 49, 105, 217), (1, 2, 4, 8, 16, 32), strict=True)
    assert list(found) == [f"step {step}, refresh {count}: all ranks agree" for step, count in shown]
    assert all(len(rows) == 2 and rows[0] == rows[1] for rows in found.values())
    thresholds = [rows[0][2] for rows in found.values()]
    assert thresholds == ["8 (v1)", "7.755 (v2)", "7.265 (v4)", "6.285 (v8)", "4.325 (v16)", "1 (v32)"]
    # The seed and the indices turn with the epoch, every 11 steps.
    versions = [[cell.split()[-1] for cell in rows[0][:2]] for rows in found.values()]
    assert versions == [[f"(v{epoch})"] * 2 for epoch in (1, 1, 2, 5, 10, 20)]
    # Of two trainings, at steps 0, 7, ... 434.
    assert "agreed on all values after 126 of 126 refreshes" in output


def test_with_the_curriculum_wrong_labels_do_less_harm(lightning_run: tuple[Path, str]) -> None:
    _, output = lightning_run
    row = re.search(r"^0 +([\d.]+)% +([\d.]+)% +\+([\d.]+) points$", output, re.MULTILINE)
    assert row is not None, output
    without, with_, gain = map(float, row.groups())
    assert with_ > 90
    assert gain == pytest.approx(with_ - without, abs=0.11)
    assert gain > 5


def test_the_lightning_recipe_draws_its_figure_into_its_one_directory(lightning_run: tuple[Path, str]) -> None:
    folder, output = lightning_run
    figure = one_directory(folder) / "curriculum.png"
    assert f"figure: {figure}" in output
    pixels = matplotlib.image.imread(figure)
    assert pixels.shape[:2] == (480, 1560)
    assert len({tuple(pixel) for pixel in pixels[::4, ::4, :3].reshape(-1, 3).tolist()}) > 10


def test_the_limit_of_the_lightning_recipe_follows_the_losses_of_all_ranks_by_config(tmp_path: Path) -> None:
    main, other = run_script(
        tmp_path, LIGHTNING, "seeds=[0]", "trainer.max_epochs=7", "syncstate/values=[seed,indices,quantile_limit]",
        "syncstate.values.curriculum.source.warmup=15", ranks=2,
    )  # fmt: skip
    assert (main.returncode, other.returncode, other.stdout) == (0, 0, "")
    output = main.stdout
    found = tables(output)
    assert list(found) == [
        f"step {step}, refresh {count}: all ranks agree" for step, count in ((0, 1), (10, 2), (30, 4), (70, 8))
    ]
    assert all(len(rows) == 2 and rows[0] == rows[1] for rows in found.values())
    first, second, *later = [float(rows[0][2].split()[0]) for rows in found.values()]
    assert first == second == float("inf")
    assert all(0 < limit < 5 for limit in later)
    assert "agreed on all values after 16 of 16 refreshes" in output


def test_a_sweep_of_the_lightning_recipe_runs_each_job_once(tmp_path: Path) -> None:
    output = succeeded(run(tmp_path, LIGHTNING, "--multirun", *SHORT[LIGHTNING], "syncstate.schedule.steps=5,10"))
    assert output.count("Launching 2 jobs") == 1
    assert [int(n) for n in re.findall(r"after (\d+) of \1 refreshes", output)] == [6, 4]
    (sweep,) = (tmp_path / "multirun" / "lightning_curriculum").iterdir()
    assert sorted(path.relative_to(sweep).as_posix() for path in sweep.rglob("*.png")) == [
        "0/curriculum.png",
        "1/curriculum.png",
    ]
    assert not (tmp_path / "outputs").exists()


def test_a_wrong_setting_ends_the_recipe_before_training(tmp_path: Path) -> None:
    said = {
        "syncstate.schedule.steps=abc": ["syncstate.schedule.steps", "'abc'"],
        "syncstate.schedule.steps=0": ["syncstate.schedule.steps=0", "at least 1"],
        "syncstate.schedule.stepz=5": ["syncstate.schedule.stepz", "EveryNSteps"],
    }
    for override, texts in said.items():
        (result,) = run_script(tmp_path, LIGHTNING, override)
        assert result.returncode == 1
        assert all(text in result.stderr for text in texts), result.stderr
        assert "ProcessRaisedException" not in result.stderr  # no rank was started
        assert not result.stdout


@pytest.mark.parametrize("recipe", [LIGHTNING, ACCELERATE], ids=["lightning", "accelerate"])
def test_ranks_that_torchrun_starts_at_different_seconds_share_one_directory(tmp_path: Path, recipe: str) -> None:
    late = '[ "$RANK" = 1 ] && sleep 1.5; exec "$0" "$@"'
    command = (*TORCHRUN, "--no-python", "sh", "-c", late, sys.executable, recipe)
    output = succeeded(run(tmp_path, *command, *SHORT[recipe]))
    found = tables(output)
    assert found
    assert all(len(rows) == 2 and rows[0] == rows[1] for rows in found.values())
    one_directory(tmp_path)


def test_the_accelerate_recipe_learns_on_two_ranks_and_shows_one_progress_bar(tmp_path: Path) -> None:
    launch = ("-m", "accelerate.commands.launch", "--num_processes", "2", "--cpu")
    result = run(tmp_path, *launch, ACCELERATE, *SHORT[ACCELERATE])
    output = succeeded(result)
    # Refreshes at 0, 3, 6, 9 and 12; there the cosine and the line have gone 12 % of their ways.
    assert tables(output) == {"after the last step: all ranks agree": [["1.48244 (v5)", "17 (v5)"]] * 2}
    before, after = map(float, re.findall(r"([\d.]+) bits per character before, ([\d.]+) after", output)[0])
    assert 6.5 < before < 7.5  # log2 of 128 symbols
    assert after < before - 0.5
    assert len(re.findall(r"0%\|[^\r\n]*\b0/\d+", result.stderr)) == 1
    assert (one_directory(tmp_path) / "model.pt").exists()


def test_the_accelerate_recipe_runs_in_one_process(tmp_path: Path) -> None:
    (ended,) = run_script(tmp_path, ACCELERATE, *SHORT[ACCELERATE])
    assert ended.returncode == 0, ended.stderr
    assert len(tables(ended.stdout)["after the last step: all ranks agree"]) == 1
    one_directory(tmp_path)


@pytest.mark.parametrize("recipe", ["lightning_curriculum", "accelerate_curriculum"])
@pytest.mark.parametrize(
    ("overrides", "every"),
    [
        ([], Every(steps=10)),
        (["syncstate.schedule.steps=50"], Every(steps=50)),
        (["syncstate/schedule=every_n_epochs", "syncstate.schedule.epochs=2"], Every(epochs=2)),
        (["syncstate/schedule=at_steps", "syncstate.schedule.steps=[0,5]"], At([0, 5])),
        (["syncstate/schedule=once"], Once()),
        (["syncstate/transport=blocking", "syncstate/resync=none", "syncstate.transport.timeout=9"], Every(steps=10)),
    ],
)
def test_groups_and_keys_are_overridden_in_a_recipe(recipe: str, overrides: list[str], every: object) -> None:
    with initialize_config_dir(CONFIGS, version_base="1.3"):
        _, options = build(compose(recipe, overrides).syncstate)
    assert options["every"] == every
    assert options["timeout"] == (9 if len(overrides) == 3 else 300)


@pytest.mark.parametrize("recipe", ["lightning_curriculum", "accelerate_curriculum"])
def test_a_value_of_a_recipe_gets_a_schedule_of_its_own(recipe: str) -> None:
    overrides = [
        "syncstate/schedule@syncstate.values.seed.every=every_n_steps",
        "syncstate.values.seed.every.steps=7",
        f"syncstate/values=[seed{',indices,falling_limit' if recipe == 'lightning_curriculum' else ''}]",
    ]
    with initialize_config_dir(CONFIGS, version_base="1.3"):
        state, _ = build(compose(recipe, overrides).syncstate)
    assert state.definition("seed").every == Every(steps=7)


def test_another_curriculum_leaves_nothing_of_the_first() -> None:
    sources = {}
    for option in ("falling_limit", "quantile_limit"):
        with initialize_config_dir(CONFIGS, version_base="1.3"):
            node = compose("lightning_curriculum", [f"syncstate/values=[seed,indices,{option}]"]).syncstate
        sources[option] = build(node)[0].definition("curriculum").source
    falling, quantile = sources.values()
    assert [falling.compute(Context(step=step)) for step in (0, 100, 200)] == [8.0, 4.5, 1.0]
    assert (falling.collect, quantile.collect, quantile.quantile, quantile.warmup) == (None, "observed", 0.6, 40)
