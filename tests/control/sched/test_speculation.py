"""How many guesses are verified and made, as what steps have cost and how often guesses were right allow."""

import pytest

from deltaserve.control.sched.plan import PlanItem, Sampled, TokenValues
from deltaserve.control.sched.request import Request
from deltaserve.control.sched.speculation import Speculation
from deltaserve.control.sched.step_cost import StepCost
from deltaserve.core.ids import RowId
from deltaserve.core.tokens import pack_u32
from tests.control.sched.toys import make_request

MS = 0.001
GUESSES = 4


def after(per_token: float, pass_s: float = 0.0) -> Speculation:
    """Steps have cost 10 ms, `per_token` for each token, and a draft head `pass_s` for each of its passes."""
    cost = StepCost()
    speculation = Speculation(cost)
    for count in (2, 4, 6, 8) * 10:
        cost.learn(count, 10 * MS + count * per_token)
        speculation.learn_draft([item(wanted=GUESSES)], [GUESSES], GUESSES * pass_s)
    return speculation


def item(wanted: int) -> PlanItem:
    return PlanItem(RowId(0), 9, 1, TokenValues(bytes(4)), samples=True, wanted_drafts=wanted)


def guessing(speculation: Speculation, are_right: bool) -> Request:
    request = make_request([1, 2, 3], 40)
    for _ in range(60):
        request.guesses.drafts = pack_u32([7] * GUESSES)
        speculation.count(request, item(GUESSES), (Sampled(7 if are_right else 8),))
    return request


@pytest.mark.parametrize(
    ("per_token", "are_right", "expected"),
    [
        pytest.param(0.1 * MS, True, GUESSES, id="cheap and right"),
        pytest.param(0.1 * MS, False, 0, id="cheap and wrong"),
        pytest.param(600 * MS, True, 0, id="dear and right"),
    ],
)
def test_guesses_are_verified_where_they_pay(per_token: float, are_right: bool, expected: int) -> None:
    speculation = after(per_token)
    requests = [guessing(speculation, are_right) for _ in range(8)]
    chosen = speculation.choose(dict.fromkeys(requests, GUESSES), 8)
    assert [chosen.get(request, 0) for request in requests] == [expected] * 8


@pytest.mark.parametrize(
    ("per_token", "are_right", "expected"),
    [
        pytest.param(0.1 * MS, True, True, id="cheap and right"),
        pytest.param(0.1 * MS, False, False, id="cheap and wrong"),
        pytest.param(600 * MS, True, False, id="dear and right"),
    ],
)
def test_a_step_waits_for_guesses_that_pay(per_token: float, are_right: bool, expected: bool) -> None:
    """Others are asked about now and then, so that their price stays known."""
    speculation = after(per_token)
    requests = [guessing(speculation, are_right) for _ in range(8)]
    most = dict.fromkeys(requests, GUESSES)
    assert [speculation.pays(most, 8) for _ in range(300)] == [expected] * 300
    assert not speculation.pays({}, 8)
    num_planned_behind = 0
    while not speculation.pays(most, 8):
        speculation.go_without()
        num_planned_behind += 1
    assert num_planned_behind in ([0] if expected else range(100, 130))
    assert 0 < sum(speculation.choose(most, 8).values()) <= (8 * GUESSES if expected else 4)
    assert speculation.pays(most, 8) is expected
    assert Speculation(None).pays(most, 8)
    assert Speculation(StepCost()).pays(most, 8)


def test_while_the_price_is_unknown_steps_of_two_lengths_are_made() -> None:
    """One row whose guesses are always as many would else have steps of one length alone, and never learn."""
    cost = StepCost()
    speculation = Speculation(cost)
    request = make_request([1, 2, 3], 40)
    lengths = []
    for _ in range(40):
        lengths.append(1 + sum(speculation.choose({request: GUESSES}, 1).values()))
        cost.learn(lengths[-1], 10 * MS + lengths[-1] * MS)
    assert {1, 1 + GUESSES} <= set(lengths[:8])
    assert cost.price == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize(
    ("pass_s", "are_right", "expected"),
    [
        pytest.param(0.01 * MS, False, {GUESSES}, id="free and wrong"),
        pytest.param(1 * MS, True, {GUESSES}, id="cheap and right"),
        pytest.param(1 * MS, False, {0, 1}, id="cheap and wrong"),
        pytest.param(40 * MS, True, {0, 1}, id="dear and right"),
    ],
)
def test_a_head_guesses_as_far_as_it_pays(pass_s: float, are_right: bool, expected: set[int]) -> None:
    speculation = after(0.1 * MS, pass_s)
    requests = [guessing(speculation, are_right) for _ in range(2)]
    assert speculation.depth(requests, GUESSES) in expected


def test_a_head_that_does_not_pay_is_tried_again() -> None:
    speculation = after(0.1 * MS, 2 * MS)
    requests = [guessing(speculation, are_right=False)]
    depths = [speculation.depth(requests, GUESSES) for _ in range(300)]
    assert 2 <= depths.count(GUESSES) <= 3
    assert set(depths) <= {0, 1, GUESSES}


def test_all_of_them_where_that_is_asked_for() -> None:
    speculation = Speculation(None)
    requests = [guessing(speculation, are_right=False)]
    speculation.learn_draft([item(wanted=GUESSES)], [GUESSES], 1.0)
    assert speculation.choose(dict.fromkeys(requests, GUESSES), 1) == dict.fromkeys(requests, GUESSES)
    assert speculation.depth(requests, GUESSES) == GUESSES


def test_without_a_price_a_head_guesses_as_far_as_asked() -> None:
    speculation = Speculation(StepCost())
    assert speculation.depth([make_request([1, 2], 4)], GUESSES) == GUESSES


def test_guesses_of_a_head_must_be_as_likely_as_their_time_is_dear() -> None:
    """Beside many rows a place in the step is worth more than beside one, and what is made then is verified."""
    speculation = after(1 * MS, 0.5 * MS)
    requests = [guessing(speculation, are_right=True)]
    few, many = speculation.least_likely(1, GUESSES), speculation.least_likely(16, GUESSES)
    assert 0.1 < few < 0.5 < many < 1.0
    assert speculation.choose(dict.fromkeys(requests, GUESSES), 1) == dict.fromkeys(requests, GUESSES)
    assert speculation.least_likely(1, 0) == 0.0
    assert after(1 * MS).least_likely(1, GUESSES) == 0.0, "guesses that take no time are made, and weighed afterwards"
    assert Speculation(None).least_likely(1, GUESSES) == 0.0


def test_a_guess_that_was_not_likely_enough_took_its_pass() -> None:
    speculation = after(1 * MS, 0.0)
    for _ in range(80):
        speculation.learn_draft([item(wanted=GUESSES)], [1], 1 * MS)
    assert speculation.least_likely(1, GUESSES) == pytest.approx(1.5 / 11.5, rel=0.05)
