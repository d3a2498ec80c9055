"""How main turns seconds, and shares of the time, into numbers of steps. A simulated clock, no ranks."""

import itertools
import math
from collections.abc import Callable

import pytest

from syncstate import Every
from syncstate.loop.rhythm import Rhythm


def points(
    rhythm: Rhythm, last: int, step_seconds: Callable[[int], float], cost: Callable[[int], float], *, lag: int = 0
) -> list[int]:
    """The points of a rhythm up to a step, when steps and syncs take so long.

    Args:
        rhythm: The rhythm, at its first point.
        last: The last step.
        step_seconds: What a step takes.
        cost: What a sync takes.
        lag: Steps until the next point is known.
    """
    now, found = 0.0, []
    waiting: dict[int, tuple[int, int]] = {}
    for step in range(last + 1):
        now += step_seconds(step) if step else 0.0
        if step in waiting:
            rhythm.follow(*waiting.pop(step))
        if step >= rhythm.due:
            found.append(step)
            interval = rhythm.decide(step, now)
            now += cost(step)
            rhythm.spend(cost(step))
            if lag:
                rhythm.wait()
                waiting[step + lag] = (step, interval)
            else:
                rhythm.follow(step, interval)
    return found


def gaps(found: list[int]) -> list[int]:
    return [b - a for a, b in itertools.pairwise(found)]


# Seconds


def test_the_first_interval_is_one_step_then_twice_as_many_until_half_a_period_is_measured() -> None:
    found = points(Rhythm(Every(seconds=10), 0), 300, lambda step: 0.1, lambda step: 0.0)
    # 64 steps of 0.1 s are the first interval that is at least half of 10 s; from then on it is the period.
    assert gaps(found) == [1, 2, 4, 8, 16, 32, 64, 100]


@pytest.mark.parametrize(
    ("step_seconds", "interval"), [(0.01, 1000), (0.3, 33), (2.5, 4), (4.0, 2), (7.0, 1), (60.0, 1)]
)
def test_an_interval_lasts_the_period_as_well_as_whole_steps_allow(step_seconds: float, interval: int) -> None:
    found = points(Rhythm(Every(seconds=10), 0), 20 * interval, lambda step: step_seconds, lambda step: 0.0)
    assert gaps(found)[-1] == interval
    assert max(gaps(found)) == interval


def test_it_follows_steps_that_become_slower_or_faster_within_a_few_points() -> None:
    def step_seconds(step: int) -> float:
        return 0.1 if step <= 400 else 1.0 if step <= 800 else 0.05

    found = gaps(points(Rhythm(Every(seconds=10), 0), 2000, step_seconds, lambda step: 0.0))
    assert found[6:9] == [64, 100, 100]
    assert 10 in found  # a second a step
    assert found[-1] == 200
    # Ten times slower is known at the next point, twenty times faster after a few doublings.
    assert found[found.index(10) + 1 :].index(200) - found[found.index(10) + 1 :].index(20) <= 5


def test_the_length_of_a_step_may_vary_and_the_period_holds_on_average() -> None:
    clock = [0.0]

    def step_seconds(step: int) -> float:
        length = 0.05 if step % 3 else 0.2
        clock[0] += length
        return length

    found = points(Rhythm(Every(seconds=5), 0), 3000, step_seconds, lambda step: 0.0)
    assert set(gaps(found)[-10:]) <= {49, 50, 51}


@pytest.mark.parametrize("lag", [1, 3])
def test_no_point_is_announced_before_it_is_known(lag: int) -> None:
    found = points(Rhythm(Every(seconds=10), lag), 500, lambda step: 5.0, lambda step: 0.0, lag=lag)
    assert set(gaps(found)[1:]) == {max(2, lag)}


# Shares of the time


def share_kept(
    share: float, step_seconds: Callable[[int], float], cost: Callable[[int], float], last: int
) -> list[float]:
    """The share that syncing took, from the first point on to each of the later ones."""
    rhythm = Rhythm(Every(overhead=share), 0)
    now, spent, shares = 0.0, 0.0, []
    for step in range(last + 1):
        now += step_seconds(step) if step else 0.0
        if step >= rhythm.due:
            if now:
                shares.append(spent / now)
            interval = rhythm.decide(step, now)
            now, spent = now + cost(step), spent + cost(step)
            rhythm.spend(cost(step))
            rhythm.follow(step, interval)
    return shares


@pytest.mark.parametrize("share", [0.5, 0.1, 0.01, 0.001])
@pytest.mark.parametrize("cost", [0.0005, 0.004, 0.03, 0.2])
def test_syncing_takes_no_more_than_its_share_in_the_long_run(share: float, cost: float) -> None:
    interval = max(1, math.ceil(cost * (1 - share) / (share * 0.01)))
    shares = share_kept(share, lambda step: 0.01, lambda step: cost, 60 * interval)
    # From the first points, which measure, to a share that is kept, and used.
    assert shares[-1] <= share * 1.001
    if interval > 1:
        assert shares[-1] >= share * 0.9


def test_the_interval_for_a_constant_cost_is_the_least_that_keeps_the_share() -> None:
    # 9 ms a sync, 10 ms a step, a tenth of the time: 9 / (9 + 8.1 * 10) is the tenth, so 9 steps.
    found = points(Rhythm(Every(overhead=0.1), 0), 2000, lambda step: 0.01, lambda step: 0.009)
    assert gaps(found)[-20:] == [9] * 20 or {*gaps(found)[-20:]} <= {8, 9}


def test_what_the_first_points_spent_beyond_the_share_is_made_up_for() -> None:
    # Nothing is known of the first sync, and it costs as much as 99 steps may.
    found = points(Rhythm(Every(overhead=0.01), 0), 5000, lambda step: 0.01, lambda step: 0.01)
    assert gaps(found)[:6] == [1, 2, 4, 8, 16, 32]
    assert share_kept(0.01, lambda step: 0.01, lambda step: 0.01, 5000)[-1] <= 0.01


def test_a_sync_that_becomes_dearer_or_cheaper_changes_the_interval() -> None:
    def cost(step: int) -> float:
        return 0.002 if step < 2000 or step >= 6000 else 0.02

    found = points(Rhythm(Every(overhead=0.05), 0), 12_000, lambda step: 0.01, cost)
    by_phase = [[b - a for a, b in itertools.pairwise(found) if low <= a and b <= high]
                for low, high in ((1000, 2000), (4000, 6000), (10_000, 12_000))]  # fmt: skip
    assert {*by_phase[0]} <= {3, 4}
    assert {*by_phase[1]} <= {37, 38, 39}
    assert {*by_phase[2]} <= {3, 4}


def test_an_occasional_dear_sync_is_made_up_for_and_not_saved_for() -> None:
    def cost(step: int) -> float:
        return 1.0 if 3000 <= step < 3004 else 0.001

    shares = share_kept(0.05, lambda step: 0.01, cost, 9000)
    assert shares[-1] <= 0.0501


# Following


def test_a_failure_repeats_the_interval() -> None:
    rhythm = Rhythm(Every(seconds=10), 0)
    rhythm.follow(0, 7)
    assert rhythm.due == 7
    rhythm.follow(7, None)
    assert (rhythm.due, rhythm.interval) == (14, 7)


def test_start_and_stop_are_steps() -> None:
    rhythm = Rhythm(Every(seconds=10, start=20, stop=30), 0)
    assert rhythm.due == 20
    rhythm.follow(20, 9)
    assert rhythm.due == 29
    rhythm.follow(29, 1)
    assert rhythm.due == math.inf


def test_while_a_value_is_on_its_way_no_point_is_known() -> None:
    rhythm = Rhythm(Every(overhead=0.1), 2)
    rhythm.wait()
    assert rhythm.due == math.inf
    rhythm.follow(0, 2)
    assert (rhythm.due, rhythm.announced) == (2, (2, 2))


def test_training_that_begins_again_has_its_first_point_at_once_or_at_the_start_of_the_schedule() -> None:
    rhythm = Rhythm(Every(seconds=10, start=5, stop=50), 0)
    rhythm.follow(30, 12)
    rhythm.reset(2)
    assert rhythm.due == 5
    rhythm.reset(20)
    assert rhythm.due == 20
    rhythm.reset(60)
    assert rhythm.due == math.inf
    # The steps before are no measurement.
    rhythm.decide(100, 0.0)
    rhythm.reset(3)
    assert rhythm.decide(5, 50.0) == 12


def test_what_was_announced_is_gone_on_with() -> None:
    rhythm = Rhythm(Every(seconds=10), 0)
    rhythm.follow(30, 12)
    other = Rhythm(Every(seconds=10), 0)
    assert rhythm.announced == (42, 12)
    other.restore(*rhythm.announced)
    assert (other.due, other.interval, other.announced) == (42, 12, (42, 12))
    # The first decision after it has measured nothing.
    assert other.decide(42, 1000.0) == 12


def test_the_end_of_a_schedule_is_gone_on_with_too() -> None:
    rhythm = Rhythm(Every(seconds=10, stop=40), 0)
    rhythm.follow(30, 12)
    assert rhythm.due == math.inf
    assert rhythm.announced is not None
    other = Rhythm(Every(seconds=10, stop=40), 0)
    other.restore(*rhythm.announced)
    assert (other.due, other.announced) == (math.inf, rhythm.announced)
