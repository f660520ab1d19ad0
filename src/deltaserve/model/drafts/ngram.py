"""NGRAM: text goes on as it did before in prompt and answer."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deltaserve.core.tokens import pack_u32
from deltaserve.model.drafts.draft_algorithm import DraftAlgorithm
from deltaserve.model.drafts.drafter import DraftAsk


class NgramDrafter:
    """No model: what followed the last time that the text read as it reads now (prompt lookup, Saxena 2023).

    The longest ending that occurred before counts, of equally long ones the latest. Good where an answer repeats what
    is in the prompt: documents that are summarised, code that is edited, answers that quote; else it has no guess.
    """

    def __init__(self, min_len: int = 2, max_len: int = 8) -> None:
        """Lengths in tokens of the ending that must have occurred before."""
        self._min_len, self._max_len = min_len, max_len

    def propose(self, asked: Sequence[DraftAsk]) -> list[bytes]:
        return [pack_u32(self._following(ask.tokens, ask.count)) for ask in asked]

    def _following(self, tokens: npt.NDArray[np.int64], count: int) -> list[int]:
        if len(tokens) <= self._min_len or count < 1:
            return []
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # where the last token stood before
        matched = 0
        for length in range(1, self._max_len + 1):
            found = ends[ends >= length - 1]
            found = found[tokens[found - (length - 1)] == tokens[-length]]
            if not len(found):
                break
            ends, matched = found, length
            if length + 1 > len(tokens) - 1:
                break
        if matched < self._min_len:
            return []
        start = int(ends[-1]) + 1
        following: list[int] = tokens[start : start + count].tolist()
        return following


ALGORITHM = DraftAlgorithm(make_drafter=NgramDrafter)
