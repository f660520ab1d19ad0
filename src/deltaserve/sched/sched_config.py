"""What a scheduler is told once: sizes and lengths of one role."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedConfig:
    """Lengths in tokens."""

    page_size: int
    max_running: int
    chunk_len: int
    """At most so many tokens of one request per step; a multiple of page_size."""
    step_len: int
    """At most so many extend tokens per step, over all requests."""
    split_tokens: int
    reserve_len: int
    """Decode tokens to keep room for, per running request, when another one is admitted; more after a retraction."""
    extend_len_beside_decode: int | None = None
    """At most so many extend tokens in a step that has decode rows, so that those keep their pace; None: step_len."""
    radix_cache: bool = True
    policy: str = "fcfs"
