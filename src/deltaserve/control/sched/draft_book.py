"""What a request's guesses are, and how they have fared."""

from dataclasses import dataclass


@dataclass(slots=True)
class DraftBook:
    """The guesses at one request's next tokens. Counts are over its whole life on this worker."""

    drafts: bytes = b""
    """Packed ids that may follow its tokens; they are none of them."""
    right_share: float | None = None
    """How often its guesses were right lately. None: none was compared yet."""
    num_rounds: int = 0
    """Steps in which guesses were verified."""
    num_verified: int = 0
    num_right: int = 0

    def drop(self) -> None:
        """The tokens that they were to follow are not the request's any more."""
        self.drafts = b""


@dataclass(frozen=True, slots=True)
class DraftStart:
    """Where a draft head begins to fill its pages, for a row whose prompt was computed elsewhere."""

    first: int
    """Position to begin at; what is before it is there."""
    features: bytes
    """Features that the head reads of the token before that position; empty: nobody knows them."""
