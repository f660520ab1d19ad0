"""What every dialect tells in the same numbers: cached tokens, times, log probabilities."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from deltaserve.core.hints import HintOutcome
from deltaserve.core.sampling import TokenLogprobs
from deltaserve.core.wire.messages import Usage, Weighed

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class Count(NamedTuple):
    """What is counted of one sample."""

    num_tokens: int = 0
    """Output tokens shown."""
    report: Usage | None = None
    """The engine's latest: from the first token on, complete with the end."""
    num_reasoning: int = 0
    """Output tokens that were reasoning, with its markers."""


Counted = Mapping[int, Count]
"""By index of the sample."""

_DIGITS = 6
"""Decimal places of seconds: clocks of different processes know no more."""

_WORSE = (HintOutcome.ACCEPTED, HintOutcome.CLIPPED, HintOutcome.REFUSED)


def cached_len(usage: Usage) -> int:
    """Prompt tokens that were found in a cache, on whichever side held more."""
    return max(usage.decode_cached_len, usage.prefill_cached_len)


def loaded_len(usage: Usage) -> int:
    """What of `cached_len` was read from the file under that side's cache."""
    prefill_has_more = usage.prefill_cached_len > usage.decode_cached_len
    return usage.prefill_loaded_len if prefill_has_more else usage.decode_loaded_len


def cached_details(*usages: Usage) -> dict[str, int]:
    """Details of cached tokens in SGLang's form, and by side. `storage`: what was read from the file under the cache of
    the side that held more; all else was in the memory of a worker."""
    stored = sum(map(loaded_len, usages))
    return {
        "device": sum(map(cached_len, usages)) - stored,
        "host": 0,
        "storage": stored,
        "decode": sum(usage.decode_cached_len for usage in usages),
        "prefill": sum(usage.prefill_cached_len for usage in usages),
    }


def timings(index: int, usage: Usage) -> dict[str, object]:
    """Where one sample's time went (seconds) and where its prompt came from (tokens, bytes).

    Decode computed the prompt itself where `local_wait_tokens` is no more than `prefill_wait_tokens`, nor than
    `pull_wait_tokens` where that is not 0, and what it would compute no more than `extend_limit_tokens`; all that went
    into these sums is told (docs/operations.md), and all of it is 0 or null where that was no question.

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
        "decode_loaded_tokens": usage.decode_loaded_len,
        "prefill_loaded_tokens": usage.prefill_loaded_len,
        "prefill_pulled_tokens": usage.prefill_pulled_len,
        "transferred_bytes": usage.transferred_bytes,
        "transferred_state_bytes": usage.transferred_state_bytes,
        **(_NO_QUESTION if usage.weighed is None else weighed(usage.weighed)),
        "num_retractions": usage.num_retractions,
        "speculation_rounds": usage.num_rounds,
        "drafted_tokens": usage.num_drafts,
        "accepted_tokens": usage.num_accepted,
    }


_NO_QUESTION = {
    "computed_on": None,
    "cores": None,
    "missing_tokens": 0,
    "filed_tokens": 0,
    "load_tokens": 0,
    "backlog_tokens": 0,
    "decoding_rows": 0,
    "pace_alone": 0.0,
    "pace_beside": 0.0,
    "pace_of_row": 0.0,
    "extend_limit_tokens": 0,
    "prefill_queue_tokens": 0,
    "prefill_lacking_tokens": 0,
    "handover_tokens": 0,
    "pullable_tokens": 0,
    "pull_tokens": 0,
    "local_wait_tokens": 0,
    "prefill_wait_tokens": 0,
    "pull_wait_tokens": 0,
}


def weighed(weighing: Weighed) -> dict[str, str | float]:
    """What decided which side computed a prompt (tokens, rows, paces)."""
    way = weighing.way
    return {
        "computed_on": "decode" if weighing.is_near else "prefill",
        "cores": weighing.cores.value,
        "missing_tokens": weighing.missing_len,
        "filed_tokens": weighing.filed_len,
        "load_tokens": weighing.load_len,
        "backlog_tokens": weighing.backlog_len,
        "decoding_rows": weighing.num_rows,
        "pace_alone": weighing.pace_alone,
        "pace_beside": weighing.pace_beside,
        "pace_of_row": weighing.pace_of_row,
        "extend_limit_tokens": weighing.most_len,
        "prefill_queue_tokens": way.queue_len,
        "prefill_lacking_tokens": way.lacking_len,
        "handover_tokens": way.handover_len,
        "pullable_tokens": way.pulled_len,
        "pull_tokens": way.pull_len,
        "local_wait_tokens": weighing.local_wait_len,
        "prefill_wait_tokens": weighing.prefill_wait_len,
        "pull_wait_tokens": weighing.pull_wait_len,
    }


def hint_answers(counted: Counted) -> dict[str, object]:
    """What became of each hint, for a usage; nothing where none was given. What one sample refused is refused, and what
    one clipped clipped. The reason is that of the worst."""
    reports = [count.report for _, count in sorted(counted.items())]
    answers = [answer for report in reports if report is not None for answer in report.hints]
    if not answers:
        return {}
    answers.sort(key=lambda answer: _WORSE.index(answer.outcome))
    told = {answer.hint.value: answer.outcome.value for answer in answers}
    reason = answers[-1].reason
    return {"kv_hints": {**told, **({"reason": reason} if reason else {})}}


def logprob_entries(
    pairs: Iterable[tuple[int, TokenLogprobs]], label: Callable[[int], str], data: Callable[[int], bytes]
) -> list[dict[str, object]]:
    """Tokens with their logprobs as chats and responses have them. `label`: a token's text, `data`: its bytes."""

    def entry(token: int, logprob: float) -> dict[str, object]:
        return {"token": label(token), "logprob": finite(logprob), "bytes": list(data(token))}

    return [
        entry(token, value.logprob) | {"top_logprobs": [entry(*pair) for pair in value.top]} for token, value in pairs
    ]


def finite(logprob: float) -> float:
    """A number JSON can say."""
    return max(logprob, LOWEST_LOGPROB)
