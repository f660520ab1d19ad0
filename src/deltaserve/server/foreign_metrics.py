"""Our metrics under the names of other servers, for the boards, autoscalers and endpoint pickers that read those.

A row says which series of ours means the same; nothing is counted twice. Names and labels are those of vLLM's
`/metrics` (V1 engine) and of SGLang's, as their documentation and public Grafana boards have them: the last word of
each name may be an older one of the same series.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Sample

_OWN = "deltaserve_"


@dataclass(frozen=True, slots=True)
class MetricNames:
    """One server's words."""

    prefix: str
    model_label: str
    worker_label: str
    """What a worker of ours is there."""
    rows: Mapping[str, tuple[str, ...]]
    """Our series without prefix |-> its names there, without theirs."""


_SHARED = {
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
    "prompt_tokens": ("prompt_tokens",),
    "generation_tokens": ("generation_tokens",),
}
NAMES: Mapping[str, MetricNames] = MappingProxyType(
    {
        "vllm": MetricNames(
            "vllm:",
            "model_name",
            "engine",
            {
                **_SHARED,
                "num_requests_running": ("num_requests_running",),
                "num_requests_waiting": ("num_requests_waiting",),
                "pages_usage": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
                "request_prompt_tokens": ("request_prompt_tokens",),
                "request_generation_tokens": ("request_generation_tokens",),
                "request_queue_seconds": ("request_queue_time_seconds",),
                "request_prefill_seconds": ("request_prefill_time_seconds",),
                "request_decode_seconds": ("request_decode_time_seconds",),
                "request_success": ("request_success",),
                "prompt_tokens_looked_up": ("prefix_cache_queries",),
                "prompt_tokens_found": ("prefix_cache_hits",),
                "retractions": ("num_preemptions",),
            },
        ),
        "sglang": MetricNames(
            "sglang:",
            "model_name",
            "engine",
            {
                **_SHARED,
                "num_requests_running": ("num_running_reqs",),
                "num_requests_waiting": ("num_queue_reqs",),
                "pages_usage": ("token_usage",),
                "prompt_tokens_found": ("cached_tokens",),
                "request_success": ("num_requests",),
                "retractions": ("num_retracted_requests",),
            },
        ),
    }
)
"""Other servers' words, by the name of the server."""
POOL = "0"
"""The pool that every model has: what is full of it is full."""


class ForeignMetrics(Collector):
    """What `own` collects, as others call it."""

    def __init__(self, own: CollectorRegistry, servers: Sequence[str], model_name: str) -> None:
        """`servers`: keys of NAMES. `own` is another registry than the one this is registered in."""
        self._own = own
        self._names = [NAMES[server] for server in servers]
        self._model_name = model_name

    def describe(self) -> list[Metric]:
        """Nothing is collected for it."""
        return []

    def collect(self) -> Iterator[Metric]:
        collected = list(self._own.collect())
        for names in self._names:
            for metric in collected:
                for name in names.rows.get(metric.name.removeprefix(_OWN), ()):
                    yield self._renamed(metric, names, f"{names.prefix}{name}")

    def _renamed(self, metric: Metric, names: MetricNames, name: str) -> Metric:
        renamed = Metric(name, metric.documentation, metric.type)
        for sample in metric.samples:
            labels = dict(sample.labels)
            if labels.pop("pool", POOL) != POOL:
                continue
            if "instance" in labels:
                labels[names.worker_label] = labels.pop("instance")
            labels = {names.model_label: self._model_name, **labels}
            renamed.samples.append(Sample(name + sample.name.removeprefix(metric.name), labels, sample.value))
        return renamed
