"""Texts that a grammar allows, drawn at random from its masks, one byte a token."""

import json
import re
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from llguidance import LLMatcher

from deltaserve.model.answer_grammars import AnswerGrammars, AnswerVocabulary
from tests.fixtures.tiny_tokenizer import byte_level
from tools.drawn_schemas import drawn_schema

END = 256
_ENDINGS = frozenset(b'"}],')
Schema = dict[str, Any]


def byte_grammars() -> AnswerGrammars:
    tokenizer = byte_level(("<|eos|>",)).to_str()
    return AnswerGrammars(lambda: AnswerVocabulary(tokenizer, END + 1, (END,)))


def allows(matcher: LLMatcher, text: str) -> bool:
    """`matcher`: before any token; it is not changed."""
    matcher = matcher.deep_copy()
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def drawn_text(matcher: LLMatcher, draw: Random, lures: Sequence[str], most: int = 300) -> str | None:
    """A text that comes to its end, with these in it wherever they may stand. None: it did not end."""
    taken = bytearray()
    while len(taken) < most:
        lure = [*draw.choice(lures).encode()] if lures else []
        if lure and draw.random() < 0.5 and matcher.validate_tokens(lure) == len(lure):
            assert matcher.consume_tokens(lure)
            taken += bytes(lure)
            continue
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(END + 1) if mask[token // 8] >> token % 8 & 1]
        if END in allowed:
            return taken.decode()
        likely = [token for token in allowed if token in _ENDINGS]
        token = draw.choice(likely if likely and draw.random() < 0.5 else allowed)
        assert matcher.consume_token(token)
        taken.append(token)
    return None


def spellings(name: str) -> Iterator[str]:
    """A name as JSON, in ways that mean the same."""
    yield json.dumps(name)
    yield json.dumps(name, ensure_ascii=False)
    yield '"' + re.sub("....", r"\\u\g<0>", name.encode("utf-16-be").hex()) + '"'


def opened(schema: Any, draw: Random) -> Any:
    """The same, its objects open in some way: names that are not listed may have any value, or one by a schema."""
    if isinstance(schema, list):
        return [opened(each, draw) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: opened(value, draw) for key, value in schema.items()}
    if found.pop("additionalProperties", None) is False:
        found |= draw.choice(
            (
                *({}, {}, {"additionalProperties": True}, {"additionalProperties": False}),
                {"additionalProperties": {"type": "boolean"}},
                {"patternProperties": {"^x": {"type": "null"}}},
            )
        )
    return found


def drawn_open_schema(seed: int) -> Schema:
    draw = Random(seed)
    schema: Schema = opened(drawn_schema(seed), draw)
    if draw.random() < 0.3:
        other: Schema = opened(drawn_schema(seed + 1), draw)
        other.pop("$defs", None)
        if "$ref" not in json.dumps(other):
            schema = {"$defs": schema.pop("$defs", {}), "allOf": [schema, other]}
    return schema


def names_in(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        yield from schema.get("properties") or ()
    for each in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from names_in(each)
