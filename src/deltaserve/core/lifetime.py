"""How long cached data must be kept, and what of it is needed to continue at a position.

    to continue at page index e    FULL [0, e)    WINDOW [page of the oldest visible token, e)    STATE [e - 1, e)

A recurrent state is filed under the page index of the last token it has taken in, so one rule serves all three: a
prefix of e pages is usable iff every pool has all of [first_needed, e). A step that computes positions [start, end)
reads the state of start - 1 and writes that of end - 1; within a page, and where nobody keeps it, that is one slot.
"""

from dataclasses import dataclass
from enum import Enum


class Lifetime(Enum):
    """Kind of a page group's lifetime."""

    FULL = "full"
    """Kept as long as any token after it may be computed."""
    WINDOW = "window"
    """Kept only while a token to come can see it."""
    STATE = "state"
    """A recurrent state (a checkpoint) at one position: one slot, needed to continue exactly there."""


@dataclass(frozen=True, slots=True)
class Retention:
    """The lifetime of one pool's pages. Page groups of equal retention share page ids."""

    lifetime: Lifetime
    window_len: int | None = None
    """Tokens a token sees, itself included; of WINDOW only."""

    def __post_init__(self) -> None:
        if (self.lifetime is Lifetime.WINDOW) != (self.window_len is not None):
            raise ValueError("a window has a length, and nothing else has one")
        if self.window_len is not None and self.window_len < 1:
            raise ValueError(f"a window of {self.window_len} tokens")

    def first_needed(self, num_tokens: int, page_size: int) -> int:
        """First page index to keep of `num_tokens` tokens: of what the token after them and all later ones see.

        Of a window it is also what going on at the last page boundary needs, at most a page more: whoever ends inside a
        page leaves a prefix that ends at that boundary, which is of no use without its window.
        """
        is_window = self.lifetime is Lifetime.WINDOW
        return self.first_seen(num_tokens // page_size * page_size if is_window else num_tokens, page_size)

    def first_seen(self, num_tokens: int, page_size: int) -> int:
        """First page index without which the token at position `num_tokens` cannot be computed."""
        match self.lifetime:
            case Lifetime.FULL:
                return 0
            case Lifetime.WINDOW:
                return max(0, num_tokens + 1 - (self.window_len or 1)) // page_size
            case Lifetime.STATE:
                return max(0, -(-num_tokens // page_size) - 1)

    def most_pages(self, num_tokens: int, ahead_len: int, page_size: int) -> int:
        """Most pages that a sequence of `num_tokens` has to hold at once when it computes `ahead_len` at a time."""
        all_pages = -(-num_tokens // page_size)
        match self.lifetime:
            case Lifetime.FULL:
                return all_pages
            case Lifetime.WINDOW:
                behind = -(-((self.window_len or 1) - 1) // page_size)
                return min(all_pages, behind - (-(page_size - 1 + ahead_len) // page_size))
            case Lifetime.STATE:
                return min(all_pages, 2)  # the checkpoint it goes on from, and the state it writes


KEEP_ALL = Retention(Lifetime.FULL)
KEEP_LAST = Retention(Lifetime.STATE)
