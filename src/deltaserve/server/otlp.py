"""Spans sent to an OpenTelemetry collector (OTLP over HTTP), in batches, by a thread of OpenTelemetry's own.

What cannot be sent is dropped and logged by that library; no request waits for it. Its environment variables hold:
OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_*. This module is imported only where traces are asked for.
"""

import time
from collections.abc import Callable
from threading import Thread

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from deltaserve import __version__
from deltaserve.server.spans import SpanSink, TimedSpan

_SEND_S = 2.0
"""Longest time to send a batch, and all that is left at the end, of however many batches: well below what the
supervisor gives a front for its last words."""


def open_sink(endpoint: str, name: str) -> SpanSink:
    """`endpoint`: URL of the collector's traces, such as http://127.0.0.1:4318/v1/traces. `name`: of this front."""
    resource = Resource.create(
        {"service.name": "deltaserve", "service.instance.id": name, "service.version": __version__}
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # which waits half a minute; see close
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=_SEND_S)))
    return _Otlp(provider)


class _Otlp:
    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("deltaserve", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def put(self, request: TimedSpan, trace: str | None) -> None:
        context = Context() if trace is None else self._propagator.extract({"traceparent": trace}, Context())
        clock_s = time.time() - time.monotonic()
        _put(self._tracer, request, context, SpanKind.SERVER, lambda at: int(1e9 * (at + clock_s)))

    def close(self) -> None:
        """In a thread that is left behind when its time is over: the library's own limits hold for a batch, not for all
        of them."""
        sending = Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        sending.start()
        sending.join(_SEND_S)


def _put(tracer: Tracer, span: TimedSpan, context: Context, kind: SpanKind, unix_ns: Callable[[float], int]) -> None:
    told = tracer.start_span(span.name, context, kind, dict(span.attributes), start_time=unix_ns(span.start))
    if span.error is not None:
        told.set_status(Status(StatusCode.ERROR, span.error))
        told.set_attribute("error.type", span.error)
    for part in span.inside:
        _put(tracer, part, set_span_in_context(told, context), SpanKind.INTERNAL, unix_ns)
    told.end(unix_ns(span.end))
