"""What the engine tells, on the front's /metrics."""

from prometheus_client import CollectorRegistry, generate_latest

from deltaserve.control.front.client import EngineStats, WorkerStats
from deltaserve.core.wire.messages import Status
from deltaserve.server.prometheus import EngineMetrics


def scrape(stats: EngineStats) -> str:
    registry = CollectorRegistry()
    registry.register(EngineMetrics(lambda: stats))
    return generate_latest(registry).decode()


def reporting(metrics: dict[str, float]) -> Status:
    return Status(
        num_waiting=0,
        waiting_tokens=0,
        num_running=0,
        free_pages=(),
        evictable_pages=(),
        quarantined_pages=(),
        num_pages=(),
        prefill_tokens_per_s=0.0,
        decode_step_s=0.0,
        metrics=metrics,
    )


def test_each_worker_is_a_label() -> None:
    metrics = {'deltaserve_pages{pool="0",state="free"}': 7.0, "deltaserve_steps_total": 3.0}
    workers = (
        WorkerStats("prefill-0", "prefill", "ready", status=reporting(metrics)),
        WorkerStats("decode-0", "decode", "ready", status=reporting({"deltaserve_steps_total": 5.0})),
    )
    text = scrape(EngineStats(workers=workers))
    assert 'deltaserve_pages{instance="prefill-0",pool="0",role="prefill",state="free"} 7.0' in text
    assert 'deltaserve_steps_total{instance="prefill-0",role="prefill"} 3.0' in text
    assert 'deltaserve_steps_total{instance="decode-0",role="decode"} 5.0' in text
    assert "# TYPE deltaserve_steps_total counter" in text


def test_a_worker_without_a_status_tells_only_what_the_front_knows_of_it() -> None:
    lost = WorkerStats("prefill-0", "prefill", "lost", breaker="open", rooms=3)
    odd = WorkerStats("decode-0", "decode", "ready", resident_keys=9, status=reporting({"not a name": 1.0}))
    lines = scrape(EngineStats(workers=(lost, odd))).splitlines()
    samples = {line for line in lines if line.startswith("deltaserve_worker_")}
    assert samples == {
        'deltaserve_worker_up{instance="prefill-0",role="prefill"} 0.0',
        'deltaserve_worker_up{instance="decode-0",role="decode"} 1.0',
        'deltaserve_worker_breaker_open{instance="prefill-0",role="prefill"} 1.0',
        'deltaserve_worker_breaker_open{instance="decode-0",role="decode"} 0.0',
        'deltaserve_worker_rooms{instance="prefill-0",role="prefill"} 3.0',
        'deltaserve_worker_rooms{instance="decode-0",role="decode"} 0.0',
        'deltaserve_worker_resident_keys{instance="prefill-0",role="prefill"} 0.0',
        'deltaserve_worker_resident_keys{instance="decode-0",role="decode"} 9.0',
    }
    assert not any("not a name" in line for line in lines)


def test_the_revision_that_a_worker_serves_is_a_label() -> None:
    text = scrape(EngineStats(workers=(WorkerStats("decode-0", "decode", "ready", revision="0a1b2c3d4e5f"),)))
    assert 'deltaserve_worker_revision{instance="decode-0",revision="0a1b2c3d4e5f",role="decode"} 1.0' in text


def test_the_control_plane_is_named_by_what_it_counts() -> None:
    links = {'deltaserve_link_frames_total{kind="sent"}': 4.0}
    counts = {"submitted": 5, "retried_peer_lost": 1}
    text = scrape(EngineStats(rooms=2, draining=True, counts=counts, links=links))
    assert "deltaserve_front_rooms 2.0" in text
    assert "deltaserve_front_draining 1.0" in text
    assert 'deltaserve_front_events_total{event="retried_peer_lost"} 1.0' in text
    assert 'deltaserve_link_frames_total{instance="front",kind="sent",role="front"} 4.0' in text
    assert "# HELP deltaserve_front_rooms Rooms of the front, waiting and streaming" in text
