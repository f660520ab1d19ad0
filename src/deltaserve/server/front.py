"""What the routes of one front share: engine, tokenizer, settings, admission, health, metrics."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from starlette.requests import Request

from deltaserve.control.front.client import Engine, Limits
from deltaserve.server.admission import Admission, Bodies, ValueRoom
from deltaserve.server.api_errors import not_ready
from deltaserve.server.body_fields import Model, UnknownFields, parse
from deltaserve.server.foreign_metrics import ForeignMetrics
from deltaserve.server.health import Health, Liveness
from deltaserve.server.heap import HeapTrim
from deltaserve.server.observe import Recorder
from deltaserve.server.prometheus import ServerMetrics
from deltaserve.server.read import Reading, TextThreads
from deltaserve.server.settings import ServerSettings
from deltaserve.server.spans import SpanSink
from deltaserve.server.stream import OpenRooms, Runner
from deltaserve.server.structured_output import GrammarCheck
from deltaserve.server.text.text_codec import TextCodec

_NUM_TEXT_THREADS = 8
"""Threads that read, render and tokenize large requests; more of them wait."""


@dataclass(frozen=True, slots=True)
class Front:
    """One HTTP front. Its parts change; which parts they are does not."""

    engine: Engine
    text: TextCodec
    settings: ServerSettings
    metrics: ServerMetrics
    admission: Admission
    reading: Reading
    threads: TextThreads
    grammars: GrammarCheck
    unknown_fields: UnknownFields
    health: Health
    liveness: Liveness
    recorder: Recorder
    runner: Runner
    created: int
    """Start of the front, in Unix seconds."""

    @staticmethod
    def build(
        engine: Engine,
        text: TextCodec,
        settings: ServerSettings,
        spans: SpanSink | None = None,
    ) -> "Front":
        """Make the parts of a front and wire them together. `spans`: where those of requests go."""
        registry, admission = CollectorRegistry(), Admission(settings)
        foreign = ForeignMetrics(registry, settings.metrics_names, settings.model_name)
        metrics = ServerMetrics(registry, engine.stats, admission, foreign)
        threads = TextThreads(_NUM_TEXT_THREADS)
        return Front(
            engine=engine,
            text=text,
            settings=settings,
            metrics=metrics,
            admission=admission,
            reading=Reading(Bodies(settings), ValueRoom(settings.http.max_values_bytes), threads, HeapTrim()),
            threads=threads,
            grammars=GrammarCheck(text),
            unknown_fields=UnknownFields(metrics.ignored_fields),
            health=Health(engine.ready, engine.refusal),
            liveness=Liveness(engine.alive, threads, time.monotonic),
            recorder=Recorder(metrics, settings.model_name, spans),
            runner=Runner(engine, text, OpenRooms(engine), settings.stream_interval),
            created=int(time.time()),
        )

    def limits(self) -> Limits:
        """What the workers can take. Raises ApiError 503 while there are none."""
        limits = self.engine.limits()
        if limits is None:
            raise not_ready("no compatible pair of workers")
        return limits

    @asynccontextmanager
    async def read(self, request: Request, model: type[Model]) -> AsyncIterator[Model]:
        """The body of a request; its memory counts until this is left. Raises ApiError, or ClientGone."""
        async with self.reading.object_of(request) as value:
            yield parse(model, value, self.unknown_fields)
