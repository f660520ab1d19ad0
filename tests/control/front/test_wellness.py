"""Not ready: too much in quarantine, or no progress with work."""

import msgspec
import pytest

from deltaserve.control.front.wellness import COLD_NO_PROGRESS_S, COLD_STEPS, QUARANTINE_PATIENCE_S, Wellness
from deltaserve.core.errors import FailReason, RequestFailed
from deltaserve.core.wire.messages import Status
from tests.control.front.cluster import Cluster, status


def report(num_steps: int, num_running: int = 1, quarantined: int = 0) -> Status:
    changes = {"metrics": {"deltaserve_steps_total": float(COLD_STEPS + num_steps)}, "num_running": num_running}
    return msgspec.structs.replace(status(), quarantined_pages=(quarantined,), **changes)


def complaints(*reports: tuple[float, Status]) -> list[bool]:
    wellness = Wellness()
    return [wellness.hear(said, now) is not None for now, said in reports]


def test_work_without_a_step_for_ten_seconds() -> None:
    found = complaints((0.0, report(1)), (9.0, report(1)), (10.5, report(1)), (11.0, report(2)), (12.0, report(2)))
    assert found == [False, False, True, False, False]


def test_nothing_to_do_is_no_reason() -> None:
    assert not any(complaints((0.0, report(1, 0)), (100.0, report(1, 0)), (100.5, report(1)), (109.0, report(1))))


def test_a_slow_machine_gets_more_time() -> None:
    """Its slowest step took 30 s: the next one may take 90."""
    found = complaints((0.0, report(1)), (30.0, report(2)), (110.0, report(2)), (121.0, report(2)))
    assert found == [False, False, False, True]


def test_first_steps_may_compile() -> None:
    late = COLD_NO_PROGRESS_S + 0.5
    found = complaints((0.0, report(-5)), (60.0, report(-5)), (late, report(-5)), (late + 1, report(-4)))
    assert found == [False, False, True, False]


def test_reports_without_a_count_say_nothing() -> None:
    assert complaints((0.0, status()), (100.0, status())) == [False, False]


def test_a_quarter_of_a_pool_that_stays_in_quarantine() -> None:
    few, many = report(1, 0, 250), report(1, 0, 251)
    found = complaints((0.0, few), (1.0, many), (2.5, many), (3.1, many), (3.6, few), (4.0, many))
    assert found == [False, False, False, True, False, False]


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_the_front_says_why_it_is_not_ready_and_comes_back(name: str) -> None:
    cluster = Cluster().all_ready()
    cluster.say(name, report(1, 0, 300))
    assert cluster.front.ready() is None  # it may be over in a moment
    cluster.now += QUARANTINE_PATIENCE_S
    cluster.say(name, report(1, 0, 300))
    assert cluster.front.ready() == f"{name}: 300 of 1000 pages in quarantine"
    with pytest.raises(RequestFailed) as caught:
        cluster.submit(1)
    assert caught.value.reason is FailReason.NO_PEER
    cluster.say(name, report(1, 0, 10))
    assert cluster.front.ready() is None
    cluster.submit(2)


def test_a_restart_forgets_what_was_wrong() -> None:
    cluster = Cluster().all_ready()
    cluster.say("decode-0", report(1, 0, 300))
    cluster.reboot("decode-0")
    cluster.hello("decode-0")
    assert cluster.front.ready() is None
