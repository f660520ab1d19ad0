"""Answers in channels: what is shown where, whole and however the tokens come."""

from collections.abc import Mapping

import pytest

from deltaserve.control.front.client import OutputDelta
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.wire.messages import FinishReason
from deltaserve.server.text.answers.answer_choice import FORMATS, answer_ends
from deltaserve.server.text.answers.answer_reader import AnswerReading
from deltaserve.server.text.sample_text import SampleText, TextOptions, TextPiece, join
from deltaserve.server.text.template import ChatTemplate
from deltaserve.server.text.text_codec import TextCodec
from tests.fixtures.harmony import BOS, MARKERS, TEMPLATE, VOCAB, harmony_tokenizer, ids_of
from tests.fixtures.tiny_tokenizer import CHAT_TEMPLATE, SPECIALS, byte_level

CODEC = TextCodec(harmony_tokenizer(), VOCAB, [], ChatTemplate(TEMPLATE, (BOS, *MARKERS), {"bos_token": BOS}))
READING = AnswerReading(CODEC.answers.spelling, str, reasoning=CODEC.answers.reasoning)
ANALYSIS, COMMENTARY, FINAL = (f"<|channel|>{name}<|message|>" for name in ("analysis", "commentary", "final"))
NEXT = "<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"

ANSWERS: Mapping[str, tuple[str, str, str]] = {
    "reasoning, then the answer": (f"{ANALYSIS}User greets.{NEXT}{FINAL}Hello!", "Hello!", "User greets."),
    "the answer alone": (f"{FINAL}Hello!", "Hello!", ""),
    "cut in its reasoning": (f"{ANALYSIS}User gr", "", "User gr"),
    "cut in a header": (f"{ANALYSIS}hm{NEXT}<|channel|>fin", "", "hm"),
    "cut behind a header": (f"{ANALYSIS}hm{NEXT}{FINAL}", "", "hm"),
    "ended behind its reasoning": (f"{ANALYSIS}hm<|end|>", "", "hm"),
    "reasoning twice": (f"{ANALYSIS}one{NEXT}{ANALYSIS}two{NEXT}{FINAL}yes", "yes", "one\ntwo"),
    "a word to the user before": (f"{COMMENTARY}I will look.{NEXT}{FINAL}Found.", "I will look.\nFound.", ""),
    "no role behind an end": (f"{ANALYSIS}hm<|end|>{FINAL}yes", "yes", "hm"),
    "no channel": ("<|message|>Hello!", "Hello!", ""),
    "no header at all": ("Hello!\nWell", "Hello!\nWell", ""),
    "no header, a word that might begin one": ("to be or not", "to be or not", ""),
    "no header, a blank first": (" Hello", " Hello", ""),
    "text behind an end": (f"{ANALYSIS}hm<|end|>Hello", "Hello", "hm"),
    "a header that ends the text before": (f"{ANALYSIS}hm{FINAL}yes", "yes", "hm"),
    "characters of several bytes": (f"{ANALYSIS}\u4f60{NEXT}{FINAL}\u597d\U0001f600", "\u597d\U0001f600", "\u4f60"),
    "a call": (f"{ANALYSIS}hm{NEXT}{CALL}", f"<|start|>assistant{CALL}", "hm"),
    "a call whose role is told first": (
        f" to=functions.f{COMMENTARY}{{}}<|end|>",
        f" to=functions.f{COMMENTARY}{{}}<|end|>",
        "",
    ),
    "a call that is cut": ("<|channel|>commentary to=func", "", ""),
    "an unknown channel": ("<|channel|>poem<|message|>roses<|end|>", "<|channel|>poem<|message|>roses<|end|>", ""),
    "another speaker": ("<|start|>user<|message|>and?<|end|>", "<|start|>user<|message|>and?<|end|>", ""),
    "a header of several lines": ("<|channel|>anal\nysis<|message|>x", "<|channel|>anal\nysis<|message|>x", ""),
    "an endless header": ("<|channel|>" + "x" * 300, "<|channel|>" + "x" * 300, ""),
    "a header that ends": ("<|channel|>final<|end|>x", "<|channel|>final<|end|>x", ""),
}


def said(text: str, size: int, **options: object) -> tuple[TextPiece, list[TextPiece]]:
    """An answer whose tokens come `size` at a time: joined, and its pieces."""
    wanted = TextOptions((), keeps_stop=False, skips_special_tokens=True, hides_output=False, reading=READING)
    for name, value in options.items():
        wanted = type(wanted)(**{field: getattr(wanted, field) for field in wanted.__slots__} | {name: value})
    sample, tokens, pieces = SampleText(0, SamplingParams(max_tokens=999, seed=0), wanted, CODEC), ids_of(text), []
    for at in range(0, len(tokens), size):
        finish = FinishReason.LENGTH if at + size >= len(tokens) else None
        pieces.append(sample.take(OutputDelta(tokens=tuple(tokens[at : at + size]), finish=finish)))
    return join(pieces), pieces


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("name", ANSWERS)
def test_each_text_is_shown_in_its_place(name: str, size: int) -> None:
    text, content, reasoning = ANSWERS[name]
    piece, _ = said(text, size)
    assert (piece.text, piece.reasoning) == (content, reasoning)


def test_text_comes_as_its_tokens_do() -> None:
    _, pieces = said(f"{ANALYSIS}ab{NEXT}{FINAL}cd", 1)
    assert [(p.reasoning, p.text) for p in pieces if p.reasoning or p.text] == [
        ("a", ""),
        ("b", ""),
        ("", "c"),
        ("", "d"),
    ]
    _, pieces = said("Hello", 1)
    assert [piece.text for piece in pieces] == list("Hello"), "an answer without channels is not held back"


def test_part_of_a_character_stays_in_its_channel_and_a_spelled_marker_is_text() -> None:
    tokens = [*ids_of(ANALYSIS + "a"), 0xE4, 0xBD, *ids_of(NEXT + FINAL), *b"<|end|>"]
    options = TextOptions((), keeps_stop=False, skips_special_tokens=True, hides_output=False, reading=READING)
    sample = SampleText(0, SamplingParams(max_tokens=999, seed=0), options, CODEC)
    piece = sample.take(OutputDelta(tokens=tuple(tokens), finish=FinishReason.LENGTH))
    assert (piece.reasoning, piece.text) == ("a\ufffd", "<|end|>")


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_stop_string_ends_either_channel_and_reaches_over_none(size: int) -> None:
    piece, _ = said(f"{ANALYSIS}one END two", size, stops=("END",))
    assert (piece.reasoning, piece.text, piece.stop_reason) == ("one ", "", "END")
    piece, _ = said(f"{ANALYSIS}one E{NEXT}{FINAL}ND two END", size, stops=("END",))
    assert (piece.reasoning, piece.text, piece.stop_reason) == ("one E", "ND two ", "END")
    piece, _ = said(f"{ANALYSIS}one{NEXT}{FINAL}two", size, stops=("<|end|>",))
    assert (piece.reasoning, piece.text, piece.stop_reason) == ("one", "", "<|end|>")


FOUND = {
    "gpt-oss": ((BOS, *MARKERS), TEMPLATE, True),
    "its vocabulary under another template": ((*MARKERS, *SPECIALS), CHAT_TEMPLATE, False),
    "its template without its control tokens": (SPECIALS, TEMPLATE, False),
    "neither": (SPECIALS, CHAT_TEMPLATE, False),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_format_is_found_by_its_control_tokens_and_the_template(name: str) -> None:
    specials, source, wanted = FOUND[name]
    codec = TextCodec(byte_level(specials), 280, [], ChatTemplate(source, specials, {"bos_token": BOS}))
    found = (codec.answers.reasoning is FORMATS["harmony"], codec.answers.calls is FORMATS["harmony"])
    assert found == (wanted, wanted)


def test_a_vocabulary_alone_tells_what_ends_an_answer() -> None:
    control = {text: token for token, text in enumerate(MARKERS)}
    assert answer_ends(control, None) == frozenset({control["<|return|>"], control["<|call|>"]})
    assert answer_ends({"<|end|>": 1}, None) is None
