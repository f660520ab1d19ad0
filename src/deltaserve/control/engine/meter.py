"""What an instance tells about its load: rates, counters, and when to tell it."""

from collections import Counter
from collections.abc import Callable

from deltaserve.control.cache.pages import PageState
from deltaserve.control.engine.backlog import Backlog
from deltaserve.control.engine.parts import Parts
from deltaserve.control.engine.way_price import Way
from deltaserve.control.sched.plan import StepResult
from deltaserve.control.sched.recent import Recent
from deltaserve.control.sched.step_progress import Committed
from deltaserve.control.transfer.commands import StagingUsed
from deltaserve.control.transfer.staging import COUNTERS
from deltaserve.core.wire.messages import Status

_BUSY_TICK_S = 0.1
_PUBLISH_S = 0.1


class Meter:
    """Heartbeat timing, and rates of the last steps."""

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._next_beat = 0.0
        self._last_tick = 0.0
        self._last_publish = 0.0
        self._of_prompt_token = Recent()
        self._of_decode_step = Recent()
        self._num_threads: int | None = None
        self.bytes_sent = 0
        self.num_steps = 0
        self.num_tokens = 0
        self.tokens_read = 0
        self.shared_tokens_read = 0
        self._staging: Counter[str] = Counter()

    def is_due(self, now: float) -> bool:
        """Whether a heartbeat is due; then the next one is scheduled."""
        self._last_tick = now
        if now < self._next_beat:
            return False
        self._next_beat = now + self._heartbeat_s
        return True

    def next_timer(self, is_busy: bool) -> float:
        """Deadlines and repeats are looked at every 0.1 s while there is something to look at."""
        return min(self._next_beat, self._last_tick + _BUSY_TICK_S) if is_busy else self._next_beat

    def may_publish(self, now: float) -> bool:
        """Tree events go out at most ten times a second."""
        if now - self._last_publish < _PUBLISH_S:
            return False
        self._last_publish = now
        return True

    def count_step(self, result: StepResult, progress: Committed) -> None:
        num_tokens = progress.num_tokens
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.tokens_read += result.tokens_read
        self.shared_tokens_read += result.shared_tokens_read
        self._num_threads = result.num_threads
        if result.typical_s is None or not num_tokens:
            return
        if progress.has_extends:
            self._of_prompt_token.add(result.typical_s / num_tokens)
        else:
            self._of_decode_step.add(result.typical_s * len(progress) / num_tokens)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second of lately computed steps. 0: not measured yet."""
        token_s = self._of_prompt_token.quick()
        return 1.0 / token_s if token_s else 0.0

    @property
    def decode_step_s(self) -> float:
        """Seconds of a step that draws one token of each row. 0: not measured yet."""
        return self._of_decode_step.quick() or 0.0

    def count_sent(self, num_bytes: int) -> None:
        self.bytes_sent += num_bytes

    def count_staging(self, used: StagingUsed) -> None:
        self._staging.update(dict(used.counts))

    def status(
        self, parts: Parts, backlog: Backlog, is_draining: bool, way: Way | None, metrics: dict[str, float]
    ) -> Status:
        """`way`: what hand-overs to this worker take."""

        def per_pool(count: Callable[[int], int]) -> tuple[int, ...]:
            return tuple(count(pool) for pool in range(len(parts.pools)))

        return Status(
            num_waiting=backlog.num_requests,
            waiting_tokens=backlog.num_tokens,
            num_running=len(parts.scheduler.running),
            free_pages=per_pool(lambda p: parts.pools[p].num_free),
            evictable_pages=per_pool(parts.cache.evictable_pages),
            quarantined_pages=per_pool(lambda p: parts.pools[p].count(PageState.QUARANTINED)),
            num_pages=per_pool(lambda p: parts.pools[p].num_pages),
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            decode_step_s=self.decode_step_s,
            handover_s=None if way is None else way.trip_s,
            byte_s=None if way is None else way.byte_s,
            draining=is_draining,
            open_tickets=int(metrics["deltaserve_tickets_open"]),
            leases=parts.cache.num_leases,
            metrics=metrics,
        )

    def metrics(self) -> dict[str, float]:
        threads = {} if self._num_threads is None else {"deltaserve_compute_threads": self._num_threads}
        return {
            "deltaserve_transfer_bytes_sent_total": self.bytes_sent,
            "deltaserve_steps_total": self.num_steps,
            "deltaserve_computed_tokens_total": self.num_tokens,
            "deltaserve_attention_tokens_read_total": self.tokens_read,
            "deltaserve_attention_shared_tokens_read_total": self.shared_tokens_read,
            "deltaserve_decode_step_seconds": self.decode_step_s,
            "deltaserve_prefill_tokens_per_second": self.prefill_tokens_per_s,
            **threads,
            **{f"deltaserve_{name}_total": self._staging[name] for name in COUNTERS if name != "scatter_microseconds"},
            "deltaserve_scatter_seconds_total": self._staging["scatter_microseconds"] / 1e6,
        }
