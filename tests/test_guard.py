"""The global random generators are what they were, byte for byte, whatever a source did to them."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import returned, run_ranks

from syncstate import Context, Every, SharedState, SyncEngine
from syncstate.errors import ComputeError
from syncstate.loop.guard import RandomGuard

Action = Callable[[], object]

DRAWS: dict[str, Action] = {
    "nothing": lambda: None,
    "python": random.random,
    "python gauss": lambda: random.gauss(0, 1),
    "python bits": lambda: random.getrandbits(4000),
    "python shuffle": lambda: random.shuffle(list(range(100))),
    "numpy": np.random.rand,
    "numpy normal": np.random.standard_normal,
    "numpy normals": lambda: np.random.standard_normal(3),
    "numpy permutation": lambda: np.random.permutation(700),
    "numpy binomial": lambda: np.random.binomial(10, 0.3),
    "numpy bytes": lambda: np.random.bytes(3),
    "torch": lambda: torch.rand(3),
    "torch normal": lambda: torch.randn(1),
    "torch many": lambda: torch.randn(700),
    "torch double": lambda: torch.randn((), dtype=torch.float64),
}
SEEDS: dict[str, Action] = {
    "python seed": lambda: random.seed(5),
    "python system seed": lambda: random.seed(None),
    "numpy seed": lambda: np.random.seed(5),
    "numpy system seed": lambda: np.random.seed(None),
    "torch seed": lambda: torch.manual_seed(5),
    "torch system seed": lambda: torch.seed(),
}
ACTIONS = DRAWS | SEEDS


class Bookmark:
    """Puts the generators back to a state that was kept earlier, as a block that isolates its randomness does."""

    def __init__(self) -> None:
        self.kept = states()

    def keep(self) -> None:
        self.kept = states()

    def go_back(self) -> None:
        random.setstate(self.kept[0])
        np.random.set_state(self.kept[1])
        torch.set_rng_state(self.kept[2])


def states() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()


def in_bytes() -> bytes:
    """The states as bytes; numpy's second normal draw counts only where there is one."""
    python, numpy, of_torch = states()
    words = numpy["state"].get("key", np.array([])).tobytes()
    rest = {**numpy, "gauss": numpy["gauss"] if numpy["has_gauss"] else 0}
    rest["state"] = {name: value for name, value in numpy["state"].items() if name != "key"}
    return repr((python, words, rest)).encode() + of_torch.numpy().tobytes()


@pytest.fixture(autouse=True)
def generators_are_put_back() -> Any:
    bookmark = Bookmark()
    yield
    bookmark.go_back()


@pytest.mark.parametrize("before", DRAWS)
def test_a_guard_puts_back_what_one_source_did(before: str) -> None:
    for name, act in ACTIONS.items():
        guard = RandomGuard()
        random.seed(1), np.random.seed(2), torch.manual_seed(3)
        for _ in range(2):
            DRAWS[before]()
            kept = in_bytes()
            with guard:
                act()
            assert in_bytes() == kept, name


names = st.lists(st.sampled_from([*ACTIONS, "keep", "go back"]), max_size=4)


@settings(max_examples=300)
@given(st.lists(st.tuples(names, names, st.booleans()), max_size=6))
def test_a_guard_puts_back_what_any_row_of_sources_did(rounds: list[tuple[list[str], list[str], bool]]) -> None:
    """Between the sources the training loop draws too, and goes back to states that it kept."""
    guard, bookmark = RandomGuard(), Bookmark()
    actions = {**ACTIONS, "keep": bookmark.keep, "go back": bookmark.go_back}
    for outside, inside, early in rounds:
        for name in outside:
            actions[name]()
        kept = in_bytes()
        with guard:
            for name in inside:
                actions[name]()
            if early:
                guard.restore()
                assert in_bytes() == kept
        assert in_bytes() == kept


def test_numpys_second_normal_draw_survives_a_state_that_differs_in_nothing_else() -> None:
    guard = RandomGuard()
    np.random.seed(0)
    np.random.standard_normal()
    with_second = np.random.get_state(legacy=False)
    second = np.random.standard_normal()
    with guard:
        pass
    np.random.set_state(with_second)
    with guard:
        np.random.rand()
    assert np.random.standard_normal() == second


def test_another_bit_generator_of_numpy_is_kept_too() -> None:
    own = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(np.random.PCG64(4))  # type: ignore[attr-defined]
    try:
        guard = RandomGuard()
        kept = in_bytes()
        with guard:
            np.random.rand(5), np.random.standard_normal()
        assert in_bytes() == kept
    finally:
        np.random.set_bit_generator(own)  # type: ignore[attr-defined]


# In the engine


def drawing(ctx: Context) -> list[float]:
    """Uses all global generators; what it returns is different at each step, since they have moved on between."""
    random.gauss(0, 1)
    np.random.standard_normal()
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    random.seed(ctx.step), np.random.seed(ctx.step), torch.manual_seed(ctx.step)
    return drawn


def training(rank: int, shares: bool) -> list[Any]:
    """A loop that draws from the global generators, seeded alike, with and without sources that use them."""
    random.seed(1), np.random.seed(2), torch.manual_seed(3)

    def fail(ctx: Context) -> None:
        drawing(ctx)
        raise ValueError

    state = SharedState()
    state.add("x", drawing, every=Every(steps=1))
    state.add("fails", fail, every=Every(steps=2, start=3))
    found: list[Any] = []
    with SyncEngine(state) as engine:
        for step in range(6):
            if shares:
                try:
                    engine.step(step)
                except ComputeError:
                    found.append("failed")
            drawn = [random.gauss(0, 1), np.random.standard_normal(), float(torch.randn(()))]
            found.append([drawn, random.random(), np.random.rand(), in_bytes()])
    return found


def test_sources_that_draw_and_fail_leave_the_draws_of_all_ranks_as_without_them() -> None:
    alone = training(0, False)
    main, peer = returned(run_ranks(training, 2, True))
    assert main == peer
    assert [found for found in main if found != "failed"] == alone
    assert main.count("failed") == 2


def interrupted(ctx: Context) -> None:
    drawing(ctx)
    raise KeyboardInterrupt


def test_the_generators_are_put_back_when_a_source_is_interrupted() -> None:
    kept = in_bytes()
    with pytest.raises(KeyboardInterrupt), SyncEngine(SharedState({"x": interrupted})) as engine:
        engine.start()
    assert in_bytes() == kept
