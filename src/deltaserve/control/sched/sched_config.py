"""What a scheduler is told once: sizes and lengths of one role."""

from dataclasses import dataclass
from math import lcm
from typing import Literal


@dataclass(frozen=True, slots=True)
class SchedConfig:
    """Sizes and lengths of one scheduler. Lengths in tokens."""

    page_size: int
    max_running: int
    chunk_len: int
    """Most tokens of one request per step; a multiple of page_size."""
    step_len: int
    """Most extend tokens per step, over all requests."""
    split_tokens: int
    reserve_len: int
    """Decode tokens to keep room for, per running request, when another one is admitted; more after a retraction."""
    extend_len_beside_decode: int | None = None
    """Most extend tokens in a step that has decode rows, so that those keep their pace; None: step_len."""
    step_target_s: float | None = None
    """A step that has decode rows takes no longer, if that can be had by taking in less; None: no matter."""
    radix_cache: bool = True
    policy: str = "fcfs"
    max_drafts: int = 0
    """Guesses at a row's next tokens that a step verifies at the most; 0: no speculation."""
    draft_policy: Literal["adaptive", "always"] = "adaptive"
    """Whether guesses are verified where that pays, or all of them."""
    drafts_take_places: bool = False
    """Whether guessing writes into a row's pages behind its tokens: a draft head does."""
    num_ahead: int = 0
    """Steps planned while another one computes: 0 or 1."""
    state_chunk_len: int = 64
    """Tokens that a recurrent layer computes as one piece."""
    state_interval_len: int | None = None
    """A recurrent state is kept every so many tokens besides where one always is; None: there alone."""

    @property
    def grid_len(self) -> int:
        """Recurrent states are kept at multiples of it: whole pages, and whole pieces."""
        return lcm(self.state_chunk_len, self.page_size)
