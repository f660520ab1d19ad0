"""Metrics under the names of other servers: what boards and endpoint pickers look for is there, and says the same."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deltaserve.control.front.client import EngineStats, WorkerStats
from deltaserve.core.ids import Namespace
from deltaserve.server.foreign_metrics import NAMES
from deltaserve.server.settings import ApiKey, ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.server.conftest import MODEL, served
from tests.server.oracle import OracleEngine
from tests.server.test_engine_metrics import reporting

pytestmark = pytest.mark.anyio

BOARDS = {
    "vllm": """
        e2e_request_latency_seconds_bucket time_to_first_token_seconds_bucket time_per_output_token_seconds_bucket
        inter_token_latency_seconds_bucket prompt_tokens_total generation_tokens_total num_requests_running
        num_requests_waiting kv_cache_usage_perc gpu_cache_usage_perc request_prompt_tokens_bucket
        request_generation_tokens_bucket request_success_total request_queue_time_seconds_sum
        request_prefill_time_seconds_sum request_decode_time_seconds_sum prefix_cache_queries_total
        prefix_cache_hits_total num_preemptions_total
    """,
    "sglang": """
        e2e_request_latency_seconds_bucket time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket
        time_per_output_token_seconds_bucket num_running_reqs num_queue_reqs token_usage cached_tokens_total
        prompt_tokens_total generation_tokens_total num_requests_total
    """,
}
"""Series that public Grafana boards, llm-d's picker and the Gateway API inference extension read."""


class Reporting(OracleEngine):
    """With a worker that has told of its pages."""

    def stats(self) -> EngineStats:
        status = reporting({'deltaserve_pages_usage{pool="0"}': 0.5, "deltaserve_retractions_total": 2.0})
        return EngineStats(workers=(WorkerStats("decode-0", "decode", "ready", status=status),))


def series(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Name |-> labels |-> value. The text is one that Prometheus takes: no series is there twice."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values, labels = found.setdefault(sample.name, {}), tuple(sorted(sample.labels.items()))
            assert labels not in values
            values[labels] = sample.value
    return found


@pytest.mark.parametrize("server", NAMES)
async def test_what_boards_read_is_there_with_the_models_name(codec: TextCodec, server: str) -> None:
    settings = ServerSettings(MODEL, metrics_names=(server,))
    async with served(codec, Reporting(), settings) as case:
        body = {"prompt": "hello", "max_tokens": 5}
        assert (await case.client.post("/v1/completions", json=body)).status_code == 200
        found = series((await case.client.get("/metrics")).text)
    for name in BOARDS[server].split():
        values = found[f"{server}:{name}"]
        assert all(("model_name", MODEL) in labels for labels in values)
    own, theirs = found["deltaserve_generation_tokens_total"], found[f"{server}:generation_tokens_total"]
    assert list(own.values()) == list(theirs.values()) == [5.0]
    usage = {"vllm": "kv_cache_usage_perc", "sglang": "token_usage"}[server]
    ((labels, value),) = found[f"{server}:{usage}"].items()
    assert value == 0.5
    assert ("engine", "decode-0") in labels


async def test_an_answer_is_counted_by_its_lengths_times_and_end(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), ServerSettings(MODEL)) as case:
        for body in ({"prompt": "hello", "max_tokens": 5}, {"prompt": "hello", "max_tokens": 3, "n": 2}):
            assert (await case.client.post("/v1/completions", json=body)).status_code == 200
        found = series((await case.client.get("/metrics")).text)
    assert found["deltaserve_request_success_total"] == {(("finished_reason", "length"),): 3.0}
    assert found["deltaserve_request_generation_tokens_sum"][()] == 11.0
    for name in ("prompt_tokens", "generation_tokens", "decode_seconds"):
        assert found[f"deltaserve_request_{name}_count"][()] == 3.0
    looked_up = found["deltaserve_prompt_tokens_looked_up_total"][()]
    assert 0 <= found["deltaserve_prompt_tokens_found_total"][()] <= looked_up
    assert not any(":" in name for name in found)


@pytest.mark.parametrize("is_open", [True, False])
async def test_a_scraper_without_a_key_reads_metrics_where_that_is_allowed(codec: TextCodec, is_open: bool) -> None:
    key = ApiKey("s" * 32, Namespace("team"))
    settings = ServerSettings(MODEL, api_keys=(key,), shows_metrics=is_open)
    async with served(codec, OracleEngine(), settings) as case:
        answer = await case.client.get("/metrics")
        assert answer.status_code == (200 if is_open else 401)
        assert (await case.client.get("/v1/models")).status_code == 401
        assert (await case.client.post("/flush_cache")).status_code in (401, 404)
        if is_open:
            stranger = await case.client.get("/metrics", headers={"host": "evil.example"})
            assert stranger.status_code == 200  # with keys any name will do
