"""A threshold follows its formula and meets both ends exactly."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from expect import refuses
from hypothesis import given
from hypothesis import strategies as st

from syncstate import Context
from syncstate.values import CurriculumThreshold


@pytest.mark.parametrize(
    ("schedule", "halfway", "quarter"),
    [("linear", 0.5, 0.25), ("root", math.sqrt(0.5), 0.5), ("cosine", 0.5, (1 - math.cos(math.pi / 4)) / 2)],
)
def test_a_threshold_follows_its_formula(schedule: str, halfway: float, quarter: float) -> None:
    source = CurriculumThreshold(schedule, start=2, end=10, steps=100)
    values = [source.compute(Context(step=step)) for step in (0, 25, 50, 100, 101, 10**9)]
    assert all(type(value) is float for value in values)
    assert values == pytest.approx([2.0, 2 + 8 * quarter, 2 + 8 * halfway, 10.0, 10.0, 10.0])


@given(
    schedule=st.sampled_from(["linear", "root", "cosine"]),
    start=st.floats(-1e6, 1e6),
    end=st.floats(-1e6, 1e6),
    steps=st.integers(1, 1000),
)
def test_a_threshold_moves_one_way_and_meets_both_ends_exactly(
    schedule: str, start: float, end: float, steps: int
) -> None:
    source = CurriculumThreshold(schedule, start=start, end=end, steps=steps)
    values = [source.compute(Context(step=step)) for step in range(steps + 2)]
    assert (values[0], values[-2], values[-1]) == (start, end, end)
    slack = 1e-9 * max(1.0, abs(start), abs(end))
    sign = 1 if end >= start else -1
    assert all(sign * (later - earlier) >= -slack for earlier, later in itertools.pairwise(values))


def test_numbers_of_numpy_are_numbers() -> None:
    source = CurriculumThreshold(start=np.float32(0.5), end=np.int64(2), steps=np.int64(2))  # type: ignore[arg-type]
    assert source.compute(Context(step=1)) == 1.25
    assert type(source.compute(Context(step=2))) is float


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "start must be a finite number, got None"),
        ({"start": 0}, "end must be a finite number, got None"),
        ({"start": 0, "end": 1}, "steps must be a whole number of at least 1, got None"),
        ({"start": 0, "end": 1, "steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"start": 0, "end": 1, "steps": 10.5}, "steps must be a whole number of at least 1, got 10.5"),
        ({"start": "0", "end": 1, "steps": 1}, "start must be a finite number, got '0'"),
        ({"start": 0, "end": math.inf, "steps": 1}, "end must be a finite number, got inf"),
        ({"start": True, "end": 1, "steps": 1}, "start must be a finite number, got True"),
        (
            {"schedule": "step", "start": 0, "end": 1, "steps": 1},
            "schedule must be one of linear, root, cosine, got 'step'",
        ),
        (
            {"schedule": 0.9, "start": 0, "end": 1, "steps": 1},
            "schedule must be one of linear, root, cosine, got 0.9",
        ),
        (
            {"quantile": 0.9},
            "quantile=0.9 is not available yet, because it needs a value that collects; give start, end and steps",
        ),
        (
            {"start": 0, "end": 1, "steps": 1, "smoothing": 0.5},
            "smoothing=0.5 is not available yet, because it needs a value that collects; give start, end and steps",
        ),
    ],
)
def test_a_threshold_refuses(options: dict[str, Any], message: str) -> None:
    with refuses(f"CurriculumThreshold: {message}"):
        CurriculumThreshold(**options)
