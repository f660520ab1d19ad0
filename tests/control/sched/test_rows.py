"""Rows: handed out once, opened and closed at the executor exactly when it has to know."""

import pytest

from deltaserve.control.sched.running import Rows
from deltaserve.core.errors import StateError
from deltaserve.core.ids import PoolId
from tests.control.sched.toys import make_request


def test_a_row_is_opened_and_closed_once() -> None:
    rows = Rows(2)
    request = make_request([1, 2, 3], max_tokens=5)
    request.append(9)
    rows.take(request)
    (opened,) = rows.take_opens()
    assert (opened.row, opened.tokens, opened.prompt_len) == (request.row, bytes(request.tokens), 3)
    assert opened.sampling is request.sampling
    row = request.row
    rows.give_back(request)
    assert rows.has_news
    assert rows.take_closes() == (row,)
    assert (request.row, rows.num_free, rows.has_news) == (None, 2, False)
    assert rows.take_opens() == ()


def test_a_row_given_back_before_a_plan_is_never_told() -> None:
    rows = Rows(2)
    request = make_request([1], max_tokens=1)
    rows.take(request)
    rows.give_back(request)
    assert (rows.take_opens(), rows.take_closes(), rows.has_news) == ((), (), False)


def test_a_reused_row_is_closed_and_opened_in_one_plan() -> None:
    rows = Rows(1)
    first, second = make_request([1], max_tokens=1), make_request([2], max_tokens=1)
    rows.take(first)
    rows.take_opens()
    row = first.row
    rows.give_back(first)
    rows.take(second)
    assert second.row == row
    assert rows.take_closes() == (row,)
    assert [opened.row for opened in rows.take_opens()] == [row]


def test_taking_a_row_makes_all_pages_news() -> None:
    rows = Rows(1)
    request = make_request([1], max_tokens=1)
    request.tabled[PoolId(0)] = 7
    rows.take(request)
    assert not request.tabled


def test_giving_back_no_row_is_fine_and_a_full_house_raises() -> None:
    rows = Rows(1)
    rows.give_back(make_request([1], max_tokens=1))
    assert rows.num_free == 1
    rows.take(make_request([1], max_tokens=1))
    with pytest.raises((IndexError, StateError)):
        rows.take(make_request([1], max_tokens=1))
