"""What the numbers mean that workers and the front's control plane tell, and the text form they have among themselves:
`name` or `name{label="value"}`."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

HELP: Mapping[str, str] = {
    "deltaserve_pages": "Pages by pool and state: free, granted (to a writer), owned, quarantined, cached",
    "deltaserve_pages_evictable": "Cached pages that no lease covers",
    "deltaserve_pages_protected": "Cached pages that a lease covers",
    "deltaserve_pages_usage": "Share of a pool's pages that are neither free nor evictable",
    "deltaserve_pages_evicted_total": "Cached pages that were evicted",
    "deltaserve_pages_flushed_total": "Cached pages that a flush dropped",
    "deltaserve_pages_retired_total": "Cached pages of the first pool whose clients said that no next turn comes",
    "deltaserve_pages_retained": "Cached pages of the first pool that clients asked to keep for a while",
    "deltaserve_leases": "Leases on prefixes of the tree",
    "deltaserve_num_running_reqs": "Requests in the batch",
    "deltaserve_num_queue_reqs": "Requests waiting for memory or a row",
    "deltaserve_blocked_need_pages": "Pages of the first pool that the first request refused memory needs; 0: none was",
    "deltaserve_admissions_blocked_total": "How often a waiting request was refused memory",
    "deltaserve_retractions_total": "Running requests that gave their memory back, to go on later",
    "deltaserve_speculation_rounds_total": "Times a request had guesses at its next tokens verified in a step",
    "deltaserve_drafts_verified_total": "Guesses verified",
    "deltaserve_drafts_accepted_total": "Of these, guesses that were right",
    "deltaserve_drafts_right_share": "How often guesses were right lately, those included that were not verified",
    "deltaserve_draft_price": "What a token more costs a decode step, in costs of an empty one; 0: not known yet",
    "deltaserve_unsent_draft_tokens_total": "Tokens of prompts that came without what the draft head keeps of them",
    "deltaserve_steps_total": "Steps of the model",
    "deltaserve_computed_tokens_total": "Tokens computed, prompt and output",
    "deltaserve_attention_tokens_read_total": "KV positions that attention needed",
    "deltaserve_attention_shared_tokens_read_total": "Of these, not read again because rows of a step share them",
    "deltaserve_decode_step_seconds": "Seconds of a step without prompts, quicker quarter of the last 32",
    "deltaserve_compute_threads": "Threads that could compute the last step, those on cores of others among them; "
    "fewer than there are while they wait for cores",
    "deltaserve_prefill_tokens_per_second": "Prompt tokens computed a second, quicker quarter of the last 32 steps",
    "deltaserve_tickets_open": "Tickets that are not over: pages a peer may still reach",
    "deltaserve_ticket_tombstones": "Tickets that prefill must still refuse by name",
    "deltaserve_kept_prompt_logprobs": "Log-probabilities of prompts that prefill keeps until decode has them",
    "deltaserve_transfer_bytes_planned_total": "Bytes of pages that grants asked for",
    "deltaserve_transfer_bytes_sent_total": "Bytes that this worker posted: prefill of prompts, decode of answers",
    "deltaserve_transfer_bytes_landed_total": "Bytes that decode accepted",
    "deltaserve_staged_writes_total": "Writes by way of staging memory that were begun",
    "deltaserve_staged_ahead_total": "Of these, whose memory was there before there was anything to send",
    "deltaserve_staged_bytes_total": "Bytes written by way of staging memory",
    "deltaserve_scattered_bytes_total": "Bytes scattered from staging memory to pages",
    "deltaserve_scatter_seconds_total": "Seconds that the transfer threads of all ranks scattered, between polls",
    "deltaserve_staging_fallbacks_total": "Of the writes, that went directly: no memory in time, or too little",
    "deltaserve_staging_malformed_total": "Frames about staging memory that are none, or name a lease that is over",
    "deltaserve_staging_refused_total": "Staged writes for pages that their ticket was not granted",
    "deltaserve_late_dones_total": "Notifications of chunks whose ticket was over: their pages were not used",
    "deltaserve_conditional_prefills_total": "Prompts decode computed itself though prefill was there",
    "deltaserve_write_backs_told_total": "Answers whose pages prefill was told of",
    "deltaserve_write_backs_sent_total": "Of these, whose pages it asked for and that were sent",
    "deltaserve_write_backs_asked_total": "Answers whose pages prefill asked decode for",
    "deltaserve_pulls_total": "Prompts of which prefill asked decode for pages before it computed the rest",
    "deltaserve_write_backs_dear_total": "Answers whose pages prefill left with decode: not worth their way back",
    "deltaserve_write_back_pages_total": "Pages of answers that came back to prefill and entered its tree",
    "deltaserve_write_back_bytes_total": "Bytes of them",
    "deltaserve_tier_slots": "Pages that the file under the cache has room for; 0 where a worker that started again "
    "cannot have it",
    "deltaserve_tier_pages": "Pages that it holds",
    "deltaserve_tier_pages_stored_total": "Pages copied to it",
    "deltaserve_tier_bytes_stored_total": "Bytes of them, of all ranks",
    "deltaserve_tier_pages_loaded_total": "Pages that came back from it into the cache",
    "deltaserve_tier_bytes_loaded_total": "Bytes of them, of all ranks",
    "deltaserve_tier_tokens_loaded_total": "Tokens of them: neither computed nor fetched again",
    "deltaserve_tier_pages_evicted_total": "Pages of the file that made room for others",
    "deltaserve_tier_failures_total": "Copies that failed, those of slots that do not hold what they should included",
    "deltaserve_draining_bytes": "Bytes that writers still have on their way to withdrawn pages, as they said last",
    "deltaserve_quarantine_age_seconds": "How long the oldest page has waited for a proof that nobody writes it",
    "deltaserve_stale_frames_total": "Frames of boots or greetings that are over, ignored",
    "deltaserve_link_frames_total": "Frames on worker links by kind: received, sent, dropped, malformed, ...",
    "deltaserve_worker_up": "1: the front and this worker have greeted each other",
    "deltaserve_worker_breaker_open": "1: no request is sent there until a probe succeeds",
    "deltaserve_worker_rooms": "Rooms the front has there",
    "deltaserve_worker_resident_keys": "Page keys the front knows to be in its tree",
    "deltaserve_worker_revision": "1, with the revision that the worker serves as a label",
    "deltaserve_front_rooms": "Rooms of the front, waiting and streaming",
    "deltaserve_front_waiting_tokens": "Prompt tokens of rooms without a first token",
    "deltaserve_front_draining": "1: no new request is taken",
    "deltaserve_front_stale_frames_total": "Frames of lives of workers that are over, ignored",
    "deltaserve_front_internal_errors_total": "Bugs met in the control plane",
    "deltaserve_front_events_total": "Rooms submitted, finished, retried_CAUSE, failed_REASON, refused_REASON, and "
    "without_prefill: computed by decode as no prefill worker was there",
}
"""Name |-> meaning. docs/operations.md shows it to operators."""

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One value of one metric, with its labels."""

    name: str
    labels: Mapping[str, str]
    value: float


def read_samples(values: Mapping[str, float]) -> Iterable[MetricSample]:
    """Samples parsed from metrics in text form; text that is no metric is left out."""
    for text, value in values.items():
        found = _SAMPLE.fullmatch(text)
        if found is not None:
            yield MetricSample(found[1], dict(_LABEL.findall(found[2] or "")), value)
