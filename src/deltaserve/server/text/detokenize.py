"""Turns token ids into text, one at a time: the bytes of each token, and a UTF-8 decoder that waits for characters."""

import codecs
import json
import re
from collections.abc import Callable, Iterable

from tokenizers import Tokenizer

from deltaserve.core.errors import ConfigError

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>\Z")
_REPLACE = codecs.lookup("utf-8").incrementaldecoder


class TokenBytes:
    """The bytes each token id stands for. Ids without text (padding rows of the vocabulary) have none."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        convert = _converter(tokenizer)
        self._bytes: list[bytes] = [b""] * vocab_size
        for piece, token in tokenizer.get_vocab(with_added_tokens=False).items():
            self._bytes[token] = convert(piece)
        special = set()
        for token, added in tokenizer.get_added_tokens_decoder().items():
            self._bytes[token] = added.content.encode()
            if added.special:
                special.add(token)
        self.special_ids = frozenset(special)
        self.longest = max(map(len, self._bytes))
        """Bytes of the longest token."""

    def of(self, token: int) -> bytes:
        """Bytes of one token; of an added token, its content."""
        return self._bytes[token]

    def label(self, token: int) -> str:
        r"""A printable name: the text, or `bytes:\xe4\xbd` when the bytes are no whole characters."""
        data = self._bytes[token]
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class Detokenizer:
    """Text of a growing list of tokens. Never shows part of a character; invalid bytes become U+FFFD once certain."""

    def __init__(self, table: TokenBytes, hidden: frozenset[int] = frozenset()) -> None:
        self._table = table
        self._hidden = hidden
        self._decoder = _REPLACE("replace")

    def push(self, token: int) -> str:
        """Take the next token; returns the characters it completes."""
        if token in self._hidden:
            return ""
        return self._decoder.decode(self._table.of(token))

    def flush(self) -> str:
        """The output is over: an incomplete character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


def decode_all(table: TokenBytes, tokens: Iterable[int], hidden: frozenset[int] = frozenset()) -> str:
    """Text of a complete list of tokens."""
    detokenizer = Detokenizer(table, hidden)
    return "".join([detokenizer.push(token) for token in tokens]) + detokenizer.flush()


class _ByteLevel:
    """Pieces spell bytes in GPT-2's printable alphabet."""

    def __init__(self) -> None:
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
        hidden = [byte for byte in range(256) if byte not in shown]
        self._bytes = {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}

    def __call__(self, piece: str) -> bytes:
        if all(char in self._bytes for char in piece):
            return bytes(self._bytes[char] for char in piece)
        return piece.encode()


def _metaspace(piece: str) -> bytes:
    """SentencePiece: `▁` is a space, `<0xE4>` is a byte. A leading space is kept: output continues a prompt."""
    byte = _BYTE_PIECE.match(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()


def _converter(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    kinds = {str(step.get("type")) for step in [decoder, *decoder.get("decoders", [])]}
    if "ByteLevel" in kinds:
        return _ByteLevel()
    if kinds & {"Metaspace", "ByteFallback"}:
        return _metaspace
    raise ConfigError(f"tokenizer.json: decoder {sorted(kinds)} is not supported; ByteLevel and Metaspace are")
