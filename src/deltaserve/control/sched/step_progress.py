"""What a committed step did for each of its requests."""

from collections.abc import Iterator
from dataclasses import dataclass

from deltaserve.control.sched.plan import ItemOutcome, Sampled
from deltaserve.control.sched.request import Request
from deltaserve.core.sampling import TokenLogprobs
from deltaserve.core.tokens import unpack_u32


@dataclass(frozen=True, slots=True)
class StepProgress:
    """What one step did for one request."""

    request: Request
    computed_from: int
    is_extend: bool
    """Whether it computed more than the last token and guesses behind it."""
    drawn: tuple[Sampled, ...]
    outcome: ItemOutcome
    prompt_logprobs: tuple[TokenLogprobs, ...]
    features: bytes
    """Features that the step returned: see ItemResult."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """Requests of which one step computed the last token and drew the next one; nothing else is to be told of them."""

    requests: tuple[Request, ...]
    """The same object as long as they are the same."""
    tokens: bytes
    """Packed ids drawn, one each."""
    ending: tuple[Request, ...]
    """Those whose last token, by their length, was drawn. May be of others too, which have ended meanwhile."""

    def __iter__(self) -> Iterator[StepProgress]:
        for request, token in zip(self.requests, unpack_u32(self.tokens), strict=True):
            drawn = (Sampled(token),)
            yield StepProgress(request, request.num_computed - 1, False, drawn, ItemOutcome.COMPUTED, (), b"")


@dataclass(frozen=True, slots=True)
class Committed:
    """What one step did for all its requests that had not ended meanwhile."""

    others: tuple[StepProgress, ...]
    decoded: Decoded
    """What is not told one by one."""

    def __iter__(self) -> Iterator[StepProgress]:
        yield from self.decoded
        yield from self.others

    def __len__(self) -> int:
        return len(self.decoded.requests) + len(self.others)

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        others = sum(p.request.num_computed - p.computed_from for p in self.others)
        return len(self.decoded.requests) + others

    @property
    def has_extends(self) -> bool:
        return any(p.is_extend for p in self.others)


NONE_DECODED = Decoded((), b"", ())
