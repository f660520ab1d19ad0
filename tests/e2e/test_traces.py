"""A collector of OpenTelemetry is told of every request, as a part of its client's trace."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.e2e.reference import random_prompt
from tests.e2e.server import Server, serving, wait_until

FLAGS = ("--page-size", "16", "--num-pages", "256")


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []
        self.services: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        told = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        for resource in told.resource_spans:
            values = {each.key: each.value.string_value for each in resource.resource.attributes}
            self.server.services.add(f"{values['service.name']} {values['service.instance.id']}")
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing: the test's own output is enough."""


@contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as collector:
        Thread(target=collector.serve_forever, daemon=True).start()
        try:
            yield collector
        finally:
            collector.shutdown()


def test_a_request_is_traced_from_the_client_to_decode(tiny_models: Path, folder: Path) -> None:
    trace, parent = secrets.token_hex(16), secrets.token_hex(8)
    with collecting() as collector:
        flags = (*FLAGS, "--otlp-traces-endpoint", collector.url)
        with serving(folder, tiny_models / "llama", *flags) as server:
            check_traces(server, collector, trace, parent)
        assert len(collector.spans) == 6, "of those whose client wanted it"


def check_traces(server: Server, collector: Collector, trace: str, parent: str) -> None:
    body = server.body(random_prompt(100, seed=1), max_tokens=6)
    headers = {"traceparent": f"00-{trace}-{parent}-01"}
    reply = server.http.post("/v1/completions", json=body, headers=headers)
    assert (reply.status_code, reply.headers["traceparent"]) == (200, headers["traceparent"])
    unsampled = {"traceparent": f"00-{secrets.token_hex(16)}-{parent}-00"}
    assert server.http.post("/v1/completions", json=body, headers=unsampled).status_code == 200
    assert server.http.post("/v1/completions", json={**body, "max_tokens": 10**9}).status_code == 400
    wait_until(lambda: len(collector.spans) >= 6, "spans")
    spans = {span.name: span for span in collector.spans}
    assert set(spans) == {"generate llama", "route", "queue", "prefill", "transfer", "decode"}
    assert {span.trace_id.hex() for span in collector.spans} == {trace}
    request = spans["generate llama"]
    assert request.parent_span_id.hex() == parent
    for name, outer in (("route", request), ("decode", request), ("transfer", spans["prefill"])):
        assert spans[name].parent_span_id == outer.span_id
        assert outer.start_time_unix_nano <= spans[name].start_time_unix_nano
        assert spans[name].end_time_unix_nano <= outer.end_time_unix_nano
    (moved,) = [each.value.int_value for each in spans["transfer"].attributes if each.key.endswith("bytes")]
    assert moved == reply.json()["usage"]["timings"][0]["transferred_bytes"]
    assert collector.services == {"deltaserve front"}
