"""What a worker's log says of its load."""

from deltaserve.core.ids import PeerName, Role
from deltaserve.process.worker.build import make_instance
from deltaserve.process.worker.load_line import LoadLine
from deltaserve.sim.cluster import Shape, worker_config

METRICS = {
    "deltaserve_num_running_reqs": 12.0,
    "deltaserve_num_queue_reqs": 3.0,
    "deltaserve_blocked_need_pages": 9.0,
    'deltaserve_pages{pool="0",state="free"}': 20.0,
    'deltaserve_pages{pool="0",state="granted"}': 7.0,
    'deltaserve_pages_evictable{pool="0"}': 44.0,
    'deltaserve_pages_protected{pool="0"}': 310.0,
    'deltaserve_pages_usage{pool="0"}': 0.93,
    'deltaserve_pages_evicted_total{pool="0"}': 130.0,
    "deltaserve_steps_total": 100.0,
    "deltaserve_computed_tokens_total": 900.0,
    "deltaserve_retractions_total": 2.0,
    "deltaserve_admissions_blocked_total": 41.0,
}


def test_it_says_who_runs_and_waits_what_is_missing_and_what_happened() -> None:
    line = LoadLine(10.0)
    assert line.due(METRICS, 5.0) == (
        "12 running, 3 waiting, 9 pages needed by the first that was refused memory; "
        "pool 0: 93% used, 20 free, 7 granted, 44 evictable, 310 protected; "
        "since the last line 100 steps, 900 tokens, 130 pages evicted, 2 retractions, 41 refusals of memory"
    )
    later = line.due(METRICS | {"deltaserve_steps_total": 103.0}, 15.0)
    assert later is not None
    assert later.endswith("since the last line 3 steps, 0 tokens")


def test_it_comes_once_in_a_while_and_not_from_an_idle_worker() -> None:
    line = LoadLine(10.0)
    idle = METRICS | {"deltaserve_num_queue_reqs": 0.0, "deltaserve_steps_total": 0.0}
    assert line.due(idle, 0.0) is None
    assert line.due(METRICS, 1.0) is not None
    assert line.due(METRICS, 10.9) is None
    assert line.due(METRICS, 11.0) is not None, "somebody waits"
    assert line.due(METRICS | {"deltaserve_num_queue_reqs": 0.0}, 30.0) is None


def test_every_role_has_one() -> None:
    """And each pool its part of it: pages, windows, states."""
    shape = Shape(num_pools=3, window_len=9)
    for role in (Role.PREFILL, Role.DECODE, Role.UNIFIED):
        metrics = make_instance(worker_config(shape, PeerName(f"{role.value}-0"), role, 1)).metrics()
        line = LoadLine(10.0).due(metrics | {"deltaserve_steps_total": 1.0}, 0.0)
        assert line is not None
        assert line.startswith("0 running, 0 waiting; pool 0: 0% used, ")
        assert "quarantined" not in line
        assert all(f"pool {pool}: 0% used, " in line for pool in range(3))
