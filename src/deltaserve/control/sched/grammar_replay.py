"""A grammar's state as a function of the output tokens: whoever draws next brings it behind exactly those.

So prefill's first token, a row that was retracted, one that another worker hands over, one that goes on after its
worker's death and one whose guesses were wrong are ruled by the same state. The executor replays llguidance's matchers,
the simulator its own stand-in.
"""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from deltaserve.core.tokens import TOKEN_BYTES, unpack_u32


class Matcher(Protocol):
    """A grammar's state behind some tokens."""

    def consume_tokens(self, sampled_tokens: list[int], /) -> bool:
        """Go on behind these. False: they are none of the grammar's, or it met a limit; the state is of no use."""
        ...

    def rollback(self, num_tokens: int, /) -> bool:
        """Go back by so many tokens. False: that cannot be done; the state is of no use."""
        ...


M = TypeVar("M", bound=Matcher)


class GrammarReplay(Generic[M]):
    """One row's matcher, and the output that it stands behind."""

    def __init__(self, start: Callable[[], M]) -> None:
        """`start`: a new matcher, which has consumed nothing."""
        self._start = start
        self._matcher: M | None = None
        self._consumed = b""

    def behind(self, output: bytes) -> M | None:
        """The matcher behind these packed output tokens, all since the client's prompt. None: they are none of the
        grammar's, or it met a limit."""
        if self._matcher is None or not self._go_back_to(self._matcher, output):
            self._matcher, self._consumed = self._start(), b""
        rest = output[len(self._consumed) :]
        if rest and not self._matcher.consume_tokens(list(unpack_u32(rest))):
            self._matcher = None
            return None
        self._consumed = output
        return self._matcher

    def _go_back_to(self, matcher: M, output: bytes) -> bool:
        """Whether the matcher stands behind what `output` begins with: as it does, or by giving tokens back."""
        if output.startswith(self._consumed):
            return True
        num_bytes = _common_len(self._consumed, output)
        num_back = (len(self._consumed) - num_bytes) // TOKEN_BYTES
        self._consumed = output[:num_bytes]
        return matcher.rollback(num_back)


def _common_len(one: bytes, other: bytes) -> int:
    """Bytes of the tokens with which both begin."""
    size = TOKEN_BYTES
    ends = range(size, min(len(one), len(other)) + 1, size)
    differs = next((end for end in ends if one[end - size : end] != other[end - size : end]), None)
    return min(len(one), len(other)) if differs is None else differs - size
