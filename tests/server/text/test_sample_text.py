"""The text of one sample: whatever the deltas, the same text, ended where it must end."""

from dataclasses import replace

import pytest

from deltaserve.control.front.client import OutputDelta
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.wire.messages import FinishReason
from deltaserve.server.text.sample_text import SampleText, TextOptions, TextPiece, join
from deltaserve.server.text.text_codec import TextCodec
from tests.fixtures.tiny_tokenizer import EOS_ID

OPTIONS = TextOptions(stops=(), keeps_stop=False, skips_special_tokens=True, hides_output=False)
SAMPLING = SamplingParams(max_tokens=64, seed=0, stop_token_ids=(EOS_ID, ord("!")))


def said(
    codec: TextCodec, text: str, size: int, options: TextOptions = OPTIONS, sampling: SamplingParams = SAMPLING
) -> TextPiece:
    """All pieces of `text`, its bytes being the tokens, which come `size` at a time."""
    sample, tokens, pieces = SampleText(0, sampling, options, codec), tuple(text.encode()), []
    for at in range(0, len(tokens), size):
        is_last = at + size >= len(tokens)
        finish = FinishReason.LENGTH if is_last else None
        pieces.append(sample.take(OutputDelta(tokens=tokens[at : at + size], finish=finish)))
        assert b"\xef\xbf\xbd" not in pieces[-1].text.encode() or is_last, "a part of a character is never shown"
    return join(pieces)


SIZES = pytest.mark.parametrize("size", [1, 2, 3, 64])


@SIZES
def test_text_does_not_depend_on_how_tokens_come(codec: TextCodec, size: int) -> None:
    piece = said(codec, "naïve 日本", size)
    assert (piece.text, piece.finish) == ("naïve 日本", FinishReason.LENGTH)
    assert bytes(piece.tokens) == "naïve 日本".encode()
    assert len(piece.offsets) == len(piece.tokens)


@SIZES
def test_a_stop_string_ends_the_text_and_drops_what_follows(codec: TextCodec, size: int) -> None:
    piece = said(codec, "one END two", size, replace(OPTIONS, stops=("END",)))
    assert (piece.text, piece.finish, piece.stop_reason) == ("one ", FinishReason.STOP, "END")
    assert bytes(piece.tokens) == b"one END"
    kept = said(codec, "one END two", size, replace(OPTIONS, stops=("END",), keeps_stop=True))
    assert kept.text == "one END"


@SIZES
def test_a_stop_string_before_min_tokens_is_text(codec: TextCodec, size: int) -> None:
    sampling = SamplingParams(max_tokens=64, seed=0, min_tokens=5)
    piece = said(codec, "END two END three", size, replace(OPTIONS, stops=("END",)), sampling)
    assert (piece.text, piece.stop_reason) == ("END two ", "END")


def test_what_could_have_become_a_stop_string_is_shown_at_the_end(codec: TextCodec) -> None:
    assert said(codec, "the EN", 1, replace(OPTIONS, stops=("END",))).text == "the EN"


@pytest.mark.parametrize(("token", "reason"), [(ord("!"), ord("!")), (EOS_ID, None)])
def test_a_stop_id_is_no_text_and_is_named_unless_it_is_the_models_own(
    codec: TextCodec, token: int, reason: int | None
) -> None:
    piece = SampleText(0, SAMPLING, OPTIONS, codec).take(OutputDelta(tokens=(97, token), finish=FinishReason.STOP))
    assert (piece.text, piece.tokens, piece.stop_reason) == ("a", (97, token), reason)


def test_hidden_output_has_neither_text_nor_tokens(codec: TextCodec) -> None:
    piece = said(codec, "a", 1, replace(OPTIONS, hides_output=True))
    assert (piece.text, piece.tokens, piece.finish) == ("", (), FinishReason.LENGTH)
