"""Token counts and timings of an answer, as clients expect them."""

from collections.abc import Mapping

from deltaserve.core.wire.messages import Usage
from deltaserve.server.jobs import Common, Job

Counted = Mapping[int, tuple[int, Usage | None]]
"""Sample index -> (output tokens shown, the engine's report)."""

_DIGITS = 6
"""Decimal places of seconds: clocks of different processes know no more."""


def cached_len(usage: Usage) -> int:
    """Prompt tokens that were found in a cache, on whichever side held more."""
    return max(usage.decode_cached_len, usage.prefill_cached_len)


def cached_details(*usages: Usage) -> dict[str, int]:
    """Details of cached tokens in SGLang's form (pages have one tier, the memory of the worker), and by side."""
    return {
        "device": sum(map(cached_len, usages)),
        "host": 0,
        "decode": sum(usage.decode_cached_len for usage in usages),
        "prefill": sum(usage.prefill_cached_len for usage in usages),
    }


def _firsts(job: Job, counted: Counted) -> list[Usage]:
    """The reports of each prompt's first sample: the others find it in the cache."""
    found = (counted[sample.index][1] for sample in job.samples if sample.is_first)
    return [usage for usage in found if usage is not None]


def usage_fields(job: Job, fields: Common, counted: Counted) -> dict[str, object]:
    """Fields at the end of an answer: OpenAI's `usage`, and SGLang's `sglext` for clients that asked for what is in
    it."""
    body: dict[str, object] = {"usage": usage_body(job, fields, counted)}
    if fields.return_cached_tokens_details:
        body["sglext"] = {"cached_tokens_details": cached_details(*_firsts(job, counted))}
    return body


def usage_body(job: Job, fields: Common, counted: Counted) -> dict[str, object]:
    """OpenAI's `usage`. A prompt counts once, however many samples it has."""
    prompt_tokens = job.prompt_len
    output_tokens = sum(num_tokens for num_tokens, _ in counted.values())
    body: dict[str, object] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(map(cached_len, _firsts(job, counted)))},
    }
    if fields.timings:
        body["timings"] = [timings(index, usage) for index, (_, usage) in sorted(counted.items()) if usage is not None]
    return body


def timings(index: int, usage: Usage) -> dict[str, object]:
    """Where one sample's time went (seconds) and where its prompt came from (tokens, bytes).

    Pages move while the rest of the prompt is computed: transfer_s lies within prefill_s and is not to be added to it.
    """
    return {
        "index": index,
        "queue_s": round(usage.queue_s, _DIGITS),
        "prefill_s": round(usage.prefill_s, _DIGITS),
        "transfer_s": round(usage.transfer_s, _DIGITS),
        "decode_queue_s": round(usage.decode_queue_s, _DIGITS),
        "worker_wait_s": round(usage.worker_wait_s, _DIGITS),
        "first_token_s": round(usage.first_token_s, _DIGITS),
        "decode_cached_tokens": usage.decode_cached_len,
        "prefill_cached_tokens": usage.prefill_cached_len,
        "transferred_bytes": usage.transferred_bytes,
        "transferred_state_bytes": usage.transferred_state_bytes,
        "num_retractions": usage.num_retractions,
        "speculation_rounds": usage.num_rounds,
        "drafted_tokens": usage.num_drafts,
        "accepted_tokens": usage.num_accepted,
    }
