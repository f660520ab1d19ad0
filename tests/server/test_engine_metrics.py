"""What the engine tells, on the front's /metrics."""

from prometheus_client import CollectorRegistry, generate_latest

from deltaserve.server.prometheus import EngineMetrics


def scrape(workers: object, **stats: object) -> str:
    registry = CollectorRegistry()
    registry.register(EngineMetrics(lambda: {"workers": workers, **stats}))
    return generate_latest(registry).decode()


def test_each_worker_is_a_label() -> None:
    metrics = {'deltaserve_pages{pool="0",state="free"}': 7.0, "deltaserve_steps_total": 3.0}
    workers = [
        {"name": "prefill-0", "role": "prefill", "status": {"metrics": metrics}},
        {"name": "decode-0", "role": "decode", "status": {"metrics": {"deltaserve_steps_total": 5.0}}},
    ]
    text = scrape(workers)
    assert 'deltaserve_pages{instance="prefill-0",pool="0",role="prefill",state="free"} 7.0' in text
    assert 'deltaserve_steps_total{instance="prefill-0",role="prefill"} 3.0' in text
    assert 'deltaserve_steps_total{instance="decode-0",role="decode"} 5.0' in text
    assert "# TYPE deltaserve_steps_total counter" in text


def test_a_worker_without_a_status_tells_only_that_it_is_known() -> None:
    odd = {"name": "decode-0", "role": "decode", "state": "ready", "status": {"metrics": {"not a name": 1.0}}}
    text = scrape([{"name": "prefill-0", "role": "prefill", "state": "lost", "breaker": "open", "status": None}, odd])
    samples = {line for line in text.splitlines() if not line.startswith("#")}
    assert samples == {
        'deltaserve_worker_up{instance="prefill-0",role="prefill"} 0.0',
        'deltaserve_worker_up{instance="decode-0",role="decode"} 1.0',
        'deltaserve_worker_breaker_open{instance="prefill-0",role="prefill"} 1.0',
        'deltaserve_worker_breaker_open{instance="decode-0",role="decode"} 0.0',
    }
    assert scrape(None) == ""


def test_the_control_plane_is_named_by_what_it_counts() -> None:
    links = {'deltaserve_link_frames_total{kind="sent"}': 4.0}
    text = scrape(
        [], rooms=2, draining=True, counts={"submitted": 5, "retried_peer_lost": 1}, links=links, integrity=None
    )
    assert "deltaserve_front_rooms 2.0" in text
    assert "deltaserve_front_draining 1.0" in text
    assert 'deltaserve_front_events_total{event="retried_peer_lost"} 1.0' in text
    assert 'deltaserve_link_frames_total{instance="front",kind="sent",role="front"} 4.0' in text
    assert "# HELP deltaserve_front_rooms Rooms of the front, waiting and streaming" in text
