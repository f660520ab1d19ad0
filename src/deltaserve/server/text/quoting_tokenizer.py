"""Ids of a text in which some spellings of a control token are that token and others are what a user wrote."""

import re
import secrets
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer


class QuotingTokenizer:
    """A tokenizer beside the model's own that reads control tokens under secret names only.

    The text is encoded in one piece: cut at the control tokens, each part would begin like a text of its own
    (SentencePiece puts a space in front of one), and the same message would become other ids than without a quote.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = {token: each for token, each in tokenizer.get_added_tokens_decoder().items() if each.special}
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = True  # spelled out they are ordinary characters
        self._names = {each.content: f"\ue000{secrets.token_hex(12)}\ue001" for each in added.values()}
        self._tokenizer.add_tokens(
            [
                AddedToken(self._names[each.content], lstrip=each.lstrip, rstrip=each.rstrip, normalized=False)
                for each in added.values()
            ]
        )
        self._ids = {self._tokenizer.token_to_id(self._names[each.content]): token for token, each in added.items()}
        ordered = sorted(self._names, key=len, reverse=True)
        self.control = re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")
        """Pattern of any control token."""

    def encode(self, pieces: Sequence[tuple[str, bool]]) -> tuple[int, ...]:
        """Ids of the pieces in a row, each (text, is control token)."""
        text = "".join(self._names[piece] if is_control else piece for piece, is_control in pieces)
        return tuple(self._ids.get(token, token) for token in fast_ids(self._tokenizer, text, add_special_tokens=False))


def fast_ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Ids of the text, encoded as a batch of one: `encode` holds the interpreter's lock, 0.4 s for 300 KB, and stops
    every stream meanwhile."""
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids
