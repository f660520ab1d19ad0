"""Prometheus metrics of the front, in a registry handed in. Names are vLLM's and SGLang's where they mean the same."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from deltaserve.server.worker_metrics import WorkerMetrics

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_ITL_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.5)
_E2E_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
MAX_FIELD_NAMES = 256
"""Distinct ignored field names that are remembered (for one warning each)."""

Stats = Callable[[], Mapping[str, object]]


class ServerMetrics:
    """Counters of one front. Times in seconds."""

    def __init__(self, registry: CollectorRegistry, stats: Stats) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"deltaserve_{name}", text, buckets=buckets, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"deltaserve_{name}", text, labels, registry=registry)

        self._registry = registry
        self._warned: set[str] = set()
        self.responses = counter("http_responses", "Answers by path and status", "path", "status")
        self.errors = counter("request_errors", "Requests not served, by error code", "code")
        self.ttft_s = histogram("time_to_first_token_seconds", "Request read to first token", _TTFT_BUCKETS)
        self.itl_s = histogram("inter_token_latency_seconds", "Between two tokens of a sample", _ITL_BUCKETS)
        self.e2e_s = histogram("e2e_request_latency_seconds", "Request read to last token", _E2E_BUCKETS)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished samples")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens found in a cache", "side")
        self.generation_tokens = counter("generation_tokens", "Output tokens")
        self.ignored_fields = counter("ignored_fields", "Unknown request fields that were ignored")
        self.streams_cut = counter("streams_cut", "Streams cut because their reader was too slow")
        self.clients_gone = counter("clients_gone", "Requests whose client left before the answer was complete")
        self.running = Gauge("deltaserve_num_requests_running", "Samples that have a first token", registry=registry)
        self.queued = Gauge("deltaserve_num_requests_waiting", "Samples before their first token", registry=registry)
        registry.register(_EngineStats(stats))
        registry.register(WorkerMetrics(stats))

    def text(self) -> bytes:
        """The registry in Prometheus' text format."""
        return generate_latest(self._registry)

    def ignore_field(self, name: str) -> bool:
        """Count an unknown field; True the first time this name is seen."""
        self.ignored_fields.inc()
        if name in self._warned or len(self._warned) >= MAX_FIELD_NAMES:
            return False
        self._warned.add(name)
        return True


class _EngineStats(Collector):
    """Every number in `Engine.stats()` as one sample, named by its path; the workers' own metrics are apart."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily("deltaserve_engine", "Numbers of Engine.stats(), by path", labels=["name"])
        for name, value in _numbers(self._stats(), ""):
            family.add_metric([name], value)
        yield family


def _numbers(value: object, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, bool | int | float):
        yield path, float(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if key != "metrics":
                yield from _numbers(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _numbers(inner, f"{path}.{index}")
