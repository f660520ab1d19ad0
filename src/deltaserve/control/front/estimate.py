"""Time to first token that one (prefill, decode) pair would give one prompt: for choosing a pair, and not guaranteed.

    P queue + (prompt - P hit) / prefill rate + (prompt - D hit) * bytes / bandwidth + wait on D + one decode step

A miss on P costs compute, a miss on D only wire and residency: both are priced. The terms are simply added, though a
transfer overlaps compute, because the sum orders pairs in the same way; and because none of them depends on both
workers, the best pair is the best of each side.
"""

from dataclasses import dataclass

from deltaserve.control.front.load import DecodeLoad, PrefillLoad
from deltaserve.core.wire.messages import PrefillWay

HANDOVER_S = 0.004
"""What a hand-over adds to the first token of a cached prompt (docs/performance.md), until it is measured."""


@dataclass(frozen=True, slots=True)
class Computing:
    """A worker that could compute a prompt, and what it holds of it."""

    load: PrefillLoad
    hit: int


@dataclass(frozen=True, slots=True)
class Keeping:
    """A worker that could decode a prompt, and what it holds of it."""

    load: DecodeLoad
    hit: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pair that could serve a prompt. One worker on both sides: unified."""

    computing: Computing
    keeping: Keeping

    @property
    def is_unified(self) -> bool:
        return self.computing.load.worker == self.keeping.load.worker


@dataclass(frozen=True, slots=True)
class Prices:
    """What the cluster costs, apart from load."""

    kv_bytes_per_token: float
    transfer_bytes_per_s: float
    """Assumed of the way to a decode worker until it is measured; and where workers are chosen what a prefix is worth
    to find again at least, however quick the way is: it also takes memory."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Parts of the time to first token, in seconds."""

    queue_s: float
    prefill_s: float
    wire_s: float
    decode_wait_s: float
    step_s: float
    sure_wait_s: float
    """Wait before anything is done for the request, as far as it follows from measured rates: a request may be refused
    for it. What is assumed of workers that have computed little or nothing orders pairs, and refuses nobody."""

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.prefill_s + self.wire_s + self.decode_wait_s + self.step_s


def estimate(prompt_len: int, pair: Candidate, prices: Prices) -> Estimate:
    """Price one pair for one prompt."""
    queue_s, prefill_s = compute_times(prompt_len, pair.computing)
    wire_s, decode_wait_s = keep_times(prompt_len, pair.keeping, prices)
    return Estimate(
        queue_s=queue_s,
        prefill_s=prefill_s,
        wire_s=0.0 if pair.is_unified else wire_s,
        decode_wait_s=decode_wait_s,
        step_s=pair.keeping.load.step_s,
        sure_wait_s=queue_s * pair.computing.load.is_measured + decode_wait_s * pair.keeping.load.is_measured,
    )


def compute_times(prompt_len: int, side: Computing) -> tuple[float, float]:
    """Seconds in the queue, and of computing."""
    rate = side.load.tokens_per_s
    return side.load.queue_tokens / rate, max(1, prompt_len - side.hit) / rate


def prefill_way(prompt_len: int, pair: Candidate, prices: Prices) -> PrefillWay | None:
    """What is to be done until prefill hands a prompt over: answers that decode alone holds are among what it lacks,
    unless it first gets those from there. None: one worker does both."""
    if pair.is_unified:
        return None
    load, keeping = pair.computing.load, pair.keeping
    pulled_len = max(0, keeping.hit - pair.computing.hit)
    pull_s = _moved_s(pulled_len, keeping.load, prices) if pulled_len else 0.0
    return PrefillWay(
        queue_len=int(load.queue_tokens),
        lacking_len=max(1, prompt_len - pair.computing.hit),
        handover_len=int(_moved_s(prompt_len - keeping.hit, keeping.load, prices) * load.tokens_per_s),
        pulled_len=pulled_len,
        pull_len=int(pull_s * load.tokens_per_s),
    )


def keep_times(prompt_len: int, side: Keeping, prices: Prices) -> tuple[float, float]:
    """Seconds on the wire, and of waiting for memory and a row."""
    missing = prompt_len - side.hit
    byte_s = max(_byte_s(side.load, prices), 1.0 / prices.transfer_bytes_per_s)
    return missing * prices.kv_bytes_per_token * byte_s, _decode_wait(missing, side.load)


def _moved_s(num_tokens: int, load: DecodeLoad, prices: Prices) -> float:
    """Seconds until so many tokens' pages are on the other side, from when they are asked for."""
    handover_s = HANDOVER_S if load.handover_s is None else load.handover_s
    return handover_s + num_tokens * prices.kv_bytes_per_token * _byte_s(load, prices)


def _byte_s(load: DecodeLoad, prices: Prices) -> float:
    return 1.0 / prices.transfer_bytes_per_s if load.byte_s is None else load.byte_s


def _decode_wait(missing: int, load: DecodeLoad) -> float:
    """Seconds until decode has memory and a row. ||

    Running requests are taken to end one after the other, evenly over the time an average one lives; so a whole pool
    turns over once per life.
    """
    life_s = load.output_len * load.step_s
    running = min(load.num_rooms, float(load.max_running)) if load.max_running else load.num_rooms
    shortage = max(0.0, missing + load.waiting_tokens - load.free_tokens) if load.pool_tokens else 0.0
    memory_s = life_s * shortage / max(1, load.pool_tokens)
    queued = load.num_rooms + 1 - load.max_running if load.max_running else 0.0
    rows_s = life_s * max(0.0, queued) / max(1.0, running)
    return max(memory_s, rows_s)
