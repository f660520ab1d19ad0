from math import inf

import pytest

from deltaserve.control.engine.step_pace import EagerPace, SharedPace, StepPace


def test_nothing_is_planned_behind_steps_of_unknown_length_or_short_ones() -> None:
    pace = StepPace()
    assert pace.plan_at(5.0, 0) == inf
    for _ in range(50):
        pace.learn(0.0015, 0)
    assert pace.plan_at(5.0, 0) == inf


def test_behind_a_long_one_shortly_before_it_ends() -> None:
    pace = StepPace()
    for _ in range(50):
        pace.learn(0.010, 0)
    assert pace.plan_at(5.0, 0) == pytest.approx(5.008)
    for _ in range(50):
        pace.learn(0.100, 0)
    assert pace.plan_at(5.0, 0) == pytest.approx(5.085)


def test_one_step_that_takes_long_changes_little() -> None:
    pace = StepPace()
    for _ in range(50):
        pace.learn(0.010, 0)
    pace.learn(0.030, 0)
    assert 5.008 < pace.plan_at(5.0, 0) <= 5.012


@pytest.mark.parametrize(("most_s", "gap_s"), [(None, 0.12), (0.5, 0.12), (0.05, 0.05), (0.001, 0.001)])
def test_on_shared_cores_steps_begin_at_a_third_of_the_pace_or_as_often_as_is_aimed_at(
    most_s: float | None, gap_s: float
) -> None:
    pace = SharedPace(most_s)
    assert pace.begin_at(5.0) == 5.0, "how long they take is not known"
    for _ in range(50):
        pace.learn(0.040, 0)
    assert pace.begin_at(5.0) == pytest.approx(5.0 + gap_s)


@pytest.mark.parametrize("pace", [EagerPace(), StepPace()])
def test_cores_of_its_own_are_left_to_nobody(pace: StepPace) -> None:
    pace.learn(0.040, 0)
    assert pace.begin_at(5.0) == 5.0


def test_behind_prompts_nothing_is_planned_where_the_cores_compute() -> None:
    pace = StepPace()
    pace.learn(0.040, 0)
    pace.learn(0.500, 64)
    assert pace.plan_at(5.0, 64) == inf
    assert pace.plan_at(5.0, 0) == pytest.approx(5.034), "their length says nothing of a step that only decodes"


def test_a_device_has_the_next_step_at_once_behind_short_prompts_and_late_behind_long_ones() -> None:
    pace = EagerPace()
    assert pace.plan_at(5.0, 0) == 5.0
    assert pace.plan_at(5.0, 128) == inf, "how long they take is not known"
    for _ in range(30):
        pace.learn(0.006, 128)
        pace.learn(0.050, 2048)
    assert pace.plan_at(5.0, 128) == pace.plan_at(5.0, 300) == 5.0
    assert pace.plan_at(5.0, 2048) == pytest.approx(5.0425, abs=0.002)
    assert pace.plan_at(5.0, 1024) == pytest.approx(5.0212, abs=0.002), "of such, too"
