from math import inf

import pytest

from deltaserve.control.engine.step_pace import StepPace


def test_nothing_is_planned_behind_steps_of_unknown_length_or_short_ones() -> None:
    pace = StepPace()
    assert pace.plan_at(5.0) == inf
    for _ in range(50):
        pace.learn(0.0015)
    assert pace.plan_at(5.0) == inf


def test_behind_a_long_one_shortly_before_it_ends() -> None:
    pace = StepPace()
    for _ in range(50):
        pace.learn(0.010)
    assert pace.plan_at(5.0) == pytest.approx(5.008)
    for _ in range(50):
        pace.learn(0.100)
    assert pace.plan_at(5.0) == pytest.approx(5.085)


def test_one_step_that_takes_long_changes_little() -> None:
    pace = StepPace()
    for _ in range(50):
        pace.learn(0.010)
    pace.learn(0.030)
    assert 5.008 < pace.plan_at(5.0) <= 5.012
