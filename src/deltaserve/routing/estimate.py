"""Time to first token that one (prefill, decode) pair would give one prompt. A price, not a promise.

    P queue + (prompt - P hit) / prefill rate + (prompt - D hit) * bytes / bandwidth + wait on D + one decode step

A miss on P costs compute, a miss on D only wire and residency: both are priced. The terms are simply added, though a
transfer overlaps compute, because the sum orders pairs in the same way.
"""

from dataclasses import dataclass

from deltaserve.routing.load import DecodeLoad, PrefillLoad


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pair that could serve a prompt, and what each side holds of it. One worker on both sides: unified."""

    prefill: PrefillLoad
    decode: DecodeLoad
    prefill_hit: int
    decode_hit: int

    @property
    def is_unified(self) -> bool:
        return self.prefill.worker == self.decode.worker


@dataclass(frozen=True, slots=True)
class Prices:
    """What the cluster costs, apart from load."""

    kv_bytes_per_token: float
    transfer_bytes_per_s: float
    assumed_output_len: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds."""

    queue_s: float
    prefill_s: float
    wire_s: float
    decode_wait_s: float
    step_s: float

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.prefill_s + self.wire_s + self.decode_wait_s + self.step_s

    @property
    def wait_s(self) -> float:
        """Before anything is done for the request."""
        return self.queue_s + self.decode_wait_s


def estimate(prompt_len: int, pair: Candidate, prices: Prices) -> Estimate:
    """Price one pair for one prompt."""
    rate = pair.prefill.tokens_per_s
    missing = prompt_len - pair.decode_hit
    wire_s = 0.0 if pair.is_unified else missing * prices.kv_bytes_per_token / prices.transfer_bytes_per_s
    return Estimate(
        queue_s=pair.prefill.queue_tokens / rate,
        prefill_s=max(1, prompt_len - pair.prefill_hit) / rate,
        wire_s=wire_s,
        decode_wait_s=_decode_wait(missing, pair.decode, prices.assumed_output_len),
        step_s=pair.decode.step_s,
    )


def _decode_wait(missing: int, load: DecodeLoad, output_len: int) -> float:
    """Until decode has memory and a row.

    Running requests are taken to end one after the other, evenly over the time an average one lives; so a whole pool
    turns over once per life.
    """
    life_s = output_len * load.step_s
    running = min(load.num_rooms, float(load.max_running)) if load.max_running else load.num_rooms
    shortage = max(0.0, missing + load.waiting_tokens - load.free_tokens) if load.pool_tokens else 0.0
    memory_s = life_s * shortage / max(1, load.pool_tokens)
    queued = load.num_rooms + 1 - load.max_running if load.max_running else 0.0
    rows_s = life_s * max(0.0, queued) / max(1.0, running)
    return max(memory_s, rows_s)
