"""The fault table: whatever goes wrong on one rank, every rank sees the right error, and soon.

A sample of the matrix that covers each fault, each world size, each position and both stores; `recipes/fault_matrix.py`
runs the whole of it.
"""

import pytest
from faults import FAULTS, Cell, cells, play

_MATRIX = cells()
_SLOW = {"sticks_in_a_training_collective"}  # waits for the timeout of the default group
_HOSTED = {"compute_raises", "apply_raises", "config_differs", "is_killed", "leaves_early", "fails_outside"}


def _sample() -> list[Cell]:
    """For each fault one plain cell, walking through world sizes and positions; hosts; deaths on a store that dies."""
    chosen = []
    for number, name in enumerate(FAULTS):
        store = FAULTS[name].store
        mine = [cell for cell in _MATRIX if cell.fault == name and cell.store == store and cell.host == "plain"]
        if name in _SLOW:
            mine = [cell for cell in mine if cell.world_size == 2]
        chosen.append(mine[(number * 5) % len(mine)])
    hosted = [cell for cell in _MATRIX if cell.host != "plain" and cell.fault in _HOSTED]
    return (
        chosen + hosted + [cell for cell in _MATRIX if cell.store != FAULTS[cell.fault].store and cell.world_size == 4]
    )


@pytest.mark.parametrize("cell", _sample(), ids=str)
def test_every_rank_sees_the_error_that_the_table_promises(cell: Cell) -> None:
    verdict = play(cell)
    assert not verdict.wrong, "\n".join(verdict.wrong)


def test_the_sample_covers_every_world_size_and_main_a_neighbour_and_a_leaf() -> None:
    sample = _sample()
    assert {cell.world_size for cell in sample} == {2, 3, 4, 8}
    assert any(cell.who == 0 for cell in sample)
    assert any(cell.who == 1 and cell.world_size > 2 for cell in sample)
    assert any(cell.who == cell.world_size - 1 > 1 for cell in sample)
    assert {cell.fault for cell in sample} == set(FAULTS)


def test_a_fault_that_did_not_happen_is_found() -> None:
    cell = Cell("computes_long_with_its_own_timeout", 2, 0)
    promised = FAULTS[cell.fault]
    try:
        FAULTS[cell.fault] = type(promised)(promised.run, "SyncTimeout", ("SyncTimeout",), anyone=False)
        # The ranks look the table up in their own copy of it, the judge in this one.
        assert len(play(cell).wrong) == 2
    finally:
        FAULTS[cell.fault] = promised
