"""What a rank observes: the newest numbers, detached, copied, and no more than the capacity."""

from typing import Any

import pytest
import torch
from expect import refuses

from syncstate import Context, SharedState


def one(ctx: Context) -> float:
    """One."""
    return 1.0


@pytest.fixture
def ring() -> SharedState:
    return SharedState({"x": one, "y": one}, observe_capacity=5)


def test_nothing_observed_is_an_empty_tensor(ring: SharedState) -> None:
    assert ring.observed("x").shape == (0,)
    ring.observe("x", torch.empty(0, 3))
    assert ring.observed("x").shape == (0,)


def test_observed_numbers_come_back_oldest_first_as_one_flat_tensor(ring: SharedState) -> None:
    ring.observe("x", 1)
    ring.observe("x", torch.tensor([[2.0], [3.0]]))
    ring.observe("y", 9.0)
    assert ring.observed("x").tolist() == [1.0, 2.0, 3.0]
    assert ring.observed("x").dtype == torch.float32
    assert ring.observed("y").tolist() == [9.0]


def test_the_newest_numbers_stay_and_the_oldest_are_dropped(ring: SharedState) -> None:
    seen: list[float] = []
    for size in (2, 1, 0, 4, 5, 1, 1, 12, 3):
        new = [float(len(seen) + i) for i in range(size)]
        seen += new
        ring.observe("x", torch.tensor(new))
        assert ring.observed("x").tolist() == seen[-5:]


def test_the_ring_holds_no_more_than_it_needs(ring: SharedState) -> None:
    for _ in range(50):
        ring.observe("x", torch.arange(3.0))
        ring.observe("x", torch.arange(0.0))
        ring.observe("y", torch.arange(1000.0))
    for name in ("x", "y"):
        parts = ring._observed[name]._parts
        # At most one part more than the capacity needs, and no part keeps a larger tensor alive.
        assert sum(part.numel() for part in parts) < 5 + 3
        assert all(part.untyped_storage().nbytes() == 4 * part.numel() for part in parts)


def test_what_was_observed_is_detached_and_a_copy(ring: SharedState) -> None:
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    loss = weight * 2
    ring.observe("x", loss)
    plain = torch.tensor([3.0])
    ring.observe("x", plain)
    plain.zero_()
    observed = ring.observed("x")
    assert observed.tolist() == [2.0, 4.0, 3.0]
    assert not observed.requires_grad
    assert all(part.grad_fn is None and not part.requires_grad for part in ring._observed["x"]._parts)
    loss.sum().backward()
    assert weight.grad is not None


def test_observed_doubles_stay_doubles(ring: SharedState) -> None:
    ring.observe("x", torch.tensor(1 / 3, dtype=torch.float64))
    ring.observe("x", 0.5)
    assert ring.observed("x").tolist() == [1 / 3, 0.5]


@pytest.mark.parametrize("capacity", [0, -1, 2.5, True, None])
def test_a_capacity_is_a_whole_number_above_zero(capacity: Any) -> None:
    with refuses(f"SharedState: observe_capacity must be a whole number of at least 1, got {capacity!r}"):
        SharedState(observe_capacity=capacity)
