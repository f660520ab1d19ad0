"""What the routes of one front share: engine, tokenizer, settings, admission, health, metrics."""

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches

from prometheus_client import CollectorRegistry
from starlette.requests import Request

from deltaserve.request.client import Engine, Limits
from deltaserve.server.admission import Admission
from deltaserve.server.api_errors import not_ready
from deltaserve.server.body_fields import Model, parse
from deltaserve.server.health import Health, Liveness
from deltaserve.server.observe import Recorder
from deltaserve.server.prometheus import ServerMetrics
from deltaserve.server.read import Bodies, read_object
from deltaserve.server.settings import ServerSettings
from deltaserve.server.stream import OpenRooms, Runner
from deltaserve.text.text_codec import TextCodec

_log = logging.getLogger("deltaserve.server")


@dataclass(frozen=True, slots=True)
class Front:
    """One HTTP front. Its parts change; which parts they are does not."""

    engine: Engine
    text: TextCodec
    settings: ServerSettings
    metrics: ServerMetrics
    admission: Admission
    bodies: Bodies
    health: Health
    liveness: Liveness
    recorder: Recorder
    runner: Runner
    created: int
    """Unix seconds."""

    @staticmethod
    def build(engine: Engine, text: TextCodec, settings: ServerSettings, registry: CollectorRegistry) -> "Front":
        """Wire the parts together."""
        admission = Admission(settings)
        metrics = ServerMetrics(registry, engine.stats, admission)
        return Front(
            engine=engine,
            text=text,
            settings=settings,
            metrics=metrics,
            admission=admission,
            bodies=Bodies(settings),
            health=Health(engine.ready, engine.refusal),
            liveness=Liveness(engine.alive, time.monotonic),
            recorder=Recorder(metrics),
            runner=Runner(engine, text, OpenRooms(engine), settings.stream_interval),
            created=int(time.time()),
        )

    def limits(self) -> Limits:
        """What the workers can take. Raises ApiError 503 while there are none."""
        limits = self.engine.limits()
        if limits is None:
            raise not_ready("no compatible pair of workers")
        return limits

    async def read(self, request: Request, model: type[Model]) -> Model:
        """The body of a request. Raises ApiError, or ClientGone."""
        return parse(model, await read_object(request, self.bodies), self.ignore_field)

    def ignore_field(self, name: str, known: Collection[str]) -> None:
        """Count a request field nobody knows; warn once per name, with the known one it may be meant for."""
        if self.metrics.ignore_field(name):
            near = get_close_matches(name[:80], known, n=1, cutoff=0.75)
            hint = f"; did the client mean {near[0]!r}?" if near else ""
            _log.warning("request field %r is unknown and ignored%s", name[:80], hint)
