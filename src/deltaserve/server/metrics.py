"""Prometheus metrics of the front, in a registry handed in. Names are vLLM's and SGLang's where they mean the same."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from deltaserve.server.engine_metrics import EngineMetrics, Stats

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_ITL_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.5)
_E2E_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
MAX_FIELD_NAMES = 256
"""Distinct ignored field names that are remembered (for one warning each)."""


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
        # Read from admission, which counts them: see `watch`.
        self.running = Gauge("deltaserve_num_requests_running", "Samples that have a first token", registry=registry)
        self.queued = Gauge("deltaserve_num_requests_waiting", "Samples before their first token", registry=registry)
        registry.register(EngineMetrics(stats))
        ProcessCollector(registry=registry)

    def watch(self, num_running: Callable[[], int], num_waiting: Callable[[], int]) -> None:
        """Where the two gauges get their values."""
        self.running.set_function(num_running)
        self.queued.set_function(num_waiting)

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
