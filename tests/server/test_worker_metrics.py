"""Worker metrics on the front's /metrics."""

from prometheus_client import CollectorRegistry, generate_latest

from deltaserve.server.worker_metrics import WorkerMetrics


def scrape(workers: object) -> str:
    registry = CollectorRegistry()
    registry.register(WorkerMetrics(lambda: {"workers": workers}))
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


def test_a_worker_without_a_status_and_odd_names_are_left_out() -> None:
    odd = {"name": "decode-0", "role": "decode", "status": {"metrics": {"not a name": 1.0}}}
    assert scrape([{"name": "prefill-0", "role": "prefill", "status": None}, odd]) == ""
    assert scrape(None) == ""
