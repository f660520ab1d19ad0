"""What is recorded about a request: histograms while it runs, one structured log line when it ends."""

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from deltaserve.core.wire.messages import FinishReason
from deltaserve.server.jobs import Job
from deltaserve.server.prometheus import ServerMetrics
from deltaserve.server.read import Caller
from deltaserve.server.spans import SampleTimes, SpanSink, TimedSpan, request_span
from deltaserve.server.text.sample_text import TextPiece
from deltaserve.server.usage import Count, cached_len, timings

_log = logging.getLogger("deltaserve.server.requests")
MAX_REMEMBERED = 1000
MAX_REMEMBERED_SAMPLES = 10_000
"""Most samples of all remembered requests together: one may have a thousand, each with its times."""


class Recorder:
    """Writes down every job of a front; remembers the last ones."""

    def __init__(self, metrics: ServerMetrics, model: str, spans: SpanSink | None = None) -> None:
        """`model`: name that spans give it. `spans`: where those of each request go; None: nowhere."""
        self.metrics = metrics
        self.model = model
        self.spans = spans
        self._lines: deque[_Ended] = deque()
        self._num_samples = 0
        self._running: dict[str, JobRecord] = {}

    def begin(self, record: "JobRecord") -> None:
        """A job is inside."""
        self._running[record.job.id] = record

    def remember(self, job_id: str, num_samples: int, line: Mapping[str, object]) -> None:
        """Log a finished job and keep its line."""
        self._running.pop(job_id, None)
        self._lines.append(_Ended(job_id, num_samples, line, time.monotonic()))
        self._num_samples += num_samples
        while len(self._lines) > MAX_REMEMBERED or self._num_samples > MAX_REMEMBERED_SAMPLES:
            self._num_samples -= self._lines.popleft().num_samples
        _log.info(json.dumps(line), extra={"fields": line})

    def find(self, job_id: str) -> Mapping[str, object] | None:
        """The line of a job that ended not long ago."""
        return next((ended.line for ended in reversed(self._lines) if ended.job_id == job_id), None)

    def recent(self, most: int) -> list[dict[str, object]]:
        """The last jobs that ended, latest first, each with how long ago that was."""
        now = time.monotonic()
        latest = islice(reversed(self._lines), most)
        return [{"ended_s_ago": round(now - ended.at, 3), **ended.line} for ended in latest]

    def running(self, most: int) -> list[dict[str, object]]:
        """The jobs that are inside, oldest first."""
        return [record.line_so_far() for record in islice(self._running.values(), most)]


class _Ended(NamedTuple):
    """A job that ended."""

    job_id: str
    num_samples: int
    line: Mapping[str, object]
    at: float


@dataclass(slots=True)
class JobRecord:
    """One job being recorded. `begin` and `end` are called exactly once each."""

    recorder: Recorder
    job: Job
    caller: Caller
    on_first_token: Callable[[], None]
    """Called for each of its samples that gets one."""
    counts: dict[int, Count] = field(default_factory=dict)
    _paid: set[int] = field(default_factory=set)
    """Samples whose prompt was counted: it is computed."""
    _traced: set[int] = field(default_factory=set)
    """Samples of whose prompt it was counted how much had been cached."""
    _last_token: dict[int, float] = field(default_factory=dict)
    """Sample |-> when its last token came, in `time.monotonic()` seconds."""
    _first_token: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.counts = {sample.index: Count() for sample in self.job.samples}

    def begin(self) -> None:
        """The job is inside, until `end`."""
        self.recorder.begin(self)

    def piece(self, piece: TextPiece) -> None:
        """Note that a sample gained something."""
        so_far = self.counts[piece.index]
        self.counts[piece.index] = Count(
            so_far.num_tokens + len(piece.tokens),
            piece.usage or so_far.report,
            so_far.num_reasoning + piece.num_reasoning,
        )
        self._count_prompt(piece)
        metrics, now = self.recorder.metrics, time.monotonic()
        if piece.finish is not None:
            self._count_end(piece, piece.finish, now)
        if not piece.tokens:
            return
        last = self._last_token.get(piece.index)
        self._last_token[piece.index] = now
        self._first_token.setdefault(piece.index, now)
        metrics.generation_tokens.inc(len(piece.tokens))
        if last is None:
            metrics.ttft_s.observe(now - self.caller.received)
            self.on_first_token()
            return
        for _ in piece.tokens:  # those that arrive together share the time since the last ones
            metrics.itl_s.observe((now - last) / len(piece.tokens))

    def _count_end(self, piece: TextPiece, reason: FinishReason, now: float) -> None:
        metrics, count = self.recorder.metrics, self.counts[piece.index]
        metrics.finished.labels(reason.value).inc()
        metrics.prompt_len.observe(len(self.job.samples[piece.index].prompt.tokens))
        metrics.output_len.observe(count.num_tokens)
        metrics.decode_s.observe(now - self._first_token.get(piece.index, now))
        if count.report is not None:
            metrics.queue_s.observe(count.report.queue_s)
            metrics.prefill_s.observe(count.report.prefill_s)
            metrics.transfer_s.observe(count.report.transfer_s)
            for told in count.report.hints:
                metrics.hints.labels(told.hint.value, told.outcome.value).inc()

    def _count_prompt(self, piece: TextPiece) -> None:
        """A sample's prompt counts once, when it is known to be computed, whatever becomes of its answer."""
        metrics, usage = self.recorder.metrics, piece.usage
        if piece.index not in self._paid and (piece.tokens or usage is not None):
            self._paid.add(piece.index)
            metrics.prompt_tokens.inc(len(self.job.samples[piece.index].prompt.tokens))
        if piece.index not in self._traced and usage is not None:
            self._traced.add(piece.index)
            metrics.cached_tokens.labels("decode").inc(usage.decode_cached_len)
            metrics.cached_tokens.labels("prefill").inc(usage.prefill_cached_len)
            metrics.looked_up.inc(len(self.job.samples[piece.index].prompt.tokens))
            metrics.found.inc(cached_len(usage))

    def end(self, outcome: str) -> None:
        """The job is over: `ok`, `client_gone` or an error code."""
        metrics, elapsed = self.recorder.metrics, time.monotonic() - self.caller.received
        metrics.requests.labels(outcome).inc()
        if outcome == "ok":
            metrics.e2e_s.observe(elapsed)
        else:
            metrics.errors.labels(outcome).inc()
        self.recorder.remember(self.job.id, len(self.job.samples), self._line(outcome, elapsed))
        if self.recorder.spans is not None:
            self.recorder.spans.put(self._span(outcome, self.caller.received + elapsed), self.caller.trace)

    def _span(self, outcome: str, end: float) -> TimedSpan:
        samples = zip(self.job.samples, self.counts.values(), strict=True)
        times = [
            SampleTimes(
                sample.index,
                len(sample.prompt.tokens),
                count.num_tokens,
                self._first_token.get(sample.index),
                count.report,
            )
            for sample, count in samples
        ]
        about = {
            "gen_ai.response.model": self.recorder.model,
            "gen_ai.response.id": self.job.id,
            "deltaserve.request_id": self.caller.request_id,
        }
        return request_span(f"generate {self.recorder.model}", self.caller.received, end, outcome, about, times)

    def _line(self, outcome: str, elapsed: float) -> dict[str, object]:
        return {**self._names(), "outcome": outcome, "e2e_s": round(elapsed, 6), "samples": self._samples()}

    def line_so_far(self) -> dict[str, object]:
        """What is known of the job while it is inside."""
        return {**self._names(), "age_s": round(time.monotonic() - self.caller.received, 3), "samples": self._samples()}

    def _names(self) -> dict[str, object]:
        return {"id": self.job.id, "request_id": self.caller.request_id}

    def _samples(self) -> list[dict[str, object]]:
        samples = zip(self.job.samples, self.counts.values(), strict=True)
        return [
            {
                "room": sample.generation.room.hex(),
                "prompt_tokens": len(sample.prompt.tokens),
                "output_tokens": count.num_tokens,
                **(timings(sample.index, count.report) if count.report else {}),
            }
            for sample, count in samples
        ]
