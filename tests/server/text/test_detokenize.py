"""Token ids to text, piece by piece: the same text as all at once, and never half a character."""

import itertools
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from deltaserve.core.errors import ConfigError
from deltaserve.server.text.detokenize import Detokenizer, TokenBytes, decode_all
from tests.fixtures.text_folder import VOCAB
from tests.fixtures.tiny_tokenizer import build_tokenizer

TOKENIZER: Tokenizer = build_tokenizer(["baku", "dömi"]).backend_tokenizer
TABLE = TokenBytes(TOKENIZER, VOCAB)
TEXT = "h\u00e9llo \u4f60\u597d \U0001f600 \u200d x"

DOEMI = 265
"""An added token with a letter of the byte alphabet: the library (0.23) takes the letter for a byte and breaks it."""

ids = st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1).filter(lambda token: token != DOEMI), max_size=40)


def _pieces(tokens: list[int], hidden: frozenset[int] = frozenset()) -> list[str]:
    detokenizer = Detokenizer(TABLE, hidden)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@given(ids)
@example(list("\U0001f600".encode())[:3])
@example([0xE4, 0xBD, 258, 0xA0])
@example([0xF0, 0x9F, 0x41])
def test_pieces_join_to_the_librarys_own_decoding(tokens: list[int]) -> None:
    assert "".join(_pieces(tokens)) == TOKENIZER.decode(tokens, skip_special_tokens=False)
    shown = "".join(_pieces(tokens, TABLE.special_ids))
    assert shown == TOKENIZER.decode(tokens, skip_special_tokens=True)
    assert decode_all(TABLE, tokens, TABLE.special_ids) == shown


@given(st.text(max_size=30))
@example(TEXT)
def test_valid_text_never_shows_a_replacement(text: str) -> None:
    pieces = _pieces(list(text.encode()))
    assert "".join(pieces) == text
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")
    assert pieces[-1] == "", "nothing is left to flush after whole characters"


def test_a_character_appears_with_its_last_byte() -> None:
    assert _pieces(list("\u4f60".encode())) == ["", "", "\u4f60", ""]


def test_an_incomplete_character_is_replaced_only_at_the_end() -> None:
    assert _pieces([0xE4, 0xBD]) == ["", "", "\ufffd"]


def test_labels_name_bytes_that_are_no_character() -> None:
    assert TABLE.label(0xE4) == "bytes:\\xe4"
    assert TABLE.label(65) == "A"
    assert TABLE.label(258) == "<|im_end|>"
    assert TABLE.of(DOEMI) == "dömi".encode()
    assert (TABLE.of(VOCAB - 1), TABLE.label(VOCAB - 1)) == (b"", "")


def _byte_fallback_tokenizer() -> Tokenizer:
    pieces = ["\u2581", "\u2581hello", "world", *[f"<0x{byte:02X}>" for byte in range(256)]]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


@given(st.lists(st.one_of(st.sampled_from(["\u2581hello", "world", "\u2581", "</s>"]), st.characters()), max_size=12))
def test_byte_fallback_pieces_join_to_the_librarys_own_decoding(pieces: list[str]) -> None:
    tokenizer = _byte_fallback_tokenizer()
    table = TokenBytes(tokenizer, 300)
    encoded = [[token] if (token := tokenizer.token_to_id(p)) is not None else _bytes(tokenizer, p) for p in pieces]
    tokens = list(itertools.chain.from_iterable(encoded))
    assert decode_all(table, tokens) == tokenizer.decode(tokens, skip_special_tokens=False)


def _bytes(tokenizer: Tokenizer, text: str) -> list[int]:
    found = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode("utf-8", "replace")]
    assert all(token is not None for token in found)
    return [token for token in found if token is not None]


def test_an_unknown_decoder_is_refused_by_name() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        TokenBytes(tokenizer, 1)


def test_the_decoder_kind_is_found_inside_a_sequence() -> None:
    kinds = [step["type"] for step in json.loads(_byte_fallback_tokenizer().to_str())["decoder"]["decoders"]]
    assert "ByteFallback" in kinds
