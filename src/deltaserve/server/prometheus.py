"""Prometheus metrics of the front, in a registry handed in, and of the workers, as they last reported them.

Names are vLLM's and SGLang's where they mean the same.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deltaserve.control.front.client import EngineStats, WorkerStats
from deltaserve.core.metrics import HELP, MetricSample, read_samples
from deltaserve.server.admission import Admission

Stats = Callable[[], EngineStats]

_FRONT = {"instance": "front", "role": "front"}


class EngineMetrics(Collector):
    """Samples of Engine.stats(): the front's own, and those of each worker's last Status, labelled with `instance` and
    `role`. `_total` names are counters."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for sample in _samples(self._stats()):
            family = families.setdefault(sample.name, _family(sample.name))
            family.add_sample(sample.name, dict(sample.labels), sample.value)
        return families.values()


def _samples(stats: EngineStats) -> Iterator[MetricSample]:
    own = {
        "rooms": stats.rooms,
        "waiting_tokens": stats.waiting_tokens,
        "draining": stats.draining,
        "stale_frames_total": stats.stale_frames,
        "internal_errors_total": stats.internal_errors,
    }
    for name, value in own.items():
        yield MetricSample(f"deltaserve_front_{name}", {}, float(value))
    for event, count in stats.counts.items():
        yield MetricSample("deltaserve_front_events_total", {"event": event}, float(count))
    yield from _labelled(stats.links, _FRONT)
    for worker in stats.workers:
        yield from _of_worker(worker)


def _of_worker(worker: WorkerStats) -> Iterator[MetricSample]:
    labels = {"instance": worker.name, "role": worker.role}
    own = {
        "up": worker.state == "ready",
        "breaker_open": worker.breaker == "open",
        "rooms": worker.rooms,
        "resident_keys": worker.resident_keys,
    }
    for name, value in own.items():
        yield MetricSample(f"deltaserve_worker_{name}", labels, float(value))
    if worker.revision is not None:
        yield MetricSample("deltaserve_worker_revision", {**labels, "revision": worker.revision}, 1.0)
    if worker.status is not None:
        yield from _labelled(worker.status.metrics, labels)


def _labelled(values: Mapping[str, float], labels: Mapping[str, str]) -> Iterator[MetricSample]:
    for sample in read_samples(values):
        yield MetricSample(sample.name, {**labels, **sample.labels}, sample.value)


def _family(name: str) -> Metric:
    text = HELP.get(name, "Reported by a worker")
    if name.endswith("_total"):
        return CounterMetricFamily(name.removesuffix("_total"), text)
    return GaugeMetricFamily(name, text)


_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_ITL_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.5)
_E2E_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)


_WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_LEN_BUCKETS = (1, 4, 16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class ServerMetrics:
    """Counters of one front. Times in seconds."""

    def __init__(self, registry: CollectorRegistry, stats: Stats, admission: Admission, foreign: Collector) -> None:
        """`foreign`: the same under names of others, told beside what is in `registry`."""

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"deltaserve_{name}", text, buckets=buckets, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"deltaserve_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"deltaserve_{name}", text, registry=registry)

        self._registry = registry
        self._foreign = CollectorRegistry()
        self._foreign.register(foreign)
        self.responses = counter("http_responses", "Answers by path and status", "path", "status")
        self.requests = counter("requests", "Generating requests that an engine was asked for, by outcome", "outcome")
        self.errors = counter("request_errors", "Requests not served, by error code", "code")
        self.ttft_s = histogram("time_to_first_token_seconds", "Request read to first token", _TTFT_BUCKETS)
        self.itl_s = histogram("inter_token_latency_seconds", "Between two tokens of a sample", _ITL_BUCKETS)
        self.e2e_s = histogram(
            "e2e_request_latency_seconds", "Request read to last token, of complete answers", _E2E_BUCKETS
        )
        self.queue_s = histogram("request_queue_seconds", "Before prefill began to compute a prompt", _WAIT_BUCKETS)
        self.prefill_s = histogram("request_prefill_seconds", "Computing a prompt", _WAIT_BUCKETS)
        self.transfer_s = histogram(
            "request_transfer_seconds", "Moving a prompt's pages, while the rest of it is computed", _WAIT_BUCKETS
        )
        self.decode_s = histogram("request_decode_seconds", "First token to the last", _E2E_BUCKETS)
        self.prompt_len = histogram("request_prompt_tokens", "Prompt tokens of a sample that ended", _LEN_BUCKETS)
        self.output_len = histogram("request_generation_tokens", "Output tokens of a sample", _LEN_BUCKETS)
        self.finished = counter("request_success", "Samples that ended, by reason", "finished_reason")
        self.hints = counter("kv_hints", "Cache hints of samples that ended, by what became of them", "hint", "outcome")
        self.looked_up = counter("prompt_tokens_looked_up", "Prompt tokens that were looked for in the caches")
        self.found = counter("prompt_tokens_found", "Of these, found on whichever side held more")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of samples whose prompt was computed")
        self.cached_tokens = counter("cached_tokens", "Of these, tokens found in a cache", "side")
        self.generation_tokens = counter("generation_tokens", "Output tokens")
        self.ignored_fields = counter(
            "ignored_fields",
            "Request fields that were ignored: unknown, not shown by the chat template, or asking for what is not done",
            "where",
        )
        self.streams_cut = counter("streams_cut", "Streams cut because their reader was too slow")
        self.clients_gone = counter("clients_gone", "Requests whose client left before the answer was complete")
        gauge("num_requests_running", "Samples that have a first token").set_function(lambda: admission.num_running)
        gauge("num_requests_waiting", "Samples before their first token").set_function(lambda: admission.num_waiting)
        registry.register(EngineMetrics(stats))
        ProcessCollector(registry=registry)

    def text(self) -> bytes:
        """The registry in Prometheus' text format."""
        return generate_latest(self._registry) + generate_latest(self._foreign)
