"""A tokenizer against the embedding of its model.

Published folders have added tokens without a row in it: `<image_soft_token>` of Gemma 3's smallest, padding that a
fine-tune added. No prompt may hold such an id, so text that spells one is ordinary text.
"""

import json
import logging
from dataclasses import dataclass

from tokenizers import Tokenizer

from deltaserve.core.errors import ConfigError
from deltaserve.server.text.library_errors import library_errors

_log = logging.getLogger(__name__)
_MAX_ID = 1 << 24
"""The library counts up to the largest id to write a vocabulary: 15 s and more for one of 32 bits."""


@dataclass(frozen=True, slots=True)
class Fitted:
    tokenizer: Tokenizer
    left_out: tuple[str, ...]
    """Added tokens that the model has no embedding of."""


def fitted(tokenizer: Tokenizer, vocab_size: int) -> Fitted:
    """`vocab_size`: rows of the embedding. Raises ConfigError where ordinary tokens have none."""
    beyond = {token: i for token, i in tokenizer.get_vocab(with_added_tokens=True).items() if i >= vocab_size}
    if not beyond:
        return Fitted(tokenizer, ())
    largest = max(beyond.values())
    smaller = _without(tokenizer, beyond) if largest < _MAX_ID else None
    vocab = {} if smaller is None else smaller.get_vocab(with_added_tokens=True)
    if smaller is None or max(vocab.values(), default=-1) >= vocab_size or _first_id(smaller) >= vocab_size:
        raise ConfigError(f"tokenizer.json: id {largest} is outside the model's vocabulary of {vocab_size}")
    names = ", ".join(sorted(beyond)[:8])
    _log.warning("tokenizer.json: %d added tokens are text, for the model has no embedding: %s", len(beyond), names)
    return Fitted(smaller, tuple(beyond))


def _without(tokenizer: Tokenizer, beyond: dict[str, int]) -> Tokenizer | None:
    """The tokenizer without the tokens beyond; None where others than added tokens are among them."""
    parts = json.loads(tokenizer.to_str())
    if not beyond.keys() <= {token["content"] for token in parts["added_tokens"]}:
        return None
    parts["added_tokens"] = [token for token in parts["added_tokens"] if token["content"] not in beyond]
    vocab = parts["model"].get("vocab")
    if isinstance(vocab, dict):
        parts["model"]["vocab"] = {token: i for token, i in vocab.items() if token not in beyond}
    try:
        with library_errors("tokenizer.json"):
            return Tokenizer.from_str(json.dumps(parts))
    except ConfigError:  # merges or the post-processor need one of them
        return None


def _first_id(tokenizer: Tokenizer) -> int:
    """The largest id that a prompt gets beside its text."""
    return max(tokenizer.encode("", add_special_tokens=True).ids, default=-1)
