"""Bounds of grammars that llguidance does not have."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from random import Random
from traceback import walk_tb

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from deltaserve.core.sampling import MAX_GRAMMAR_BYTES
from deltaserve.model.answer_grammars import (
    MAX_LEXER_STATES,
    AnswerGrammars,
    AnswerVocabulary,
    GrammarError,
    check_multiples,
    without_merges,
)
from deltaserve.model.grammar_schemas import schemas_in
from deltaserve.server.structured_output import (
    MAX_CHOICES,
    any_grammar,
    choice_grammar,
    json_grammar,
    lark_grammar,
    regex_grammar,
)
from tests.fixtures.tiny_tokenizer import byte_level
from tools.drawn_schemas import drawn_schema

FOLLOWED: Sequence[Sequence[float]] = (
    *([], [5], [0.01], [99_991], [0.99991], [1e-7], [1_000_000], [500_000], [0]),
    *([0.01, 3], [0.01, 5000], [0.25, 0.1], [307, 311], [10, 100, 1000], [7] * 50),
)
REFUSED: Sequence[Sequence[float]] = (
    *([100_003], [9_999_991], [2**31 - 1], [0.999911], [1e300], [1e-300], [7_919_000]),
    *([997, 1009], [99_991, 99_991], [0.01, 99_991, 3]),
)


def grammar_of(values: Sequence[float]) -> str:
    schema = {"allOf": [{"type": "number", "multipleOf": value} for value in values]}
    return json.dumps({"grammars": [{"json_schema": schema}]})


@pytest.mark.parametrize("values", FOLLOWED)
def test_remainders_that_are_few_are_followed(values: Sequence[float]) -> None:
    check_multiples(schemas_in(grammar_of(values)))


@pytest.mark.parametrize("values", REFUSED)
def test_remainders_that_are_many_are_refused_before_a_state_is_built(values: Sequence[float]) -> None:
    with pytest.raises(GrammarError, match="multipleOf"):
        check_multiples(schemas_in(grammar_of(values)))


@pytest.mark.parametrize("name", ["multipleOf", "multiple\\u004ff", "\\u006dultipleOf"])
def test_a_schema_inside_a_grammar_is_no_way_round(name: str) -> None:
    lark = f'start: %json {{"type": "integer", "{name}" : 9999991}}'
    with pytest.raises(GrammarError, match="multipleOf"):
        check_multiples(schemas_in(lark_grammar(lark)))


@pytest.mark.parametrize(
    "grammar",
    [
        choice_grammar(['"multipleOf": 1e300', '{"multipleOf": 9999991}', '%json {"multipleOf": 9999991}']),
        *(
            json_grammar({"properties": {"x": schema}, "description": '"multipleOf": 1e300'}, "schema")
            for schema in (
                {"const": {"multipleOf": 1e300}},
                {"enum": ['"multipleOf": 1e300', {"multipleOf": 9_999_991}]},
                {"default": {"multipleOf": 1e300}, "examples": [{"multipleOf": 1e300}]},
                {"type": "object", "properties": {"multipleOf": {"const": 1e300}}},
            )
        ),
    ],
)
def test_what_is_no_schema_may_be_spelled_like_one(grammar: str) -> None:
    tokenizer = byte_level(("<|eos|>",)).to_str()
    assert not AnswerGrammars(lambda: AnswerVocabulary(tokenizer, 257, (256,))).matcher(grammar).is_error()


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/examples/0", "examples": [{"multipleOf": 9_999_991}]},
        {"$ref": "#/x~1y%7Ez", "x/y~z": {"items": {"multipleOf": 9_999_991}}},
        {"$ref": "#/x%2Fy", "x/y": {}, "x": {"y": {"multipleOf": 9_999_991}}},
        {"$ref": "#here", "default": {"$anchor": "here", "multipleOf": 9_999_991}},
        {"properties": {"x": {"$id": "http://a/b", "$ref": "#/default", "default": {"multipleOf": 9_999_991}}}},
        {"anyOf": [{"prefixItems": [{"additionalProperties": {"multipleOf": 9_999_991}}]}]},
        {"patternProperties": {"x": {"allOf": [{"oneOf": [{"items": {"multipleOf": 9_999_991}}]}]}}},
    ],
)
def test_remainders_are_found_wherever_a_schema_may_stand(schema: dict[str, object]) -> None:
    with pytest.raises(GrammarError, match="multipleOf"):
        check_multiples(schemas_in(json_grammar(schema, "schema")))


def test_a_run_of_backslashes_is_read_once() -> None:
    """One that is looked through from each of its characters takes hours, in which the process does nothing else."""
    check_multiples(schemas_in(json.dumps({"grammars": [{"json_schema": {"description": "\\" * (1 << 21)}}]})))


def test_what_is_no_json_is_not_read_again_and_again() -> None:
    """Where an error is, is counted in lines from the beginning."""
    with pytest.raises(ValueError):
        schemas_in(lark_grammar('%json ["' * (1 << 18)))


def test_masks_are_the_same_without_merges() -> None:
    """A byte-pair vocabulary whose tokens are longer than the parts of a schema."""
    texts = ['{"a": "' + "xyz" * number + '"}' for number in range(1, 30)]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    end = trained.add_special_tokens(["<|eos|>"]) and trained.token_to_id("<|eos|>")
    assert end is not None
    size = trained.get_vocab_size()
    assert json.loads(trained.to_str())["model"]["merges"]
    assert not json.loads(without_merges(trained.to_str()))["model"]["merges"]
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    matchers = [
        LLMatcher(LLTokenizer(text, size, [end]), json_grammar(dict(schema), "schema"))
        for text in (trained.to_str(), without_merges(trained.to_str()))
    ]
    for token in [*trained.encode(texts[20]).ids, end]:
        first, second = (matcher.compute_bitmask() for matcher in matchers)
        assert first == second
        assert all(matcher.consume_token(token) for matcher in matchers)


CONTROL = "<|im_end|>"
SPELLED = {
    "a choice": (choice_grammar([CONTROL]), CONTROL),
    "inside a choice": (choice_grammar([f"yes {CONTROL}", "no"]), f"yes {CONTROL}"),
    "a pattern": (regex_grammar(r"a<\|im_end\|>b", "regex"), f"a{CONTROL}b"),
    "a value": (json_grammar({"const": CONTROL}, "guided_json"), f'"{CONTROL}"'),
    "a name": (
        json_grammar({"required": [CONTROL], "properties": {CONTROL: {"const": 1}}, "type": "object"}, "guided_json"),
        f'{{"{CONTROL}":1}}',
    ),
    "by the client's own options": (any_grammar(f'%llguidance {{}}\nstart: "{CONTROL}"', "grammar"), CONTROL),
}
"""Grammar, and a text of it."""


@pytest.mark.parametrize("name", SPELLED)
def test_the_text_of_a_control_token_is_spelled_in_ordinary_tokens(name: str) -> None:
    grammar, text = SPELLED[name]
    tokenizer = byte_level((CONTROL, "<|eos|>"))
    end, size = tokenizer.token_to_id("<|eos|>"), tokenizer.get_vocab_size()
    assert end is not None
    matcher = AnswerGrammars(lambda: AnswerVocabulary(tokenizer.to_str(), size, (end,))).matcher(grammar)
    for letter in text:
        (token,) = tokenizer.encode(letter).ids
        allowed = allowed_tokens(matcher, size)
        assert token in allowed and tokenizer.token_to_id(CONTROL) not in allowed
        assert matcher.consume_token(token)
    assert end in allowed_tokens(matcher, size)


def allowed_tokens(matcher: LLMatcher, size: int) -> set[int]:
    mask = matcher.compute_bitmask()
    return {token for token in range(size) if mask[token // 8] >> token % 8 & 1}


def test_a_text_that_must_come_may_be_spelled_in_any_tokens() -> None:
    """As the model would write it: letter by letter it would take longer, and read what it never reads."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(["location"] * 9, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    size = trained.get_vocab_size()
    grammars = AnswerGrammars(lambda: AnswerVocabulary(trained.to_str(), size, (0,)))
    allowed = allowed_tokens(grammars.matcher(choice_grammar(["location"])), size)
    assert {"l", "location"} <= {trained.id_to_token(token) for token in allowed}


def test_large_objects_end_at_a_limit_and_drawn_schemas_do_not() -> None:
    tokenizer = byte_level(("<|eos|>",))
    grammars = AnswerGrammars(lambda: AnswerVocabulary(tokenizer.to_str(), 257, (256,)))
    large: dict[str, object] = {"type": "object", "properties": {f"key{number}": {} for number in range(6000)}}
    with pytest.raises(GrammarError, match="too big"):
        grammars.matcher(json_grammar(large, "schema"))
    fitting: dict[str, object] = {"type": "object", "properties": {f"key{number}": {} for number in range(1000)}}
    assert not grammars.matcher(json_grammar(fitting, "schema")).is_error()
    for number in range(1000):
        assert not grammars.matcher(json_grammar(drawn_schema(number), "schema", "")).is_error(), number


LONG_CHAINS: Mapping[str, Callable[[], str]] = {
    "references": lambda: json_grammar({"$ref": "#/$defs/0", "$defs": chain_of(3000, lambda ref: ref)}, "schema"),
    "alternatives": lambda: json_grammar(
        {"$ref": "#/$defs/0", "$defs": chain_of(1900, lambda ref: {"anyOf": [ref, {"type": "null"}]})}, "schema"
    ),
    "rules": lambda: any_grammar(
        "start: r0\n" + "".join(f'r{n}: "a" r{n + 1}\n' for n in range(6000)) + 'r6000: "b"', "grammar"
    ),
    "terminals": lambda: any_grammar(
        "start: R0\n" + "".join(f'R{n}: "a" R{n + 1}\n' for n in range(6000)) + 'R6000: "b"', "grammar"
    ),
}


def chain_of(num: int, link: Callable[[dict[str, object]], dict[str, object]]) -> dict[str, object]:
    """Definitions of which each refers to the next one."""
    links: dict[str, object] = {str(n): link({"$ref": f"#/$defs/{n + 1}"}) for n in range(num)}
    return {**links, str(num): {"type": "integer"}}


@pytest.mark.parametrize("name", LONG_CHAINS)
def test_the_longest_chains_do_not_end_the_process(name: str) -> None:
    tokenizer = byte_level(("<|eos|>",))
    grammars = AnswerGrammars(lambda: AnswerVocabulary(tokenizer.to_str(), 257, (256,)))
    grammar = LONG_CHAINS[name]()
    assert MAX_GRAMMAR_BYTES * 3 // 4 < len(grammar) <= MAX_GRAMMAR_BYTES
    matcher = grammars.matcher(grammar)
    assert allowed_tokens(matcher, 257), "nor does a mask, in a thread of the usual stack"


@pytest.mark.parametrize("pattern", ["(a{1000}){3000}", "(a{300}){300}", "((a{100}){100}b{50}){100}"])
def test_repetitions_of_repetitions_are_built_as_far_as_they_are_read(pattern: str) -> None:
    """As a whole each would take 150 MB. What is read of it meets a limit of states, and is an error then."""
    tokenizer = byte_level(("<|eos|>",))
    grammars = AnswerGrammars(lambda: AnswerVocabulary(tokenizer.to_str(), 257, (256,)))
    matcher = grammars.matcher(regex_grammar(pattern, "regex"))
    for _ in range(MAX_LEXER_STATES + 1):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            break
        assert matcher.consume_token(ord("a") if mask[ord("a") // 8] >> ord("a") % 8 & 1 else ord("b"))
    assert "too many states" in matcher.get_error()


def test_nothing_stays_of_what_is_refused() -> None:
    """What is kept is the error, without what was compiled before it."""
    tokenizer = byte_level(("<|eos|>",))
    grammars = AnswerGrammars(lambda: AnswerVocabulary(tokenizer.to_str(), 257, (256,)))
    error = grammars.compile(regex_grammar(r"a[^\s\S]", "regex")).exception()
    assert isinstance(error, GrammarError)
    assert error.__context__ is None
    kept = [value for frame, _ in walk_tb(error.__traceback__) for value in frame.f_locals.values()]
    assert not any(isinstance(value, LLMatcher) for value in kept)


def test_as_many_choices_as_may_be_asked_for_fit() -> None:
    tokenizer = byte_level(("<|eos|>",))
    grammars = AnswerGrammars(lambda: AnswerVocabulary(tokenizer.to_str(), 257, (256,)))
    drawn = Random(1)
    choices = ["".join(drawn.choices("abcdefghijklmnop ", k=60)) for _ in range(MAX_CHOICES)]
    assert not grammars.matcher(choice_grammar(choices)).is_error()


def test_a_choice_may_be_any_character() -> None:
    """Control characters, the one behind ASCII among them, are spelled with escapes."""
    matched = LLTokenizer("byte")
    for character in map(chr, (*range(1, 0xA1), 0x2028, 0x1F600)):
        matcher = LLMatcher(matched, choice_grammar([character, "zz"]), log_level=0)
        assert matcher.consume_tokens(list(character.encode())), hex(ord(character))
        assert matcher.is_accepting()


def test_the_deep_stack_of_a_compilation_ends_with_it() -> None:
    """All of it counts against `ulimit -d`, and test processes have many grammars."""
    tokenizer = byte_level(("<|eos|>",))
    grammars = AnswerGrammars(lambda: AnswerVocabulary(tokenizer.to_str(), 257, (256,)))
    grammars.matcher(json_grammar({"type": "integer"}, "schema"))
    assert "compiles a grammar" not in {thread.name for thread in threading.enumerate()}
