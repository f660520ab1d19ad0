"""A step in which something was compiled or recorded teaches nothing of those to come: no rate, no cost, no pace."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from deltaserve.control.sched.plan import StepPlan, StepResult
from deltaserve.core.ids import StepIndex
from deltaserve.sim.cluster import Shape
from deltaserve.sim.process import SimWorker
from tests.control.engine.duo import DECODE, PREFILL, Duo

SLOW_S, DRAFT_S = 10.0, 3.0
NUM_STEPS = 40
"""Steps of one answer: more than enough for every rate to be learned."""


def told_of(duo: Duo, is_typical: bool) -> None:
    """Every step of both workers takes ten seconds, by what its result says."""

    def telling(worker: SimWorker) -> Callable[[StepPlan], StepResult]:
        execute = worker.executor.execute

        def told(plan: StepPlan) -> StepResult:
            return replace(execute(plan), seconds=SLOW_S, draft_seconds=DRAFT_S, is_typical=is_typical)

        return told

    for name in (PREFILL, DECODE):
        worker = duo.worker(name)
        worker.executor.execute = telling(worker)  # type: ignore[assignment, method-assign]


def prefill_rate(duo: Duo) -> float:
    return duo.metrics(PREFILL)["deltaserve_prefill_tokens_per_second"]


def decode_step_s(duo: Duo) -> float:
    return duo.metrics(DECODE)["deltaserve_decode_step_seconds"]


def target_cost(duo: Duo) -> float:
    """What --itl-target-ms admits rows by."""
    return duo.worker(DECODE).instance.parts.scheduler.running.step_target.cost.seconds(1) or 0.0


def extend_cost(duo: Duo) -> float:
    """What --itl-target-ms shares steps with prompts by."""
    return duo.worker(PREFILL).instance.parts.scheduler.running.step_target.extend_s or 0.0


def draft_pass(duo: Duo) -> float:
    return duo.worker(DECODE).instance.parts.scheduler.steps.speculation._pass_s


LEARNED: dict[str, Callable[[Duo], float]] = {
    "prompt tokens a second": prefill_rate,
    "a decode step": decode_step_s,
    "what a row costs": target_cost,
    "what a prompt's token costs": extend_cost,
    "a draft head's pass": draft_pass,
}


def served(is_typical: bool) -> Duo:
    duo = Duo(Shape(max_running=8, max_drafts=2))
    told_of(duo, is_typical)
    for number in range(12):
        duo.serve([(number + place) % 50 for place in range(24)], max_tokens=NUM_STEPS // 8)
    return duo


@pytest.fixture(scope="module")
def worlds() -> dict[bool, Duo]:
    """By whether the steps were typical."""
    return {is_typical: served(is_typical) for is_typical in (True, False)}


@pytest.mark.parametrize("learned", LEARNED)
def test_nothing_is_learned_of_steps_that_are_not_typical(worlds: dict[bool, Duo], learned: str) -> None:
    fresh = LEARNED[learned](Duo(Shape(max_running=8)))
    assert LEARNED[learned](worlds[False]) == fresh
    assert LEARNED[learned](worlds[True]) != fresh


def test_seconds_are_told_of_typical_steps_alone() -> None:
    result = StepResult(StepIndex(0), (), seconds=2.0)
    assert result.typical_s == 2.0
    assert replace(result, is_typical=False).typical_s is None
    assert replace(result, seconds=0.0).typical_s is None
