"""Values that need all ranks, on real ranks: quantiles of what they observe, draws that each makes for itself."""

import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import returned, run_ranks

import syncstate.values
from syncstate import Context, Every, SharedState, SyncEngine
from syncstate.values import CurriculumThreshold, SampledIndices
from syncstate.wire import encode

LOSSES = np.random.default_rng(7).exponential(size=(24, 8)).astype(np.float32)  # of each step, 8 samples


# A threshold by quantile


def follow_losses(rank: int, world_size: int, options: dict[str, Any], first: int = 0, path: Any = None) -> list[float]:
    """The threshold after each step; the samples of a step are dealt out to the ranks."""
    state = SharedState()
    state.add("limit", CurriculumThreshold(quantile=0.7, warmup=5, smoothing=0.25), every=Every(steps=3), **options)
    found = []
    with SyncEngine(state) as engine:
        if first:
            engine.load_state_dict(torch.load(path, weights_only=True))
        engine.start(first)
        for step in range(first, len(LOSSES)):
            state.observe("limit", torch.from_numpy(LOSSES[step, rank::world_size]))
            engine.step(step + 1)
            found.append(state["limit"])
            if path is not None and step + 1 == 12 and rank == 0:
                torch.save(engine.state_dict(), path)
    return found


def by_hand(lag: int = 0) -> list[float]:
    """The same with all losses at hand."""
    computed, found, threshold = {0: np.inf}, [], np.inf
    for step in range(3, len(LOSSES) + 1, 3):
        if step >= 5:
            new = float(np.quantile(LOSSES[step - 3 : step].astype(np.float64), 0.7))
            threshold = new if np.isinf(threshold) else 0.25 * threshold + 0.75 * new
        computed[step + lag] = threshold
    for step in range(1, len(LOSSES) + 1):
        found.append(computed[max(point for point in computed if point <= step)])
    return found


@pytest.mark.parametrize(
    ("options", "lag"), [({}, 0), ({"lag": 2}, 2), ({"async_op": True}, 2)], ids=["blocking", "with a lag", "async"]
)
def test_the_same_losses_on_1_2_and_4_ranks_give_the_same_thresholds(options: dict[str, Any], lag: int) -> None:
    one, two, four = (returned(run_ranks(follow_losses, n, n, options)) for n in (1, 2, 4))
    assert all(found == one[0] for found in (*two, *four))
    assert one[0] == pytest.approx(by_hand(lag), rel=1e-12)


def test_a_run_resumed_on_a_sync_step_repeats_the_thresholds_on_another_world_size_too(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    unbroken = returned(run_ranks(follow_losses, 2, 2, {}, 0, path))
    for n in (2, 4):
        assert returned(run_ranks(follow_losses, n, n, {}, 12, path)) == [unbroken[0][12:]] * n


def observe_on_one(rank: int) -> list[float]:
    """Only rank 1 observes, and only once."""
    state = SharedState()
    state.add("limit", CurriculumThreshold(quantile=0.5), every=Every(steps=1))
    found = []
    with SyncEngine(state) as engine:
        found.append(state["limit"])
        for step in range(4):
            if (rank, step) == (1, 2):
                state.observe("limit", torch.tensor([4.0, 2.0, float("nan"), 3.0]))
            engine.step(step)
            found.append(state["limit"])
    return found


def test_infinity_holds_until_something_was_observed_and_then_the_last_threshold() -> None:
    assert returned(run_ranks(observe_on_one, 3)) == [[np.inf, np.inf, np.inf, 3.0, 3.0]] * 3


# Draws that each rank makes for itself


def draw(rank: int, send: str, path: Path, first: int) -> tuple[list[list[int]], int, int]:
    torch.manual_seed(rank)
    np.random.seed(rank)
    before = np.random.get_state(legacy=False), torch.get_rng_state()
    state = SharedState()
    state.add("order", SampledIndices(70_000, send=send), every=Every(steps=1))
    seen = []
    with SyncEngine(state) as engine:
        if first:
            engine.load_state_dict(torch.load(path, weights_only=True))
        for step in range(first, 6):
            engine.step(step)
            assert sorted(state["order"].tolist()) == list(range(70_000))
            seen.append(state["order"].tolist())
            if step == 2 and rank == 0 and not first:
                torch.save(engine.state_dict(), path)
        collectives = engine.stats.collectives
        nbytes = len(encode(engine.state_dict()["values"]["order"]))
    np.testing.assert_equal(np.random.get_state(legacy=False), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    return seen, collectives, nbytes


def test_a_permutation_that_each_rank_draws_is_the_one_that_main_would_have_sent(tmp_path: Path) -> None:
    sent = returned(run_ranks(draw, 2, "indices", tmp_path / "sent.pt", 0))
    drawn = returned(run_ranks(draw, 3, "auto", tmp_path / "drawn.pt", 0))
    assert all(orders == sent[0][0] for orders, _, _ in (*sent, *drawn))
    assert (sent[0][1], drawn[0][1]) == (12, 6)  # two collectives a sync, or one
    assert sent[0][2] > 560_000 > 1000 > drawn[0][2]
    for path, send in (("drawn.pt", "auto"), ("sent.pt", "seed"), ("sent.pt", "indices")):
        for orders, _, _ in returned(run_ranks(draw, 2, send, tmp_path / path, 3)):
            assert orders == sent[0][0][3:]


def draw_by_other_weights(rank: int) -> int:
    state = SharedState({"x": SampledIndices(2, 2, weights=[1.0, 1.0 + rank], send="seed")})
    with SyncEngine(state, timeout=30) as engine:
        engine.start()
    return 0


def test_weights_that_differ_between_ranks_are_an_error_on_all_and_not_two_draws() -> None:
    main, peer = run_ranks(draw_by_other_weights, 2)
    assert (peer.status, peer.error) == ("raised", "ConfigError")
    assert (main.status, main.error) == ("raised", "PeerError")
    for outcome in (main, peer):
        assert "the weights on rank 1 are not those of main" in outcome.message


def follow_a_growing_set(rank: int) -> list[int]:
    """The set grows on main; the other rank has none."""
    data: list[int] = []
    state = SharedState()
    state.add("batch", SampledIndices(data.__len__, send="seed"), every=Every(steps=1))
    found = []
    with SyncEngine(state) as engine:
        for step in range(3):
            data += [0] * (5 if rank == 0 else 0)
            engine.step(step)
            found.append(len(set(state["batch"].tolist())))
    return found


def test_a_population_that_grows_on_main_is_drawn_from_by_all() -> None:
    assert returned(run_ranks(follow_a_growing_set, 2)) == [[5, 10, 15]] * 2


# Sources of one's own


def run_the_example(rank: int) -> dict[str, float]:
    """The source in the docstring of `syncstate.values`, as it stands there."""
    text = str(syncstate.values.__doc__)
    source, adding = re.findall(r"::\n\n(.*?)\n\n    (state\.add.*?)\n", text, re.DOTALL)[0]
    scope: dict[str, Any] = {"torch": torch, "Every": Every, "state": SharedState()}
    exec(textwrap.dedent(source) + "\n" + adding, scope)
    state: SharedState = scope["state"]
    with SyncEngine(state) as engine:
        assert state["weights"] == {"box": 1.0, "mask": 1.0}
        norms = {"box": torch.tensor(1.0 + rank), "mask": torch.tensor(3.0 * (1 + rank))}
        engine.model = type("Model", (), {"norms": norms})()
        engine.start()
    context = Context(collected=[torch.tensor([1.0, 3.0])])
    assert scope["Balance"](["a", "b"]).compute(context) == {"a": 2.0, "b": pytest.approx(2 / 3)}
    return dict(state["weights"])


def test_the_source_in_the_documentation_works_as_it_stands() -> None:
    one, two = returned(run_ranks(run_the_example, 2))
    # The means over both ranks are 1.5 and 4.5, their mean is 3.
    assert one == two == {"box": 2.0, "mask": pytest.approx(2 / 3)}
