"""The fault table: whatever goes wrong on one rank, every rank sees the right error, and soon.

A sample of the matrix that covers each fault, each world size, each position, both modes and both stores;
`recipes/fault_matrix.py` runs the whole of it.
"""

import pytest
from fault_hosts import HOSTS, preload
from faults import FAULTS, MODES, Cell, Mode, cells, play

preload(HOSTS)

_MATRIX = cells()
# These take one mode each, in turn.
_ONCE = (
    # A timeout has to pass, which takes seconds.
    *("comes_late", "is_stopped", "store_host_is_stopped", "is_stopped_in_a_body", "sticks_in_a_training_collective"),
    *("computes_too_long", "computes_long_with_its_own_timeout", "collects_too_long", "is_interrupted_while_it_waits"),
    *("syncs_out_of_order", "is_killed_while_connecting"),
    # It is over before the first sync, so that the mode makes no difference.
    *("schedule_differs", "name_differs", "spec_differs", "frame_size_differs", "config_differs", "structure_differs"),
    *("fails_while_connecting", "fails_before_the_start", "cannot_open"),
    # Another row is much like it.
    *("breaks_its_tensor_spec", "exits", "scatters_too_few_items", "is_killed_in_the_engine", "an_item_cannot_travel"),
    *("apply_of_an_item_raises", "is_killed_while_it_collects", "is_killed_in_a_scatter", "structure_changes"),
    *("is_slow", "forks_and_exits"),
)
_HOSTED = {
    "blocking": {"compute_raises", "apply_raises", "config_differs", "is_killed", "leaves_early", "fails_outside"},
    "async": {"compute_raises", "fails_outside", "collect_raises"},
}
# Deaths of main that take the store along.
_LOST: dict[str, tuple[Mode, ...]] = {
    "is_killed": MODES,
    "is_killed_in_a_body": ("blocking",),
    "is_killed_while_connecting": ("blocking",),
    "is_killed_in_a_scatter": ("async",),
}


def _modes(name: str) -> tuple[Mode, ...]:
    return (MODES[(_ONCE.index(name) + 1) % 2],) if name in _ONCE else FAULTS[name].modes


def _sample() -> list[Cell]:
    """For each fault plain cells, walking through world sizes and positions; hosts; deaths on a store that dies."""
    chosen = []
    for number, name in enumerate(FAULTS):
        for mode in _modes(name):
            mine = [
                cell
                for cell in _MATRIX
                if (cell.fault, cell.mode, cell.store, cell.host) == (name, mode, FAULTS[name].store, "plain")
            ]
            if name == "sticks_in_a_training_collective":
                mine = [cell for cell in mine if cell.world_size == 2]
            chosen.append(mine[(number * 5 + MODES.index(mode)) % len(mine)])
    hosted = [cell for cell in _MATRIX if cell.host != "plain" and cell.fault in _HOSTED[cell.mode]]
    lost = [cell for cell in _MATRIX if cell.store != FAULTS[cell.fault].store and cell.world_size == 4]
    return chosen + hosted + [cell for cell in lost if cell.mode in _LOST.get(cell.fault, ())]


@pytest.mark.parametrize("cell", _sample(), ids=str)
def test_every_rank_sees_the_error_that_the_table_promises(cell: Cell) -> None:
    verdict = play(cell)
    assert not verdict.wrong, "\n".join(verdict.wrong)


def test_the_sample_covers_every_world_size_and_main_a_neighbour_and_a_leaf_in_both_modes() -> None:
    sample = _sample()
    for mode in MODES:
        mine = [cell for cell in sample if cell.mode == mode]
        assert {cell.world_size for cell in mine} == {2, 3, 4, 8}
        assert {cell.host for cell in mine} == set(HOSTS)
        assert any(cell.who == 0 for cell in mine)
        assert any(cell.who == 1 and cell.world_size > 2 for cell in mine)
        assert any(cell.who == cell.world_size - 1 > 1 for cell in mine)
    assert {cell.fault for cell in sample} == set(FAULTS)


@pytest.mark.parametrize("mode", MODES)
def test_a_fault_that_did_not_happen_is_found(mode: Mode) -> None:
    cell = Cell("is_slow", 2, 0, mode=mode)
    promised = FAULTS[cell.fault]
    try:
        FAULTS[cell.fault] = type(promised)(promised.run, "SyncTimeout", ("SyncTimeout",))
        # The ranks look the table up in their own copy of it, the judge in this one.
        assert len(play(cell).wrong) == 2
    finally:
        FAULTS[cell.fault] = promised
