"""Each format reads back what is written in it, however it is cut, and loses nothing of what is malformed."""

import json
import random
from collections.abc import Mapping, Sequence

import pytest

from deltaserve.control.front.client import OutputDelta
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.wire.messages import FinishReason
from deltaserve.server.text.answer_pieces import AnswerPiece, Arguments, CallBegins, Content, Reasoning, merged
from deltaserve.server.text.answers.answer_choice import FORMATS, marked
from deltaserve.server.text.answers.answer_reader import AnswerReader, AnswerReading, PromptEnd, ShowReasoning
from deltaserve.server.text.answers.answer_stream import spelling_of
from deltaserve.server.text.sample_text import SampleText, TextOptions, join
from deltaserve.server.text.text_codec import TextCodec
from tests.fixtures.tiny_tokenizer import byte_level
from tests.server.text.answers.written import JSON_BYTES, TOOLS, WRITERS, drawn

NUM_DRAWN = 100
CONTROL = {"control tokens": True, "text": False}


def reading(name: str, *, control: bool, prompt_end: PromptEnd = PromptEnd.BEFORE) -> AnswerReading:
    """How answers that `WRITERS[name]` writes are read, where its markers are control tokens or ordinary text."""
    branch, writer = WRITERS[name]
    ids = {marker: number for number, marker in enumerate(writer.markers)} if control else {}
    spelling = spelling_of(FORMATS[branch].markers, ids)
    each = FORMATS[branch]
    reasoning = each if each.thinking else None
    return AnswerReading(spelling, iter("abcdefgh").__next__, each, TOOLS, reasoning, prompt_end=prompt_end)


def read(how: AnswerReading, parts: Sequence[str], *, is_cut: bool = False) -> tuple[AnswerPiece, ...]:
    """All pieces of an answer that comes in these parts, and ends behind them or is cut there."""
    how = AnswerReading(
        how.spelling, iter("abcdefgh").__next__, how.calls, how.tools, how.reasoning, how.shown, how.prompt_end
    )
    reader = AnswerReader(how)
    return merged([piece for part in parts for piece in reader.push(part)] + (reader.cut if is_cut else reader.flush)())


def said(pieces: Sequence[AnswerPiece]) -> tuple[str, str, list[tuple[str, str]]]:
    """(content, reasoning, calls with the text of their arguments)."""
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    begun = [piece for piece in pieces if isinstance(piece, CallBegins)]
    assert [piece.index for piece in begun] == list(range(len(begun)))
    arguments = [
        "".join(piece.text for piece in pieces if isinstance(piece, Arguments) and piece.index == index)
        for index in range(len(begun))
    ]
    return content, reasoning, [(call.name, text) for call, text in zip(begun, arguments, strict=True)]


@pytest.mark.parametrize("control", CONTROL)
@pytest.mark.parametrize("name", WRITERS)
def test_drawn_answers_are_read_back_however_they_are_cut(name: str, control: str) -> None:
    how, (_, writer) = reading(name, control=CONTROL[control]), WRITERS[name]
    for seed in range(NUM_DRAWN):
        turn = drawn(seed, alone=writer.alone)
        text = marked(writer.answer(turn), how.spelling)
        whole = read(how, [text])
        content, reasoning, calls = said(whole)
        assert [(call, json.loads(arguments)) for call, arguments in calls] == [
            (c.name, c.arguments) for c in turn.calls
        ]
        if name in JSON_BYTES:
            assert [arguments for _, arguments in calls] == [
                json.dumps(call.arguments, ensure_ascii=False) for call in turn.calls
            ]
        assert content == turn.content + turn.after
        assert reasoning == (turn.reasoning if writer.think else "")
        assert read(how, list(text)) == whole, "a character at a time"
        rng = random.Random(seed)
        places = range(len(text)) if seed < 3 else [rng.randrange(len(text)) for _ in range(5)]
        for place in places:
            assert read(how, [text[:place], text[place:]]) == whole, place


@pytest.mark.parametrize("name", WRITERS)
def test_a_cut_answer_loses_nothing_and_is_the_same_however_it_comes(name: str) -> None:
    """Cut anywhere, as by max_tokens: the calls that were complete are whole, and a stream says what the whole does."""
    how, (_, writer) = reading(name, control=False), WRITERS[name]
    for seed in range(4):
        turn = drawn(seed + 1000, alone=writer.alone)
        text = writer.answer(turn)
        for end in range(0, len(text), 3):
            whole = read(how, [text[:end]])
            assert read(how, list(text[:end])) == whole, text[:end]
            calls = said(whole)[2]
            assert len(calls) <= len(turn.calls)
            for number, (call, (called, arguments)) in enumerate(zip(turn.calls, calls, strict=False)):
                assert called == call.name
                if number + 1 < len(calls):
                    assert json.loads(arguments) == call.arguments
                elif name in JSON_BYTES:
                    assert json.dumps(call.arguments, ensure_ascii=False).startswith(arguments)


@pytest.mark.parametrize("control", CONTROL)
@pytest.mark.parametrize("name", WRITERS)
def test_max_tokens_makes_no_content_of_a_call(name: str, control: str) -> None:
    """Cut anywhere: nothing of a call or a marker is content, but for the first character, which may be text."""
    how, (branch, writer) = reading(name, control=CONTROL[control]), WRITERS[name]
    firsts = {marker[0] for marker in FORMATS[branch].markers} | {*"{["}
    for seed in range(4):
        turn = drawn(seed + 2000, alone=writer.alone)
        text = marked(writer.answer(turn), how.spelling)
        for end in range(seed % 2, len(text), 2):
            whole = read(how, [text[:end]], is_cut=True)
            assert read(how, list(text[:end]), is_cut=True) == whole, text[:end]
            content, reasoning, calls = said(whole)
            wanted = turn.content + turn.after
            head = each.head if (each := FORMATS[branch].calls) else None
            if head is not None and text[:end].startswith(content) and not head.match(text[:end]):
                continue  # JSON or a list so far
            is_text = wanted.startswith(content.rstrip("\n"))
            assert is_text or (content[-1] in firsts and wanted.startswith(content[:-1].rstrip("\n"))), text[:end]
            assert turn.reasoning.startswith(reasoning.rstrip("\n<[")), text[:end]
            assert [called for called, _ in calls] == [call.name for call in turn.calls[: len(calls)]]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_json", '{"city": "Rome", "da'),
        ("llama3_json", '{"name": "Ada", "born'),
        ("llama3_json", '{"na'),
        ("pythonic", "[1, 2"),
        ("pythonic", "[a(1"),
        ("hermes", "a <"),
        ("hermes", "a <b"),
        ("hermes", "a\n"),
        ("hermes", "<tool_call> is a tag"),
    ],
)
def test_max_tokens_leaves_what_is_no_call(name: str, text: str) -> None:
    how = reading(name, control=False)
    for parts in ([text], list(text)):
        assert read(how, parts, is_cut=True) == (Content(text),)


@pytest.mark.parametrize("name", WRITERS)
def test_bytes_of_a_sample_say_what_the_whole_text_says(name: str) -> None:
    """Through the decoder, a byte a token: cut inside characters, markers as control tokens."""
    branch, writer = WRITERS[name]
    tokenizer = byte_level(tuple(writer.markers))
    codec = TextCodec(tokenizer, 320, [])
    spelling = spelling_of(FORMATS[branch].markers, codec.control_ids)
    for seed in range(5):
        text = writer.answer(drawn(seed, alone=writer.alone))
        how = AnswerReading(
            spelling, iter("abcdefgh").__next__, FORMATS[branch], TOOLS, FORMATS[branch] if writer.think else None
        )
        options = TextOptions((), keeps_stop=False, skips_special_tokens=True, hides_output=False, reading=how)
        sample = SampleText(0, SamplingParams(max_tokens=9999, seed=0), options, codec)
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        pieces = [sample.take(OutputDelta(tokens=(token,))) for token in tokens]
        pieces.append(sample.take(OutputDelta(finish=FinishReason.STOP)))
        piece = join(pieces)
        assert piece.parts == read(how, [marked(text, spelling)])
        assert piece.num_calls == sum(isinstance(part, CallBegins) for part in piece.parts) > 0
        assert (piece.num_reasoning > 0) == bool(piece.reasoning)


MALFORMED: Mapping[str, tuple[str, ...]] = {
    "hermes": (
        "<tool_call> is a tag",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "ping-2", "arguments": [1]}</tool_call>',
        '<tool_call>{"nam',
        "<tool_call>{'name': 'ping-2'}</tool_call>",
        "a <tool_",
        "<tool_call><tool_call><tool_call>",
        '<tool_call>{"arguments": {"a": ' + "[" * 2000 + "]" * 2000 + '}, "name": "ping-2"}</tool_call>',
    ),
    "qwen3_xml": ("<tool_call>\n<function=unknown>\n</function>\n</tool_call>", "<tool_call>\n<func", "<tool_call>no"),
    "minimax_m2": ('<minimax:tool_call>\n<invoke name="unknown">\n</invoke>', "<minimax:tool_call>", "<minimax:"),
    "deepseek_v3": ("<\uff5ctool\u2581calls\u2581begin\uff5c>no", "<\uff5ctool\u2581ca"),
    "llama3_json": (
        '{"name": "unknown", "parameters": {}}',
        '{"city": "Rome"}',
        "{",
        "<|python_tag|>print(1)",
        '  {"name": 1}',
        '{"name": "ping-2", "x": 1}',
    ),
    "pythonic": (
        "[1, 2]",
        "[unknown(a=1)]",
        "[get_weather(1)]",
        '[get_weather("Rome"), get_weather("Oslo")]',
        "[get_weather(1) + get_weather(2)]",
        "[ping-2(",
        "[get_weather(city=open('x'))]",
        '[get_weather(city="\\ud800")]',
        "[",
        "[x",
    ),
    "mistral": (
        "[TOOL_CALLS]unknown[ARGS]{}",
        "[TOOL_CALLS]no",
        "[TOOL_CALLS]ping-2[ARGS]no",
        "[TOOL_C",
        "[TOOL_CALLS][1]",
    ),
    "glm45": ("<tool_call>unknown\n</tool_call>", "<tool_call>ping-2", "<tool_call>no text", "<tool_"),
    "kimi_k2": (
        "<|tool_calls_section_begin|>no",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.unknown:0<|tool_call_argument_begin|>{}",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.ping-2:0<|tool_call_argument_begin|>no",
        "<|tool_calls",
    ),
    "deepseek_v32": (
        "<\uff5cDSML\uff5cfunction_calls>no",
        '<\uff5cDSML\uff5cfunction_calls>\n<\uff5cDSML\uff5cinvoke name="unknown">\n',
        "<\uff5cDSML\uff5cfunc",
    ),
    "granite": (
        "<|tool_call|>no",
        '<|tool_call|>[{"name": "unknown", "arguments": {}}]',
        "<|tool_call|>[",
        "functools",
    ),
    "cohere": ("<|START_ACTION|>no", '<|START_ACTION|>[{"tool_name": "unknown", "parameters": {}}]', "<|START_"),
    "gemma": ("<|tool_call>no", "<|tool_call>call:unknown{}<tool_call|>", "<|tool_call>call:pi", "<|too"),
}


@pytest.mark.parametrize("control", CONTROL)
@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_call_is_content(name: str, control: str) -> None:
    how = reading(name, control=CONTROL[control])
    for text in MALFORMED[name]:
        for around in ("", "\u4f60 "):
            sent = text if name in ("llama3_json", "pythonic") else f"{around}{text}{around}"
            for parts in ([marked(sent, how.spelling)], list(marked(sent, how.spelling))):
                assert read(how, parts) == (Content(sent),), sent


_SCRAPS = (
    *(
        '"name": "ping-2"',
        '{"name": "ping-2", "arguments": {',
        "ping-2",
        "get_weather(city=",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
    ),
    *(
        '"',
        "'",
        "\\",
        ":",
        ",",
        "=",
        ">",
        "<",
        "\n",
        "\n\n\n",
        " ",
        "city",
        "a\u4f60",
        "call:ping-2{",
        "function",
        "```json\n",
    ),
    *("<function=ping-2>", "</function>", "<parameter=city>", "</parameter>", '<invoke name="ping-2">', "</invoke>"),
    *('<parameter name="city">', "<think>", "</think>", "; ", "null", "1", "<|channel>thought"),
)


@pytest.mark.parametrize("control", CONTROL)
@pytest.mark.parametrize("name", WRITERS)
def test_scraps_in_any_order_are_read_without_a_failure(name: str, control: str) -> None:
    """However they are cut they say the same; where no call is read, all of them is content or reasoning."""
    how, (branch, _) = reading(name, control=CONTROL[control]), WRITERS[name]
    markers = sorted(FORMATS[branch].markers)
    rng = random.Random(7)
    for _ in range(200):
        text = "".join(rng.choice((*_SCRAPS, *markers, *markers, *markers)) for _ in range(rng.randrange(1, 12)))
        sent = marked(text, how.spelling)
        whole = read(how, [sent])
        assert read(how, list(sent)) == whole, text
        content, reasoning, calls = said(whole)
        thinking = FORMATS[branch].thinking
        begins = thinking is not None and thinking.begin in text
        if not calls and not reasoning and not begins:
            assert content == text


def test_a_marker_spelled_in_ordinary_tokens_is_text_where_it_is_a_control_token() -> None:
    text = '<tool_call>{"name": "ping-2", "arguments": {}}</tool_call>'
    assert said(read(reading("hermes", control=True), [text]))[0] == text
    assert said(read(reading("hermes", control=False), [text]))[2] == [("ping-2", "{}")]


def test_no_more_is_held_back_than_could_be_a_marker() -> None:
    reader = AnswerReader(reading("hermes", control=False))
    shown = [said(reader.push(text))[0] for text in ("a < b", " <to", "ol", "_", "x", "\n", "y")]
    assert shown == ["a < b", " ", "", "", "<tool_x", "", "\ny"]
    reader = AnswerReader(reading("hermes", control=False))
    begun = [said(reader.push(text))[2] for text in ('<tool_call>{"name": "ping-2", "arguments": ', "{")]
    assert begun == [[], [("ping-2", "{")]]


REASONED: Mapping[str, tuple[PromptEnd, str, str, str]] = {
    "told by the model": (PromptEnd.BEFORE, "<think>\nhm\n</think>\n\nyes", "yes", "hm"),
    "white space first": (PromptEnd.BEFORE, "\n<think>hm</think>yes", "yes", "hm"),
    "empty": (PromptEnd.BEFORE, "<think>\n\n</think>\n\nyes", "yes", ""),
    "begun in the prompt": (PromptEnd.INSIDE, "hm\n</think>\n\nyes", "yes", "hm"),
    "begun twice": (PromptEnd.INSIDE, "<think>\nhm</think>yes", "yes", "hm"),
    "not ended": (PromptEnd.INSIDE, "hm <", "", "hm <"),
    "ended in the prompt": (PromptEnd.BEHIND, "<think>hm</think>yes", "<think>hm</think>yes", ""),
    "none": (PromptEnd.BEFORE, "no <think>hm</think>", "no <think>hm</think>", ""),
    "a look-alike": (PromptEnd.BEFORE, "<thinker>", "<thinker>", ""),
}


@pytest.mark.parametrize("name", REASONED)
def test_reasoning(name: str) -> None:
    prompt_end, text, content, reasoning = REASONED[name]
    how = reading("hermes", control=False, prompt_end=prompt_end)
    for parts in ([text], list(text)):
        assert said(read(how, parts)) == (content, reasoning, [])


def test_what_is_shown_of_reasoning() -> None:
    text = "<think>one two</think>yes"
    cases: Sequence[tuple[ShowReasoning, list[AnswerPiece]]] = (
        (ShowReasoning.AS_IT_COMES, [Reasoning("one"), Reasoning(" two"), Content("yes")]),
        (ShowReasoning.AT_ONCE, [Reasoning("one two"), Content("yes")]),
        (ShowReasoning.NOT, [Content("yes")]),
    )
    for shown, wanted in cases:
        how = reading("hermes", control=False)
        reader = AnswerReader(AnswerReading(how.spelling, str, None, {}, how.reasoning, shown))
        found = [piece for part in ("<think>one", " two</think>", "yes") for piece in reader.push(part)]
        assert found + reader.flush() == wanted
        assert read(AnswerReading(how.spelling, str, None, {}, how.reasoning, shown), [text]) == merged(wanted)


LONG: Mapping[str, str] = {
    "hermes": '<tool_call>{"arguments": "' + "x" * 50_000,
    "llama3_json": '{"name": "' + "x" * 50_000,
    "qwen3_xml": "<tool_call>\n<function=get_weather>\n<parameter=city>\n" + "x" * 50_000,
    "pythonic": "[get_weather(city=[" + "1," * 25_000 + ")" * 50,
    "gemma": "<|tool_call>call:get_weather{where:" + "{a:" * 15_000,
    "mistral": "[TOOL_CALLS]" + "x" * 50_000,
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>" + "x" * 50_000,
    "kimi_k2": "<|tool_calls_section_begin|>" + "<|tool_call_begin|>" * 2_500,
    "deepseek_v32": "<\uff5cDSML\uff5cfunction_calls>" + "\n" * 50_000,
    "granite": "<|tool_call|>[" + " " * 50_000,
}


@pytest.mark.parametrize("name", LONG)
def test_long_answers_say_the_same_a_character_at_a_time(name: str) -> None:
    """What is held back for long is not looked through from its beginning with each character: that took minutes."""
    how = reading(name, control=False)
    reader = AnswerReader(how)
    pieces = [piece for char in LONG[name] for piece in reader.push(char)] + reader.flush()
    assert merged(pieces) == read(how, [LONG[name]])
