"""When a child is started again, and when it is given up."""

import pytest

from deltaserve.launch.restarts import GiveUp, RestartPolicy, Restarts

POLICY = RestartPolicy(max_restarts=3, window_s=60.0, first_delay_s=0.2, max_delay_s=0.5, start_timeout_s=100.0)


def life(starts: Restarts, began: float, ready: bool, ended: float) -> float:
    """One start, ready or not; the delay before the next."""
    starts.began(began)
    if ready:
        starts.became_ready()
    return starts.ended(ended)


def test_delays_double_up_to_a_limit() -> None:
    starts = Restarts(POLICY)
    assert [life(starts, t, True, t) for t in (0.0, 1.0, 2.0)] == [0.2, 0.4, 0.5]


def test_too_many_ends_of_a_ready_child_within_the_window() -> None:
    starts = Restarts(POLICY)
    for t in (0.0, 20.0, 40.0):
        life(starts, t, True, t)
    with pytest.raises(GiveUp, match="3 restarts within 60 s"):
        life(starts, 60.0, True, 60.0)


def test_a_ready_child_that_ends_now_and_then_is_started_for_ever() -> None:
    starts = Restarts(POLICY)
    assert {life(starts, t * 30.0, True, t * 30.0) for t in range(3, 100)} == {0.2, 0.4, 0.5}


def test_starts_that_never_become_ready_count_however_slow_they_are() -> None:
    """A worker that is out of memory an hour into each start."""
    starts = Restarts(POLICY)
    for i in range(3):
        life(starts, i * 3600.0, False, (i + 1) * 3600.0)
    with pytest.raises(GiveUp, match="3 restarts and not ready after the last"):
        life(starts, 10_800.0, False, 14_400.0)


def test_one_ready_start_makes_old_failures_forgotten() -> None:
    starts = Restarts(POLICY)
    for i in range(3):
        life(starts, i * 3600.0, False, (i + 1) * 3600.0)
    assert life(starts, 10_800.0, True, 14_400.0) == 0.2


def test_a_start_that_takes_too_long_is_told_once() -> None:
    starts = Restarts(POLICY)
    assert not starts.take_overdue(1000.0)
    starts.began(10.0)
    assert starts.overdue_at == 110.0
    assert [starts.take_overdue(t) for t in (109.0, 110.0, 111.0)] == [False, True, False]
    starts.began(110.0)
    starts.became_ready()
    assert not starts.take_overdue(1e9)
