"""Grammars of calls, by the matcher that draws tokens: what a format writes is allowed, and nothing else."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from deltaserve.model.answer_grammars import AnswerGrammars, AnswerVocabulary
from deltaserve.server.structured_output import json_grammar, lark_grammar
from deltaserve.server.text.answers.answer_choice import FORMATS
from deltaserve.server.text.answers.answer_grammar import AnswerShape, Calls, answer_grammar
from deltaserve.server.text.answers.answer_reader import PromptEnd
from deltaserve.server.text.answers.call_grammar import GrammarTooLarge, MarkerTokens, loosened
from tests.fixtures.harmony import MARKERS
from tests.fixtures.tiny_tokenizer import byte_level
from tests.server.text.answers.written import WRITERS, Call, Turn

TOOLS: Mapping[str, Mapping[str, Any]] = {
    "look": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"$ref": "#/$defs/Unit"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"Unit": {"enum": ["C", "F"]}},
    },
    "ping-2": {"type": "object", "properties": {}, "additionalProperties": False},
}
GOOD: Sequence[Sequence[Call]] = (
    [Call("look", {"city": "Rome \u4f60 < 5", "days": 3, "unit": "C"})],
    [Call("look", {"city": "two\nlines"})],
    [Call("ping-2", {})],
)
BAD: Sequence[Call] = (
    Call("pong", {}),
    Call("look", {"days": 3}),
    Call("look", {"city": "Rome", "days": "three"}),
    Call("look", {"city": "Rome", "unit": "K"}),
    Call("ping-2", {"x": 1}),
)
NAMES = [name for name, (branch, _) in WRITERS.items() if (calls := FORMATS[branch].calls) and calls.write]
_READ_ONLY = ("hermes, arguments first", "llama3_json, tagged", "pythonic, tagged", "phi4, older")
NAMES = [name for name in NAMES if name not in _READ_ONLY]
"""Forms that a model may be made to write."""
BOTH = [(name, control) for name in NAMES for control in (True, False) if control or name != "functiongemma"]
"""With markers that are control tokens, and as text: there a vocabulary does not tell the older form of Gemma's."""


def answer_of(name: str, turn: Turn) -> str:
    """As a model must write it: a text as JSON has it."""
    if name != "pythonic":
        return WRITERS[name][1].answer(turn)
    written = []
    for call in turn.calls:
        arguments = (f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in call.arguments.items())
        written.append(f"{call.name}({', '.join(arguments)})")
    return f"[{', '.join(written)}]"


EOS = "<|eos|>"


class Answers:
    """Answers of one grammar, a byte a token."""

    def __init__(self, name: str, shape: AnswerShape, *, control: bool = True) -> None:
        branch, writer = WRITERS[name]
        self._tokenizer = byte_level((EOS, *(writer.markers if control else ())))
        ids = {text: token for text in writer.markers if (token := self._tokenizer.token_to_id(text)) is not None}
        reasoning = FORMATS[branch] if writer.think else None
        found = answer_grammar(shape, FORMATS[branch], reasoning, MarkerTokens(ids, ids, (256,), (9, 10, 13, 32)))
        assert found is not None
        size = self._tokenizer.get_vocab_size()
        self._grammars = AnswerGrammars(lambda: AnswerVocabulary(self._tokenizer.to_str(), size, (256,)))
        self._grammar = found

    def allows(self, text: str) -> bool:
        """As a whole answer."""
        matcher = self._grammars.matcher(self._grammar)
        tokens = [*self._tokenizer.encode(text, add_special_tokens=False).ids, 256]
        return bool(matcher.validate_tokens(tokens) == len(tokens))


def shape(calls: Calls, **fields: Any) -> AnswerShape:
    given: dict[str, Any] = {"tools": TOOLS, "several": True, "content": None, "prompt_end": PromptEnd.BEFORE}
    return AnswerShape(calls=calls, **(given | fields))


@pytest.mark.parametrize(("name", "control"), BOTH)
def test_a_call_that_must_be_is_one_of_the_tools_and_keeps_to_its_schema(name: str, control: bool) -> None:
    answers, writer = Answers(name, shape(Calls.MUST), control=control), WRITERS[name][1]
    for calls in GOOD:
        assert answers.allows(answer_of(name, Turn(calls))), calls
    assert answers.allows(answer_of(name, Turn([*GOOD[0], *GOOD[2]])))
    for call in BAD:
        assert not answers.allows(answer_of(name, Turn([call]))), call
    assert not answers.allows("Hello")
    assert not answers.allows("")
    if writer.think:
        assert answers.allows(answer_of(name, Turn(GOOD[0], reasoning="I < think\nso")))


@pytest.mark.parametrize("name", NAMES)
def test_many_arguments_are_written_once_each(name: str) -> None:
    """With what they refer to, and no other definition: those of one function once came to fifty megabytes."""
    defined = {"Unit": {"enum": ["C", "F"]}, "Other": {"type": "string", "description": "x" * 1000}}
    names = [f"a{number}" for number in range(100)]
    properties = {each: {"$ref": "#/$defs/Unit"} for each in names}
    tools = {"f": {"type": "object", "properties": properties, "additionalProperties": False, "$defs": defined}}
    answers = Answers(name, shape(Calls.MUST, tools=tools))
    for good in ({}, {"a3": "C"}, {"a98": "F", "a99": "C"}, dict.fromkeys(names, "F")):
        assert answers.allows(answer_of(name, Turn([Call("f", good)]))), good
    for bad in ({"a3": "K"}, {"b": "C"}):
        assert not answers.allows(answer_of(name, Turn([Call("f", bad)]))), bad


@pytest.mark.parametrize("name", [each for each in NAMES if WRITERS[each][0] != "gemma"])
def test_schemas_that_come_to_too_much_are_refused_before_all_is_written(name: str) -> None:
    """Those of `gemma` are of types alone."""
    whole = {f"a{number}": {"type": "array", "items": {"$ref": "#"}} for number in range(50)}
    tools = {f"f{number}": {"type": "object", "properties": whole} for number in range(1000)}
    branch = FORMATS[WRITERS[name][0]]
    with pytest.raises(GrammarTooLarge):
        answer_grammar(shape(Calls.MUST, tools=tools), branch, None, MarkerTokens({}, {}))


@pytest.mark.parametrize("name", NAMES)
def test_one_call_where_one_is_allowed(name: str) -> None:
    answers = Answers(name, shape(Calls.MUST, several=False))
    assert answers.allows(answer_of(name, Turn(GOOD[0])))
    assert not answers.allows(answer_of(name, Turn([*GOOD[0], *GOOD[0]])))


@pytest.mark.parametrize(("name", "control"), [case for case in BOTH if not WRITERS[case[0]][1].alone])
def test_a_call_that_may_be_is_right_from_its_marker_on(name: str, control: bool) -> None:
    answers = Answers(name, shape(Calls.MAY), control=control)
    for calls in GOOD:
        assert answers.allows(answer_of(name, Turn(calls, "Let me look.", reasoning="hm")))
    assert answers.allows("Hello < world")
    for call in BAD:
        assert not answers.allows(answer_of(name, Turn([call], "Let me look."))), call


FREE: Mapping[str, Sequence[str]] = {
    "llama3_json": ('{"city": "Rome"}', '{"name": "Bob", "age": 3}', '{"name": "lookup"}', " {", "{}", '{"type": "x"}'),
    "pythonic": ("[1, 2]", "[lookup(1)]", "[look]", "[", "[look, 1]", " [ x("),
}
"""Texts that begin nearly as a call does."""
ALMOST: Mapping[str, Sequence[str]] = {
    "llama3_json": (
        '{"name": "look", "x": 1}',
        ' { "name":"look", "parameters": {}}',
        '{"type": "function", "name": "look", "parameters": {}}',
        '{"name": "l\\u006fok", "parameters": {}}',
        '{"name": "ping-2", "arguments": {"x": 1}}',
    ),
    "pythonic": ("[look()]", " [look(days=1)]", "[ping-2(x=1)]"),
}
"""Calls that are not as a model must write them, or not as their schemas say."""


@pytest.mark.parametrize("control", [True, False])
@pytest.mark.parametrize("name", FREE)
def test_an_answer_without_a_marker_is_a_call_that_is_right_or_does_not_begin_as_one(name: str, control: bool) -> None:
    answers = Answers(name, shape(Calls.MAY), control=control)
    for calls in GOOD:
        assert answers.allows(answer_of(name, Turn(calls)))
        if control:
            begin = WRITERS[f"{name}, tagged"][1].markers[0]
            assert answers.allows(begin + answer_of(name, Turn(calls)))
            assert answers.allows("Let me look." + begin + answer_of(name, Turn(calls)))
    for text in ("", "Hello < world", *FREE[name]):
        assert answers.allows(text), text
    for call in BAD[1:]:
        assert not answers.allows(answer_of(name, Turn([call]))), call
    for text in ALMOST[name]:
        assert not answers.allows(text), text


THINKERS = [name for name in NAMES if WRITERS[name][1].think]


def limited(name: str, limit: int, calls: Calls, **fields: Any) -> Answers:
    return Answers(name, shape(calls, most_reasoning=limit, **fields))


@pytest.mark.parametrize("name", THINKERS)
def test_reasoning_is_no_longer_than_it_may_be(name: str) -> None:
    """Counted in tokens, of which each is a byte here, a line break behind the marker among them."""
    writer = WRITERS[name][1]
    assert writer.think
    begin, end = (text.strip() for text in writer.think)
    if begin not in writer.markers and not any(begin.startswith(text) for text in writer.markers):
        return  # its markers are no tokens here
    call = answer_of(name, Turn(GOOD[0]))
    content = lark_grammar('start: "yes" | "no"')
    for limit in (0, 1, 5):
        fits, over = "x" * limit, "x" * (limit + 1)
        for calls, given, rest in (
            (Calls.NONE, None, "yes or\nno"),
            (Calls.NONE, content, "no"),
            (Calls.MUST, None, call),
            (Calls.MAY, content, call),
            (Calls.MAY, content, "yes"),
        ):
            before = limited(name, limit, calls, content=given)
            assert before.allows(f"{begin}{fits}{end}{rest}"), (limit, calls, rest)
            assert not before.allows(f"{begin}{over}{end}{rest}")
            assert before.allows(rest)
            inside = limited(name, limit, calls, content=given, prompt_end=PromptEnd.INSIDE)
            assert inside.allows(f"{fits}{end}{rest}")
            assert not inside.allows(f"{over}{end}{rest}")
            assert not inside.allows(rest if len(rest) > limit else over)
        free = limited(name, limit, Calls.NONE)
        assert free.allows(f"\n {begin}{fits}{end}{rest}")
        assert not free.allows(f"\n {begin}{over}{end}{rest}")
        assert free.allows("\n")
        assert free.allows("")
        assert free.allows(f"{begin}{fits}{end}{call}")


@pytest.mark.parametrize("name", NAMES)
def test_calls_or_content_of_a_grammar(name: str) -> None:
    content = lark_grammar('start: "yes" | "no"')
    answers, writer = Answers(name, shape(Calls.MAY, content=content)), WRITERS[name][1]
    assert answers.allows("yes")
    assert answers.allows(answer_of(name, Turn(GOOD[0])))
    assert not answers.allows("Hello")
    if writer.think:
        begin, end = writer.think
        inside = Answers(name, shape(Calls.NONE, content=content, prompt_end=PromptEnd.INSIDE))
        assert inside.allows(f"hm{end}yes")
        assert not inside.allows("yes")
        behind = Answers(name, shape(Calls.NONE, content=content, prompt_end=PromptEnd.BEHIND))
        assert behind.allows("no")
        assert not behind.allows(f"{begin}hm{end}no")


@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
def test_content_may_look_like_a_call_for_long(name: str) -> None:
    named = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    content = json_grammar({**named, "required": ["name"], "additionalProperties": False}, "schema")
    answers = Answers(name, shape(Calls.MAY, content=content))
    for text in ('{"name": "Bob", "age": 3}', '{"name": "look", "age": 3}', '{"name": "lo"}'):
        assert answers.allows(text), text
    for calls in GOOD:
        assert answers.allows(answer_of(name, Turn(calls)))
    for call in BAD:
        assert not answers.allows(answer_of(name, Turn([call]))), call


TREE: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "leaf": {"$ref": "#/$defs/Leaf"},
        "twin": {"type": "object", "properties": {"in": {"$ref": "#/properties/leaf"}}, "additionalProperties": False},
        "kids": {"type": "array", "items": {"$ref": "#"}},
    },
    "required": ["leaf"],
    "additionalProperties": False,
    "$defs": {"Leaf": {"enum": [1, 2]}},
}


@pytest.mark.parametrize("name", ["hermes", "qwen3_xml", "glm45", "pythonic", "llama3_json"])
@pytest.mark.parametrize("beside", [True, False])
def test_references_of_a_schema_are_to_the_whole_of_it(name: str, beside: bool) -> None:
    """Also where a format writes its parts one by one."""
    content = lark_grammar('start: "yes"') if beside else None
    answers = Answers(name, shape(Calls.MAY if beside else Calls.MUST, content=content, tools={"f": TREE}))
    for good in ({"leaf": 1}, {"leaf": 2, "twin": {"in": 1}, "kids": [{"leaf": 1, "kids": []}]}):
        assert answers.allows(answer_of(name, Turn([Call("f", good)]))), good
    for bad in ({"leaf": 3}, {"leaf": 1, "twin": {"in": 3}}, {"leaf": 1, "kids": [{}]}, {"leaf": 1, "kids": [1]}):
        assert not answers.allows(answer_of(name, Turn([Call("f", bad)]))), bad


def test_messages_with_channels() -> None:
    tokenizer = byte_level((EOS, *MARKERS))
    ids = {text: token for text in MARKERS if (token := tokenizer.token_to_id(text)) is not None}
    format_ = FORMATS["harmony"]
    size = tokenizer.get_vocab_size()
    vocabulary = AnswerVocabulary(tokenizer.to_str(), size, (256,))

    def allows(answer_shape: AnswerShape, text: str) -> bool:
        grammar = answer_grammar(answer_shape, format_, format_, MarkerTokens(ids, ids, (256,)))
        assert grammar is not None
        tokens = [*tokenizer.encode(text, add_special_tokens=False).ids, 256]
        return bool(AnswerGrammars(lambda: vocabulary).matcher(grammar).validate_tokens(tokens) == len(tokens))

    analysis = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"city": "Rome"}'
    final = "<|channel|>final<|message|>"
    content = lark_grammar('start: "yes" | "no"')
    assert allows(shape(Calls.MUST), analysis + call)
    assert allows(shape(Calls.MUST), call)
    assert not allows(shape(Calls.MUST), f"{final}no")
    assert not allows(shape(Calls.MUST), call.replace("look", "pong"))
    assert allows(shape(Calls.MAY, content=content), analysis + call)
    assert allows(shape(Calls.NONE, tools={}, content=content), f"{analysis}{final}yes")
    assert not allows(shape(Calls.NONE, tools={}, content=content), f"{final}maybe")

    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    may = shape(Calls.MAY)
    heads = (
        "<|channel|>commentary to=functions.look <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.look json<|message|>",
        "<|channel|>commentary to=functions.look<|message|>",
        " to=functions.look<|channel|>commentary <|constrain|>json<|message|>",
        " to=functions.look<|channel|>commentary json<|message|>",
    )
    for before in ("", analysis, analysis + preamble, preamble + analysis):
        assert allows(may, f"{before}{final}Hello {{")
        for head in heads:
            assert allows(may, before + head + '{"city": "Rome"}')
            assert not allows(may, before + head + '{"days": 3}')
            assert not allows(may, before + head.replace("look", "pong") + "{}")
    assert allows(may, "Hello"), "no header"

    for limit in (0, 2):
        thought = analysis.replace("hm", "x" * limit)
        for bound, rest in (
            (shape(Calls.NONE, tools={}, most_reasoning=limit), f"{final}Hello"),
            (shape(Calls.NONE, tools={}, most_reasoning=limit, content=content), f"{final}yes"),
            (shape(Calls.MAY, most_reasoning=limit), call),
            (shape(Calls.MUST, most_reasoning=limit), call),
        ):
            assert allows(bound, thought + rest)
            assert allows(bound, rest)
            assert not allows(bound, thought.replace("<|message|>", "<|message|>x") + rest)
            assert not allows(bound, thought + thought + rest), "its messages count together"


def test_a_schema_that_nobody_relies_on_keeps_its_shape() -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"not": {"type": "string", "pattern": "(?=x)", "not": {}}, "b": {"oneOf": [{"type": "null"}]}},
        "required": ["b"],
        "if": {},
        "$ref": "http://example.invalid/",
        "x-guidance": {"lenient": True},
    }
    assert loosened(schema) == {
        "type": "object",
        "properties": {"not": {"type": "string"}, "b": {"anyOf": [{"type": "null"}]}},
        "required": ["b"],
    }
    assert json.dumps(schema)


ODD: Mapping[str, object] = {
    "an unknown format": {"type": "string", "format": "xyz"},
    "a pattern that looks ahead": {"type": "string", "pattern": "(?=a)b"},
    "a path": {"$ref": "#/properties/x/items"},
    "another document": {"$ref": "http://example.invalid/y"},
    "nothing there": {"$ref": "#/$defs/Nope"},
    "a circle": {"$ref": "#/$defs/R"},
    "an old bound": {"type": "integer", "exclusiveMinimum": True},
    "any": {"type": "any"},
    "in capitals": {"type": "STRING"},
    "types among others": {"type": ["string", "file"]},
    "no values": {"enum": []},
    "values of several types": {"enum": ["a", 1, None]},
    "an old tuple": {"type": "array", "items": [{"type": "string"}]},
    "true": True,
    "false": False,
    "a text": "string",
    "null": None,
    "required by itself": {"type": "object", "required": True},
    "bounds that exclude each other": {"type": "array", "minItems": 3, "maxItems": 1},
    "alternatives": {"anyOf": [{"type": "object", "properties": {"a": {"oneOf": [{"type": "string"}]}}}, 7]},
}


@pytest.mark.parametrize("branch", ["hermes", "qwen3_xml", "gemma", "pythonic", "llama3_json"])
def test_odd_schemas_do_not_stand_in_the_way_of_a_call(branch: str) -> None:
    tokenizer = byte_level((EOS,))
    grammars = AnswerGrammars(lambda: AnswerVocabulary(tokenizer.to_str(), 257, (256,)))
    recursive = {"R": {"type": "object", "properties": {"r": {"$ref": "#/$defs/R"}}}}
    for name, odd in ODD.items():
        tools = {"f": loosened({"type": "object", "properties": {"x": odd}, "$defs": recursive})}
        grammar = answer_grammar(shape(Calls.MUST, tools=tools), FORMATS[branch], None, MarkerTokens({}, {}))
        assert grammar is not None
        assert not grammars.matcher(grammar).is_error(), name
