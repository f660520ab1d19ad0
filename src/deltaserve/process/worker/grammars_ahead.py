"""A worker's grammars, compiled from when it hears of a request: mostly they are there before the row draws."""

from collections.abc import Callable

from deltaserve.core.sampling import MAX_GRAMMAR_BYTES
from deltaserve.core.wire.messages import Message, Offer, Submit


class GrammarsAhead:
    """Looks at what a loop hears."""

    def __init__(self, compile_beside: Callable[[str], object]) -> None:
        """`compile_beside`: begins to compile a grammar, on another thread, unless it is there."""
        self._compile_beside = compile_beside

    def hear(self, message: Message) -> None:
        if not isinstance(message, Submit | Offer):
            return
        grammar = message.sampling.grammar
        if grammar is not None and len(grammar) <= MAX_GRAMMAR_BYTES:  # a longer one is refused
            self._compile_beside(grammar)
