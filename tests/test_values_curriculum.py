"""A threshold follows its formula and meets both ends exactly."""

import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest
from expect import refuses
from hypothesis import given
from hypothesis import strategies as st

from syncstate import Context
from syncstate.values import CurriculumThreshold


def over(source: CurriculumThreshold, *steps: int) -> list[float]:
    values = [source.compute(Context(step=step)) for step in steps]
    assert all(type(value) is float for value in values)
    return values


# Formulas


@pytest.mark.parametrize(
    ("options", "quarter", "halfway"),
    [
        ({}, 0.25, 0.5),
        ({"schedule": "root"}, 0.5, math.sqrt(0.5)),
        ({"schedule": "root", "degree": 3}, 0.25 ** (1 / 3), 0.5 ** (1 / 3)),
        ({"schedule": "root", "degree": 0.5}, 0.0625, 0.25),
        ({"schedule": "cosine"}, (1 - math.cos(math.pi / 4)) / 2, 0.5),
    ],
)
def test_a_threshold_follows_its_formula(options: dict[str, Any], quarter: float, halfway: float) -> None:
    source = CurriculumThreshold(start=2, end=10, steps=100, **options)
    expected = [2.0, 2 + 8 * quarter, 2 + 8 * halfway, 10.0, 10.0, 10.0]
    assert over(source, 0, 25, 50, 100, 101, 10**9) == pytest.approx(expected)


@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize("initial_competence", [0.01, 0.1, 0.5])
def test_competence_is_that_of_platanios_et_al(degree: int, initial_competence: float) -> None:
    source = CurriculumThreshold("competence", start=initial_competence, end=1, steps=200, degree=degree)
    for step in range(0, 300, 10):
        # Equations 6 and 8 of arXiv 1903.09848.
        linear = step * (1 - initial_competence**degree) / 200 + initial_competence**degree
        assert over(source, step) == pytest.approx([min(1, linear ** (1 / degree))])


def test_competence_is_scaled_to_its_end_and_may_fall() -> None:
    assert over(CurriculumThreshold("competence", start=0, end=8, steps=4), 1, 4) == pytest.approx([4, 8])
    assert over(CurriculumThreshold("competence", start=8, end=0, steps=4), 0, 3, 4) == pytest.approx([8, 4, 0])
    assert over(CurriculumThreshold("competence", start=1e-200, end=1e200, steps=4, degree=9), 4) == [1e200]


def deepspeeds(step: int, config: dict[str, Any]) -> float:
    """What DeepSpeed's curriculum scheduler makes of its keys: floor, then down to a multiple, never above the max."""
    low, high = config["min_difficulty"], config["max_difficulty"]
    if "max_step" in config:
        passed = sum(step > limit for limit in config["max_step"])
        return float(config["difficulty"][passed])
    share = (step / config["total_curriculum_step"]) ** (1 / config.get("root_degree", 1))
    difficulty = math.floor(share * (high - low) + low)
    return float(min(difficulty - difficulty % config["difficulty_step"], high))


@pytest.mark.parametrize(
    ("config", "source"),
    [
        (
            {"min_difficulty": 64, "max_difficulty": 1024, "total_curriculum_step": 1500, "difficulty_step": 8},
            CurriculumThreshold("linear", start=64, end=1024, steps=1500, multiple=8),
        ),
        (
            {
                "min_difficulty": 8,
                "max_difficulty": 256,
                "total_curriculum_step": 777,
                "difficulty_step": 8,
                "root_degree": 2,
            },
            CurriculumThreshold("root", start=8, end=256, steps=777, multiple=8),
        ),
        (
            {"min_difficulty": 1, "max_difficulty": 3, "difficulty": [1, 2, 3], "max_step": [5, 10]},
            CurriculumThreshold("step", start=1, milestones={6: 2, 11: 3}),
        ),
    ],
)
def test_the_pacing_functions_of_deepspeed_are_covered(config: dict[str, Any], source: CurriculumThreshold) -> None:
    steps = range(0, 2000, 1)
    assert over(source, *steps) == [deepspeeds(step, config) for step in steps]


def test_stairs_of_equal_height_or_of_given_heights() -> None:
    even = CurriculumThreshold("step", start=0.25, end=1, milestones=[30, 10, 20], steps=5)
    assert over(even, 0, 9, 10, 19, 20, 29, 30, 999) == [0.25, 0.25, 0.5, 0.5, 0.75, 0.75, 1, 1]
    given_ = CurriculumThreshold("step", start=5, milestones={20: 0.5, 10: 7})
    assert over(given_, 0, 9, 10, 19, 20, 999) == [5, 5, 7, 7, 0.5, 0.5]


def test_a_multiple_rounds_down_and_an_exact_one_stays() -> None:
    assert over(CurriculumThreshold(start=0, end=50, steps=50, multiple=8), 7, 8, 15, 16, 50) == [0, 8, 8, 16, 48]
    tenths = CurriculumThreshold(start=0, end=1, steps=10, multiple=0.1)
    assert over(tenths, *range(11)) == pytest.approx([step / 10 for step in range(11)])


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
    values = over(source, *range(steps + 2))
    assert (values[0], values[-2], values[-1]) == (start, end, end)
    slack = 1e-9 * max(1.0, abs(start), abs(end))
    sign = 1 if end >= start else -1
    assert all(sign * (later - earlier) >= -slack for earlier, later in itertools.pairwise(values))


def test_numbers_of_numpy_are_numbers() -> None:
    source = CurriculumThreshold(start=np.float32(0.5), end=np.int64(2), steps=np.int64(2))  # type: ignore[arg-type]
    assert over(source, 1, 2) == [1.25, 2.0]


def test_a_threshold_survives_pickle() -> None:
    for source in (
        CurriculumThreshold("cosine", start=0, end=1, steps=10),
        CurriculumThreshold("step", start=0, end=1, milestones=(step for step in (2, 4))),
    ):
        assert over(pickle.loads(pickle.dumps(source)), *range(12)) == over(source, *range(12))
    by_quantile = pickle.loads(pickle.dumps(CurriculumThreshold(quantile=0.5)))
    assert by_quantile.compute(Context(collected=[[1.0, 3.0]])) == 2


# Settings


LINE = {"start": 0, "end": 1, "steps": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "start must be a finite number, got None"),
        ({"start": 0}, "end must be a finite number, got None"),
        ({"start": 0, "end": 1}, "steps must be a whole number of at least 1, got None"),
        ({**LINE, "steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({**LINE, "steps": 10.5}, "steps must be a whole number of at least 1, got 10.5"),
        ({**LINE, "start": "0"}, "start must be a finite number, got '0'"),
        ({**LINE, "end": math.inf}, "end must be a finite number, got inf"),
        ({**LINE, "start": True}, "start must be a finite number, got True"),
        (
            {**LINE, "schedule": "square"},
            "schedule must be one of linear, root, cosine, competence, step, got 'square'",
        ),
        ({**LINE, "schedule": 0.9}, "schedule must be one of linear, root, cosine, competence, step, got '0.9'"),
        ({**LINE, "degree": 3}, "degree=3.0 is for the schedules root and competence, not for linear"),
        ({**LINE, "schedule": "root", "degree": 0}, "degree must be a finite number above 0, got 0"),
        ({**LINE, "multiple": -8}, "multiple must be a finite number above 0, got -8"),
        ({**LINE, "milestones": [5]}, "milestones=(5,) is for the schedule step, not for linear"),
        (
            {**LINE, "schedule": "competence", "start": -1},
            "the schedule competence takes a start and an end of at least 0 and not both 0, got start=-1.0 and end=1.0",
        ),
        (
            {**LINE, "schedule": "competence", "end": 0},
            "the schedule competence takes a start and an end of at least 0 and not both 0, got start=0.0 and end=0.0",
        ),
        (
            {**LINE, "schedule": "step"},
            "the schedule step takes milestones, a list of steps or a mapping from steps to thresholds, got None",
        ),
        (
            {**LINE, "schedule": "step", "milestones": []},
            "the schedule step takes milestones, a list of steps or a mapping from steps to thresholds, got ()",
        ),
        ({**LINE, "schedule": "step", "milestones": [0]}, "a milestone must be a whole number of at least 1, got 0"),
        (
            {**LINE, "schedule": "step", "milestones": {5: 0.5}},
            "milestones that name their thresholds leave no room for end=1; leave end out (null)",
        ),
        (
            {"schedule": "step", "start": 0, "milestones": {5: math.nan}},
            "milestones[5] must be a finite number, got nan",
        ),
        (
            {**LINE, "smoothing": 0.5},
            "smoothing=0.5 is for a threshold by quantile; give quantile=, or leave smoothing out",
        ),
        ({**LINE, "warmup": 5}, "warmup=5 is for a threshold by quantile; give quantile=, or leave warmup out"),
        ({**LINE, "initial": 0.0}, "initial=0.0 is for a threshold by quantile; give quantile=, or leave initial out"),
        ({"quantile": 1.5}, "quantile must be a finite number from 0 to 1, got 1.5"),
        ({"quantile": True}, "quantile must be a finite number from 0 to 1, got True"),
        ({"quantile": 0.9, "warmup": -1}, "warmup must be a whole number of at least 0, got -1"),
        ({"quantile": 0.9, "smoothing": -0.1}, "smoothing must be a finite number from 0 to 1, got -0.1"),
        ({"quantile": 0.9, "smoothing": 1}, "smoothing must be below 1, got 1; with 1 the threshold never moves"),
        ({"quantile": 0.9, "initial": math.nan}, "initial must be a finite number, got nan"),
        (
            {"quantile": 0.9, "start": 0, "end": 1, "schedule": "root"},
            "give a quantile or a schedule, not both; got quantile=0.9 and schedule='root', start=0, end=1. Leave "
            "these out (null) for a threshold by quantile",
        ),
    ],
)
def test_a_threshold_refuses(options: dict[str, Any], message: str) -> None:
    with refuses(f"CurriculumThreshold: {message}"):
        CurriculumThreshold(**options)
