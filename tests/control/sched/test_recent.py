"""Rates that are learned from steps of which some, first or later, are slow for reasons of their own."""

import random

import pytest

from deltaserve.control.sched.recent import Recent
from deltaserve.control.sched.step_cost import StepCost
from deltaserve.control.sched.step_target import StepTarget

SLOW_S, QUICK_S = 10.0, 0.01


def test_nothing_is_known_before_there_is_enough() -> None:
    recent = Recent(enough=3)
    found = []
    for _ in range(3):
        recent.add(QUICK_S)
        found.append(recent.quick())
    assert found == [None, None, QUICK_S]


@pytest.mark.parametrize("seed", range(20))
def test_a_quarter_of_quick_steps_is_enough(seed: int) -> None:
    times = [SLOW_S] * 24 + [QUICK_S] * 8
    random.Random(seed).shuffle(times)
    recent = Recent()
    for seconds in times:
        recent.add(seconds)
    assert recent.quick() == QUICK_S


def test_lasting_slowness_is_noticed() -> None:
    recent = Recent()
    for seconds in [QUICK_S] * 100 + [SLOW_S] * 32:
        recent.add(seconds)
    assert recent.quick() == SLOW_S


@pytest.mark.parametrize("slow", [{0}, {0, 1, 2}, {0, 2, 4}, {7}, {0, 30, 60}])
def test_the_cost_of_a_step_is_that_of_most(slow: set[int]) -> None:
    cost = StepCost()
    for step in range(80):
        num_tokens = (1, 2, 4, 8)[step % 4]
        cost.learn(num_tokens, SLOW_S if step in slow else 0.005 + 0.001 * num_tokens)
    assert cost.seconds(8) == pytest.approx(0.013, rel=0.3)


def test_one_slow_prompt_leaves_room_for_the_next() -> None:
    target = StepTarget(0.05)
    target.learn(0, 512, SLOW_S)
    for _ in range(3):
        target.learn(1, 0, QUICK_S)
        target.learn(0, 512, 0.02)
    assert target.extend_len(1, most=512, least=16) == 512
