"""Schedules are sets of points on a clock of whole numbers: these tests compare them with the sets themselves."""

import pickle
from typing import Any

import numpy as np
import pytest
from expect import refuses
from hypothesis import given
from hypothesis import strategies as st

from syncstate.schedule import At, Every, Once, Schedule

HORIZON = 60
EXACTLY_ONE = "Every: give exactly one of steps, epochs, seconds, overhead"
small = st.integers(0, 20)


def check_against(schedule: Schedule, points: set[int]) -> None:
    """Compare both functions with a set of points below `HORIZON`, from before the first time to near the end of it."""
    assert {t for t in range(HORIZON) if schedule.contains(t)} == points
    last = max(points, default=0)
    for t in range(-1, HORIZON):
        later = [point for point in points if point > t]
        if later:
            assert schedule.next_after(t) == min(later)
        elif t >= last and not any(schedule.contains(u) for u in range(HORIZON, 3 * HORIZON)):
            assert schedule.next_after(t) is None


@given(
    period=st.integers(1, 20),
    start=small,
    length=st.none() | st.integers(1, 40),
    unit=st.sampled_from(["steps", "epochs"]),
)
def test_every_has_the_points_of_a_range(period: int, start: int, length: int | None, unit: str) -> None:
    stop = None if length is None else start + length
    schedule = Every(**{unit: period}, start=start, stop=stop)
    end = HORIZON if stop is None else min(stop, HORIZON)
    check_against(schedule, set(range(start, end, period)))


@given(period=st.integers(1, 20), start=small, length=st.none() | st.integers(1, 40), t=st.integers(-1, 100))
def test_the_next_point_is_the_first_later_one_that_every_contains(
    period: int, start: int, length: int | None, t: int
) -> None:
    schedule = Every(steps=period, start=start, stop=None if length is None else start + length)
    later = (u for u in range(t + 1, t + 1 + start + period) if schedule.contains(u))
    assert schedule.next_after(t) == next(later, None)


@given(points=st.lists(st.integers(0, HORIZON - 1), min_size=1, max_size=15))
def test_at_has_the_points_given_in_any_order_and_number(points: list[int]) -> None:
    check_against(At(points), set(points))
    assert At(points) == At(sorted(set(points)))


def test_once_contains_no_step_and_comes_next_only_for_who_has_seen_nothing() -> None:
    assert not any(Once().contains(t) for t in range(HORIZON))
    assert Once().next_after(-1) == 0
    assert [Once().next_after(t) for t in (0, 1, 100)] == [None, None, None]


def test_large_steps_are_exact() -> None:
    assert Every(steps=7).next_after(7 * 10**17) == 7 * 10**17 + 7
    assert Every(steps=7).contains(7 * 10**17)


@pytest.mark.parametrize(
    ("schedule", "unit", "text"),
    [
        (Every(steps=100), "steps", "every 100 steps"),
        (Every(epochs=2, start=3), "epochs", "every 2 epochs from 3"),
        (Every(steps=5, start=10, stop=50), "steps", "every 5 steps from 10 until 50"),
        (Every(steps=5, stop=50), "steps", "every 5 steps until 50"),
        (Every(seconds=60), "seconds", "every 60 seconds"),
        (Every(overhead=0.01, start=5), "overhead", "every 0.01 overhead from 5"),
        (At([10, 0, 500]), "steps", "at steps 0, 10, 500"),
        (Once(), "once", "once"),
    ],
)
def test_a_schedule_says_its_unit_and_itself(schedule: Schedule, unit: str, text: str) -> None:
    assert schedule.unit == unit
    assert str(schedule) == text


def test_equal_schedules_are_equal_hash_alike_and_pickle() -> None:
    for make in (lambda: Every(steps=3, start=1), lambda: At([3, 1]), Once):
        one: Schedule = make()
        assert one == make()
        assert hash(one) == hash(make())
        assert pickle.loads(pickle.dumps(one)) == one


def test_numbers_of_numpy_count_as_whole_numbers() -> None:
    assert Every(steps=np.int64(3)) == Every(steps=3)  # type: ignore[arg-type]
    assert type(Every(steps=np.int64(3)).steps) is int  # type: ignore[arg-type]
    assert At(np.array([4, 2])) == At([2, 4])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, f"{EXACTLY_ONE}; got none"),
        ({"steps": 1, "epochs": 2}, f"{EXACTLY_ONE}; got steps=1, epochs=2"),
        ({"steps": 5, "seconds": 1.5}, f"{EXACTLY_ONE}; got steps=5, seconds=1.5"),
        ({"steps": 0}, "Every: steps must be a whole number of at least 1, got 0"),
        ({"steps": -3}, "Every: steps must be a whole number of at least 1, got -3"),
        ({"steps": 2.5}, "Every: steps must be a whole number of at least 1, got 2.5"),
        ({"steps": "10"}, "Every: steps must be a whole number of at least 1, got '10'"),
        ({"steps": True}, "Every: steps must be a whole number of at least 1, got True"),
        ({"epochs": 0}, "Every: epochs must be a whole number of at least 1, got 0"),
        ({"epochs": 1.0}, "Every: epochs must be a whole number of at least 1, got 1.0"),
        ({"steps": 1, "start": -1}, "Every: start must be a whole number of at least 0, got -1"),
        ({"steps": 1, "start": None}, "Every: start must be a whole number of at least 0, got None"),
        ({"steps": 1, "stop": 0}, "Every: stop must be a whole number of at least 1, got 0"),
        ({"steps": 1, "start": 7, "stop": 7}, "Every: stop must be a whole number of at least 8, got 7"),
        ({"seconds": float("nan")}, "Every: seconds must be a finite number above 0, got nan"),
        ({"seconds": float("inf")}, "Every: seconds must be a finite number above 0, got inf"),
        ({"seconds": 0}, "Every: seconds must be a finite number above 0, got 0"),
        ({"seconds": "60"}, "Every: seconds must be a finite number above 0, got '60'"),
        ({"seconds": True}, "Every: seconds must be a finite number above 0, got True"),
        ({"overhead": 0}, "Every: overhead must be a number between 0 and 1, got 0"),
        ({"overhead": 1}, "Every: overhead must be a number between 0 and 1, got 1"),
        ({"overhead": float("nan")}, "Every: overhead must be a number between 0 and 1, got nan"),
    ],
)
def test_every_refuses(options: dict[str, Any], message: str) -> None:
    with refuses(message):
        Every(**options)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "At: steps must name at least one step, got none"),
        ([3, -1], "At: steps must be a whole number of at least 0, got -1"),
        ([3, 1.5], "At: steps must be a whole number of at least 0, got 1.5"),
        ([False], "At: steps must be a whole number of at least 0, got False"),
        ("12", "At: steps must be a list of whole numbers, got '12'"),
        (5, "At: steps must be a list of whole numbers, got 5"),
        (None, "At: steps must be a list of whole numbers, got None"),
    ],
)
def test_at_refuses(steps: Any, message: str) -> None:
    with refuses(message):
        At(steps)


@pytest.mark.parametrize("schedule", [Every(seconds=60), Every(overhead=0.01)])
def test_nobody_can_tell_alone_when_seconds_or_overhead_are_due(schedule: Every) -> None:
    for ask in (schedule.contains, schedule.next_after):
        with refuses(f"{schedule}: only the main process knows when it is due"):
            ask(0)
