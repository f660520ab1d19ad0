"""What steps cost, and what a target for their length makes of it."""

import pytest

from deltaserve.control.sched.step_cost import StepCost
from deltaserve.control.sched.step_target import StepTarget
from tests.control.sched.toys import Bench, config, make_request

MS = 0.001


def test_a_line_through_what_steps_took() -> None:
    cost = StepCost()
    assert (cost.seconds(4), cost.price, cost.fitting(1.0)) == (None, None, None)
    for count in (1, 2, 4, 8) * 10:
        cost.learn(count, 5 * MS + count * MS)
    assert cost.seconds(20) == pytest.approx(25 * MS)
    assert cost.price == pytest.approx(0.2)
    assert cost.fitting(15.5 * MS) == 10


def test_steps_of_one_length_tell_no_line() -> None:
    """One row more is tried while they are short enough, and one less when they are not."""
    cost = StepCost()
    for _ in range(20):
        cost.learn(4, 10 * MS)
    assert cost.price is None
    assert (cost.fitting(12 * MS), cost.fitting(9 * MS)) == (5, 3)


def test_contexts_that_grow_lengthen_steps_of_any_number_of_rows() -> None:
    cost = StepCost()
    for count in (1, 2, 4, 8) * 10:
        cost.learn(count, 5 * MS + count * MS)
    for _ in range(400):
        cost.learn(8, 30 * MS)
    assert cost.seconds(8) == pytest.approx(30 * MS, rel=0.05)
    assert (cost.seconds(10) or 0.0) > 30 * MS


def test_without_a_target_everything_fits() -> None:
    target = StepTarget(None)
    for count in (1, 2, 4, 8) * 10:
        target.learn(count, 0, 1.0)
    assert (target.most_rows(16), target.extend_len(8, 512, 4)) == (16, 512)


def test_rows_up_to_the_target_and_prompts_in_what_it_leaves() -> None:
    target = StepTarget(20 * MS)
    assert target.most_rows(64) == 64
    for count in (1, 2, 4, 8) * 10:
        target.learn(count, 0, 5 * MS + count * MS)
    assert target.most_rows(64) == 15
    assert target.extend_len(8, 512, 4) == 4, "what a token of a prompt takes is not known yet"
    for _ in range(100):
        target.learn(8, 10, 18 * MS)
    assert target.extend_len(8, 512, 4) == pytest.approx(14, abs=1)
    assert target.extend_len(0, 512, 4) == 512, "nobody decodes"
    assert target.extend_len(30, 512, 4) == 4, "a prompt goes on all the same"


def test_a_target_below_one_row_still_serves_one() -> None:
    target = StepTarget(1 * MS)
    for count in (1, 2, 4) * 10:
        target.learn(count, 0, 5 * MS)
    assert target.most_rows(64) == 1


def test_the_scheduler_admits_no_more_than_the_target_allows() -> None:
    bench = Bench(config(max_running=8, step_target_s=6.1 * MS), (256,))
    requests = [make_request([first, 2, 3], 20 + 4 * first) for first in range(8)]
    bench.add(*requests)
    batches = []
    while len(bench.scheduler.waiting) or len(bench.scheduler.running):
        batches.append(run_step(bench))
    assert max(batches) == 8, "nothing was known yet, and nobody who runs is taken out of the batch"
    assert all(request.output_len == request.sampling.max_tokens for request in requests)
    bench.add(*(make_request([first, 2, 3], 20) for first in range(8)))
    batches = []
    while len(bench.scheduler.waiting) or len(bench.scheduler.running):
        batches.append(run_step(bench))
    assert max(batches) == 4


def run_step(bench: Bench) -> int:
    """2 ms and one for each token. How many run."""
    bench.scheduler.waiting.admit(0.0)
    plan = bench.plan()
    for item in bench.commit(plan, seconds=(2 + plan.num_tokens) * MS):
        if item.request.output_len >= item.request.sampling.max_tokens:
            bench.scheduler.finish(item.request)
    return len(plan.items)
