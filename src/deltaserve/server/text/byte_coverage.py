"""Bytes that a vocabulary has no token of: without a token for the unknown, the library drops them and says nothing."""

import logging

from tokenizers import Tokenizer, models

from deltaserve.core.errors import ConfigError
from deltaserve.server.text.detokenize import TokenBytes

_log = logging.getLogger(__name__)
_PLAIN = "\n" + bytes(range(32, 127)).decode()
_OF_SCRIPTS = frozenset([*range(0x80, 0xC0), *range(0xC2, 0xF1)])
"""Bytes in the UTF-8 of the world's scripts. Control characters and the planes without a character are left out:
published vocabularies that were trained on text lack some of these."""


def check_coverage(tokenizer: Tokenizer, table: TokenBytes, vocab_size: int, where: str) -> None:
    """Raises ConfigError where plain text would vanish from prompts; warns where that of other scripts would."""
    model = tokenizer.model
    if not isinstance(model, models.BPE) or _has_unknown(tokenizer, model):
        return
    known = {byte for token in range(vocab_size) if len(found := table.of(token)) == 1 for byte in found}
    why = "and there is no token for the unknown: they would vanish from prompts"
    asked = {byte for char in _PLAIN for byte in _normalized(tokenizer, char).encode()} & {*_PLAIN.encode()}
    if asked - known:
        lost = bytes(sorted(asked - known)).decode()
        raise ConfigError(f"{where}: the vocabulary has no token of the characters {lost[:40]!r}, {why}")
    if _OF_SCRIPTS - known:
        lost = bytes(sorted(_OF_SCRIPTS - known)).hex(" ")
        count = len(_OF_SCRIPTS - known)
        _log.warning("%s: the vocabulary has no token of %d bytes of UTF-8 (%s), %s", where, count, lost[:40], why)


def _normalized(tokenizer: Tokenizer, char: str) -> str:
    """The character as the vocabulary sees it: lower case, for one, or `▁` for a space."""
    if tokenizer.normalizer is None:
        return char
    return str(tokenizer.normalizer.normalize_str(char)).replace("▁", " ")


def _has_unknown(tokenizer: Tokenizer, model: models.BPE) -> bool:
    return model.unk_token is not None and tokenizer.token_to_id(model.unk_token) is not None
