"""What is recorded about a request: histograms while it runs, one structured log line when it ends."""

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from deltaserve.server.caller import Caller
from deltaserve.server.jobs import Job
from deltaserve.server.metrics import ServerMetrics
from deltaserve.server.pieces import Piece
from deltaserve.server.usage import timings
from deltaserve.wire.messages import Usage

_log = logging.getLogger("deltaserve.server.requests")
MAX_REMEMBERED = 1000


@dataclass(slots=True)
class _SampleClock:
    """One sample's progress. Times are `Recorder.now` seconds."""

    last_token: float | None = None
    num_tokens: int = 0
    usage: Usage | None = None


class Recorder:
    """Writes down every job of a front; remembers the last thousand lines."""

    def __init__(self, metrics: ServerMetrics, now: Callable[[], float] = time.monotonic) -> None:
        self.metrics = metrics
        self.now = now
        self._lines: deque[tuple[str, Mapping[str, object]]] = deque(maxlen=MAX_REMEMBERED)

    def start(self, job: Job, caller: Caller, on_first_token: Callable[[], None]) -> "JobRecord":
        """Begin a job. `on_first_token` is called for each of its samples that gets one."""
        return JobRecord(self, job, caller, on_first_token)

    def remember(self, job_id: str, line: Mapping[str, object]) -> None:
        """Log a finished job and keep its line."""
        self._lines.append((job_id, line))
        _log.info(json.dumps(line), extra={"fields": line})

    def find(self, job_id: str) -> Mapping[str, object] | None:
        """The line of a job that ended not long ago."""
        return next((line for known, line in reversed(self._lines) if known == job_id), None)


@dataclass(slots=True)
class JobRecord:
    """One job being recorded. `end` is called exactly once."""

    recorder: Recorder
    job: Job
    caller: Caller
    on_first_token: Callable[[], None]
    _samples: dict[int, _SampleClock] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._samples = {sample.index: _SampleClock() for sample in self.job.samples}

    def piece(self, piece: Piece) -> None:
        """A sample gained something."""
        metrics, clock, now = self.recorder.metrics, self._samples[piece.index], self.recorder.now()
        if piece.tokens:
            if clock.last_token is None:
                metrics.ttft_s.observe(now - self.caller.received)
                self.on_first_token()
            else:
                # Tokens that arrive together share the time since the last ones.
                for _ in piece.tokens:
                    metrics.itl_s.observe((now - clock.last_token) / len(piece.tokens))
            clock.last_token = now
            clock.num_tokens += len(piece.tokens)
            metrics.generation_tokens.inc(len(piece.tokens))
        if piece.usage is not None:
            clock.usage = piece.usage

    def counted(self) -> dict[int, tuple[int, Usage | None]]:
        """Per sample: output tokens, the engine's report (None while it runs)."""
        return {index: (clock.num_tokens, clock.usage) for index, clock in self._samples.items()}

    def end(self, outcome: str) -> None:
        """The job is over: `ok` or an error code."""
        metrics, elapsed = self.recorder.metrics, self.recorder.now() - self.caller.received
        for clock in self._samples.values():
            if clock.usage is not None:
                metrics.prompt_tokens.inc(clock.usage.prompt_len)
                metrics.cached_tokens.labels("decode").inc(clock.usage.decode_cached_len)
                metrics.cached_tokens.labels("prefill").inc(clock.usage.prefill_cached_len)
        if outcome == "ok":
            metrics.e2e_s.observe(elapsed)
        else:
            metrics.errors.labels(outcome).inc()
        self.recorder.remember(self.job.id, self._line(outcome, elapsed))

    def _line(self, outcome: str, elapsed: float) -> dict[str, object]:
        return {
            "id": self.job.id,
            "request_id": self.caller.request_id,
            "outcome": outcome,
            "e2e_s": round(elapsed, 6),
            "samples": [
                {
                    "room": sample.generation.room.hex(),
                    "prompt_tokens": len(sample.prompt.tokens),
                    "output_tokens": clock.num_tokens,
                    **(timings(sample.index, clock.usage) if clock.usage else {}),
                }
                for sample, clock in zip(self.job.samples, self._samples.values(), strict=True)
            ],
        }
