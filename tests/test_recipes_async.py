"""The recipes train with asynchronous syncs, and with schedules that the main process announces, by config alone."""

from pathlib import Path

from run_script import run_script
from test_recipes import ACCELERATE, LIGHTNING, SHORT, tables


def test_what_the_lightning_recipe_shares_asynchronously_comes_into_force_two_steps_later(tmp_path: Path) -> None:
    transport = ("syncstate/transport=async", "syncstate.transport.lag=2")
    main, other = run_script(tmp_path, LIGHTNING, "seeds=[0]", "trainer.max_epochs=3", *transport, ranks=2)
    assert (main.returncode, other.returncode) == (0, 0)
    found = tables(main.stdout)
    # Refreshed at steps 0, 10, 20, 30; seeds and indices of an epoch are waited for.
    assert list(found) == [f"step {step}, refresh {n}: all ranks agree" for step, n in ((0, 1), (12, 2), (32, 4))]
    assert [rows[0] for rows in found.values()] == [rows[1] for rows in found.values()]
    assert [rows[0][2] for rows in found.values()] == ["8 (v1)", "7.65 (v2)", "6.95 (v4)"]
    assert "agreed on all values after 8 of 8 refreshes" in main.stdout


def test_the_accelerate_recipe_takes_a_schedule_that_main_announces(tmp_path: Path) -> None:
    overrides = ("syncstate/schedule=overhead", "syncstate/transport=async", "syncstate.transport.lag=2")
    short = [setting for setting in SHORT[ACCELERATE] if "schedule" not in setting]
    main, other = run_script(tmp_path, ACCELERATE, *short, *overrides, ranks=2)
    assert (main.returncode, other.returncode) == (0, 0)
    found = tables(main.stdout)
    assert list(found) == ["after the last step: all ranks agree"]
    (rows,) = found.values()
    assert len(rows) == 2
    assert rows[0] == rows[1]
