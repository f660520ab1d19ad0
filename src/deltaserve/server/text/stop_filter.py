"""Stop strings: found in text that comes in pieces."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

_FIRST_MARK, _MAX_MARKS = 0xD800, 2048
"""Halves of surrogate pairs, which no decoded text holds."""


class HiddenStops:
    """Stop strings, some with control tokens in them that the text does not show.

    Where such a token comes, the text that is looked through has a mark, a character that no text holds: so a stop
    string is found there, as well as where the model spells the token in ordinary characters.
    """

    def __init__(self, stops: Sequence[str], hidden: Mapping[str, int], pattern: re.Pattern[str]) -> None:
        """`hidden`: control token |-> id; `pattern` finds any of them."""
        tokens = dict.fromkeys(found for stop in stops for found in pattern.findall(stop) if found in hidden)
        marks = {token: chr(_FIRST_MARK + index) for index, token in enumerate(tokens) if index < _MAX_MARKS}
        self._texts = {mark: token for token, mark in marks.items()}
        self.marks = {hidden[token]: mark for token, mark in marks.items()}
        """Id of a hidden token |-> its mark."""
        marked = [pattern.sub(lambda found: marks.get(found[0], found[0]), stop) for stop in stops] if marks else []
        self.stops = tuple(dict.fromkeys([*stops, *marked]))

    def told(self, stop: str) -> str:
        """A stop string as the client wrote it."""
        return "".join(self._texts.get(char, char) for char in stop)

    def shown(self, text: str) -> str:
        """The text without marks."""
        return "".join(char for char in text if char not in self._texts) if self._texts else text


class StopFilter:
    """Lets text through up to the first stop string, holding back a tail that may still become one.

    The stop string that is complete first wins (of two complete at once, the longer), so the result does not depend
    on how the text was cut into pieces.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._whole = frozenset(stops)
        self._heads = _heads(stops)
        self._sizes = sorted({len(stop) for stop in stops}, reverse=True)
        self._held = ""
        self.matched: str | None = None
        """The stop string found. Nothing may be pushed after it."""

    def push(self, text: str) -> str:
        """Take the next piece; returns what may be shown. Sets `matched` when a stop string is complete."""
        if not self._sizes:
            return text
        num_known = len(self._held)
        self._held += text
        found = self._first_match(num_known)
        if found is not None:
            start, self.matched = found
            shown, self._held = self._held[:start], ""
            return shown
        keep = self._tail_len()
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def pass_by(self, text: str) -> str:
        """Show text without looking for stop strings in it."""
        return self.flush() + text

    def flush(self) -> str:
        """The output is over: what was held back is ordinary text."""
        shown, self._held = self._held, ""
        return shown

    def _first_match(self, num_known: int) -> tuple[int, str] | None:
        """(start, stop string) of the one that is complete first. None ends within the first `num_known` characters."""
        for end in range(num_known + 1, len(self._held) + 1):
            for size in self._sizes:
                if size <= end and self._held[end - size : end] in self._whole:
                    return end - size, self._held[end - size : end]
        return None

    def _tail_len(self) -> int:
        """Length of the longest suffix that is a proper prefix of a stop string."""
        for size in range(min(len(self._held), self._sizes[0] - 1), 0, -1):
            if self._held[-size:] in self._heads:
                return size
        return 0


@lru_cache(maxsize=16)
def _heads(stops: tuple[str, ...]) -> frozenset[str]:
    """Proper prefixes of the stop strings: one look for each length of a tail, however many stop strings there are."""
    return frozenset(stop[:size] for stop in stops for size in range(1, len(stop)))
