"""Bounds of grammars that llguidance does not have."""

import json
from collections.abc import Sequence
from random import Random
from traceback import walk_tb

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from deltaserve.model.answer_grammars import (
    AnswerGrammars,
    AnswerVocabulary,
    GrammarError,
    check_multiples,
    without_merges,
)
from deltaserve.server.structured_output import MAX_CHOICES, choice_grammar, json_grammar, regex_grammar
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
    check_multiples(grammar_of(values))


@pytest.mark.parametrize("values", REFUSED)
def test_remainders_that_are_many_are_refused_before_a_state_is_built(values: Sequence[float]) -> None:
    with pytest.raises(GrammarError, match="multipleOf"):
        check_multiples(grammar_of(values))


@pytest.mark.parametrize("name", ["multipleOf", "multiple\\u004ff", "\\u006dultipleOf"])
def test_a_schema_inside_a_grammar_is_no_way_round(name: str) -> None:
    lark = f'start: %json {{"type": "integer", "{name}" : 9999991}}'
    with pytest.raises(GrammarError, match="multipleOf"):
        check_multiples(json.dumps({"grammars": [{"lark_grammar": lark}]}))


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


@pytest.mark.parametrize("pattern", ["(a{1000}){3000}", "(a{300}){300}", "((a{100}){100}b{50}){100}"])
def test_repetitions_of_repetitions_are_refused_and_nothing_of_them_stays(pattern: str) -> None:
    """Each would take 150 MB. What is kept is the error, without what was compiled before it."""
    tokenizer = byte_level(("<|eos|>",))
    grammars = AnswerGrammars(lambda: AnswerVocabulary(tokenizer.to_str(), 257, (256,)))
    compiled = grammars.compile(regex_grammar(pattern, "regex"))
    error = compiled.exception()
    assert isinstance(error, GrammarError)
    assert "too large" in str(error)
    assert error.__context__ is None
    kept = [value for frame, _ in walk_tb(error.__traceback__) for value in frame.f_locals.values()]
    assert not any(isinstance(value, LLMatcher) for value in kept)


def test_as_many_choices_as_may_be_asked_for_fit() -> None:
    tokenizer = byte_level(("<|eos|>",))
    grammars = AnswerGrammars(lambda: AnswerVocabulary(tokenizer.to_str(), 257, (256,)))
    drawn = Random(1)
    choices = ["".join(drawn.choices("abcdefghijklmnop ", k=60)) for _ in range(MAX_CHOICES)]
    assert not grammars.matcher(choice_grammar(choices)).is_error()
