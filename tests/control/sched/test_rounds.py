"""Members of an expert group: who computes, who joins, who waits."""

from deltaserve.control.sched.plan import StepPlan, WorkList
from deltaserve.control.sched.rounds import MemberRounds, RoundPart
from deltaserve.core.ids import StepIndex


def plan(step: int) -> StepPlan:
    return StepPlan(StepIndex(step), (), WorkList(256))


def test_one_that_has_nothing_to_do_joins_when_another_has_begun() -> None:
    rounds = MemberRounds()
    assert rounds.is_resting
    assert rounds.next_part(has_begun=False) is None
    assert rounds.next_part(has_begun=True) is RoundPart.NONE


def test_plans_are_computed_in_order_whoever_has_begun() -> None:
    rounds = MemberRounds()
    for step in (1, 2):
        rounds.submit(plan(step))
    assert not rounds.is_resting
    assert rounds.next_part(has_begun=True) == plan(1)
    assert rounds.next_part(has_begun=False) == plan(2)


def test_one_that_has_just_computed_joins_when_no_plan_follows() -> None:
    rounds = MemberRounds()
    rounds.submit(plan(1))
    rounds.next_part(has_begun=False)
    assert rounds.next_part(has_begun=True) is None
    rounds.rest()
    assert rounds.next_part(has_begun=True) is RoundPart.NONE
    rounds.submit(plan(2))
    assert rounds.next_part(has_begun=True) == plan(2)
