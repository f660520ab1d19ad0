"""A first step that takes ten seconds (a kernel is compiled, memory is touched, a graph recorded) refuses nobody."""

from dataclasses import replace

import pytest

from deltaserve.control.sched.plan import StepPlan, StepResult
from deltaserve.sim.cluster import Shape
from deltaserve.sim.process import Answer, SimWorker
from tests.control.engine.duo import DECODE, PREFILL, Duo

SLOW_S, QUICK_S = 10.0, 0.01
PROMPT_LEN, BURST, MAX_TOKENS = 40, 64, 40
DEADLINE_S = 600.0


def slow_at_first(worker: SimWorker, num_slow: int, rhythm: int, is_told: bool = False) -> None:
    """Let every `rhythm`-th of its first steps take ten seconds, so many times: lengths that come for the first
    time. `is_told`: the executor says that such a step is not typical."""
    execute, num_steps = worker.executor.execute, 0

    def timed(plan: StepPlan) -> StepResult:
        nonlocal num_steps
        is_slow = num_steps % rhythm == 0 and num_steps < num_slow * rhythm
        num_steps += 1
        worker.pace.step_s = QUICK_S if num_steps % rhythm or num_steps >= num_slow * rhythm else SLOW_S
        return replace(execute(plan), seconds=SLOW_S if is_slow else QUICK_S, is_typical=not (is_slow and is_told))

    worker.pace.step_s = SLOW_S
    worker.executor.execute = timed  # type: ignore[method-assign]


def ask(duo: Duo, number: int) -> Answer:
    prompt = [(number + place) % 50 for place in range(PROMPT_LEN)]
    generation = replace(duo.cluster.generation(prompt, MAX_TOKENS), deadline_s=DEADLINE_S)
    return duo.cluster.front.submit(generation)


@pytest.mark.parametrize(("num_slow", "rhythm"), [(1, 1), (3, 1), (4, 2), (6, 3)])
def test_a_burst_behind_slow_first_steps_is_taken_whole(num_slow: int, rhythm: int) -> None:
    duo = Duo(Shape(prefill_pages=400, decode_pages=400, max_running=8, peer_lost_s=60.0))
    for name in (PREFILL, DECODE):
        slow_at_first(duo.worker(name), num_slow, rhythm)
    asked = []
    for number in range(BURST):
        asked.append(ask(duo, number))
        duo.world.run(until=duo.world.now + 0.2)
    duo.until(lambda: all(answer.ends for answer in asked), limit_s=DEADLINE_S)
    assert [answer.error for answer in asked if answer.error is not None] == []


def test_a_burst_is_taken_whole_whatever_the_first_steps_took_if_they_say_so() -> None:
    """So many steps are recorded that most of the last ones were slow."""
    duo = Duo(Shape(prefill_pages=400, decode_pages=400, max_running=8, peer_lost_s=60.0))
    for name in (PREFILL, DECODE):
        slow_at_first(duo.worker(name), num_slow=16, rhythm=1, is_told=True)
    for number in range(4):
        ask(duo, 1000 + number)
    duo.world.run(until=duo.world.now + 17 * SLOW_S)
    asked = []
    for number in range(BURST):
        asked.append(ask(duo, number))
    duo.until(lambda: all(answer.ends for answer in asked), limit_s=DEADLINE_S)
    assert [answer.error for answer in asked if answer.error is not None] == []
