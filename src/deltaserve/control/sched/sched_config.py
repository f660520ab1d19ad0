"""What a scheduler is told once: what an operator may choose, and sizes of the worker."""

from math import lcm
from typing import Literal

import msgspec


class SchedOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a scheduler fills its steps. Lengths in tokens."""

    chunk_len: int = 512
    """Most tokens of one request per step; a multiple of the page size."""
    step_len: int = 2048
    """Most extend tokens per step, over all requests."""
    split_tokens: int = 256
    """Attention is cut at multiples of it."""
    reserve_len: int = 512
    """Decode tokens to keep room for, per running request, when another one is admitted; more after a retraction."""
    extend_len_beside_decode: int | None = None
    """Most extend tokens in a step that has decode rows, so that those keep their pace; None: step_len."""
    step_target_s: float | None = None
    """A step that has decode rows takes no longer, if that can be had by taking in less; None: no matter."""
    radix_cache: bool = True
    policy: str = "fcfs"
    """Order of the waiting requests: a name in policy.POLICIES."""
    max_drafts: int = 0
    """Guesses at a row's next tokens that a step verifies at the most; 0: no speculation."""
    draft_policy: Literal["adaptive", "always"] = "adaptive"
    """Whether guesses are verified where that pays, or all of them."""
    num_ahead: int = 0
    """Steps planned at most while another one computes, where what it draws does not decide what they compute."""
    state_chunk_len: int = 64
    """Tokens that a recurrent layer computes as one piece: its states are kept at multiples of it, in whole pages."""
    state_interval_len: int | None = None
    """A recurrent state is kept every so many tokens besides where one always is; None: there alone."""

    @property
    def near_len(self) -> int:
        """Tokens of a prompt that are computed in one step beside others: not worth a hand-over."""
        return self.step_len if self.extend_len_beside_decode is None else self.extend_len_beside_decode


class SchedConfig(SchedOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options and sizes of one scheduler."""

    page_size: int
    max_running: int
    plans_behind_prompts: bool = False
    """Whether a step may be planned while one computes chunks of prompts, where all their pages are kept."""
    ends_with_prompt: bool = False
    """Whether a request is over with the first token that it draws: on prefill."""
    drafts_take_places: bool = False
    """Whether guessing writes into a row's pages behind its tokens: a draft head does."""

    @property
    def grid_len(self) -> int:
        """Recurrent states are kept at multiples of it: whole pages, and whole pieces."""
        return lcm(self.state_chunk_len, self.page_size)
