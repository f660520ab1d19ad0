"""Fields by which a request says what its answer must be, in the names of OpenAI, vLLM, SGLang and llama.cpp, and the
one grammar that they come to.

A grammar is text that llguidance compiles: JSON with a schema, or Lark. Nothing is compiled here, for a body is checked
on the event loop: `GrammarCheck` does that, on threads of its own.
"""

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Literal

import msgspec
from llguidance import regex_to_lark
from pydantic import BeforeValidator, ConfigDict, Field

from deltaserve.core.sampling import MAX_GRAMMAR_BYTES
from deltaserve.model.answer_grammars import AnswerGrammars, GrammarError
from deltaserve.server.api_errors import ApiError, excerpt, invalid, missing, unsupported
from deltaserve.server.body_fields import BodyPart, Items
from deltaserve.server.gbnf import lark_of
from deltaserve.server.grammar_faults import told
from deltaserve.server.sampling_fields import SamplingFields
from deltaserve.server.text.text_codec import TextCodec

SPACES = r"(?:\x20|\r?\x0A[\x20\x09]{0,32})"
"""White space between the parts of JSON: one blank, or a new line and its indentation. A model may write any other for
ever."""
MAX_CHOICES = 4096
_LARK = re.compile(r"^[^\S\n]*(%llguidance\b|start[^\S\n]*:)", re.MULTILINE)
"""What tells Lark from GBNF. llguidance's own pattern crosses lines: on empty ones it takes minutes."""
_NUM_THREADS = 4
_MOST_PARTS = 64
"""Schemas that are compiled to find out which one is at fault."""
_OWN_OPTIONS = "x-guidance"
"""Where llguidance looks for its options in a schema: a client's could say that unknown keywords count for nothing."""
Schema = dict[str, object] | bool
_EMPTY_IS_NONE = BeforeValidator(lambda value: None if value == "" else value)


class JsonSchemaFormat(BodyPart):
    """OpenAI's `response_format.json_schema`."""

    name: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    strict: bool | None = None
    """Whether the answer must satisfy the schema. It does, either way."""
    rules: Annotated[Schema | None, Field(alias="schema")] = None


class ResponseFormat(BodyPart):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    rules: Annotated[Schema | None, Field(alias="schema")] = None
    """Schema beside `json_object`, as SGLang's and Fireworks' clients send it."""


class StructuredOutputs(BodyPart):
    """vLLM's `structured_outputs`. Other names in it are refused: a typo would lose the constraint in silence."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    json_rules: Annotated[Schema | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None


class ConstraintFields(SamplingFields):
    """What an answer must be. At most one of these may ask for something."""

    response_format: Annotated[ResponseFormat | None, _EMPTY_IS_NONE] = None
    structured_outputs: Annotated[StructuredOutputs | None, _EMPTY_IS_NONE] = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: Schema | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None


@dataclass(frozen=True, slots=True)
class PartSchema:
    """A schema that a grammar is made of, and whose."""

    param: str
    owner: str
    schema: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must be, and the field that asks for it."""

    param: str
    grammar: str
    parts: Sequence[PartSchema] = ()
    """Schemas of clients in it: where the grammar is of no use, the fault is looked for in these."""


def constraint_of(fields: ConstraintFields) -> Constraint | None:
    """The constraint of a request. Raises ApiError 400 for one that cannot be a grammar, and for more than one."""
    spaces = SPACES if fields.guided_whitespace_pattern is None else fields.guided_whitespace_pattern
    found = _of_response_format(fields.response_format, spaces)
    found += _of_structured_outputs(fields.structured_outputs, spaces)
    for param, schema in (("guided_json", fields.guided_json), ("json_schema", fields.json_schema)):
        if schema not in (None, ""):
            found.append(Constraint(param, json_grammar(_schema_of(schema, param), param, spaces)))
    found += _of_texts("guided_regex", fields.guided_regex, regex_grammar)
    found += _of_texts("regex", fields.regex, regex_grammar)
    found += _of_texts("guided_grammar", fields.guided_grammar, any_grammar)
    found += _of_texts("ebnf", fields.ebnf, any_grammar)
    found += _of_texts("grammar", fields.grammar, any_grammar)
    found += _of_choices("guided_choice", fields.guided_choice)
    if fields.allowed_token_ids:
        found.append(Constraint("allowed_token_ids", tokens_grammar(fields.allowed_token_ids)))
    if len(found) > 1:
        names = f"{found[0].param} and {found[1].param}"
        raise invalid(found[0].param, f"{names} both say what the answer must be: give one of them")
    for one in found:
        num_bytes = len(one.grammar.encode())
        if num_bytes > MAX_GRAMMAR_BYTES:
            message = f"{one.param} makes a grammar of {num_bytes} bytes, at most {MAX_GRAMMAR_BYTES} are allowed"
            raise invalid(one.param, message)
    return found[0] if found else None


def json_grammar(schema: Schema, param: str, spaces: str = SPACES) -> str:
    """Grammar of the JSON texts that satisfy a schema. `spaces`: pattern between their parts; empty: none there.

    Raises ApiError 400.
    """
    if isinstance(schema, bool):
        return _json_text({"grammars": [{"json_schema": schema}]}, param)
    if _OWN_OPTIONS in schema:
        raise unsupported(param, f"{param}: the keyword {_OWN_OPTIONS} is not supported")
    options = {"whitespace_pattern": spaces} if spaces else {"whitespace_flexible": False}
    return _json_text({"grammars": [{"json_schema": {**schema, _OWN_OPTIONS: options}}]}, param)


def lark_grammar(lark: str) -> str:
    """A grammar in llguidance's Lark, which may hold schemas: `%json {...}`."""
    return json.dumps({"grammars": [{"lark_grammar": lark}]}, ensure_ascii=False)


def regex_grammar(regex: str, param: str) -> str:
    """Grammar of the texts that a pattern matches as a whole, with anchors or without."""
    _check_size(regex, param)
    if (len(regex) - len(regex.rstrip("\\"))) % 2:  # the translation drops it
        raise _unusable(param, "the pattern ends in a backslash that escapes nothing")
    try:
        return lark_grammar(f"start: /{regex_to_lark(regex)}/")
    except ValueError as error:
        raise _unusable(param, str(error)) from error


def any_grammar(text: str, param: str) -> str:
    """A grammar in Lark, or in GBNF, as SGLang's `ebnf` and llama.cpp's `grammar` are."""
    _check_size(text, param)
    if _LARK.search(text):
        return lark_grammar(text)
    try:
        return lark_grammar(lark_of(text))
    except Exception as error:  # it is written by hand, and raises whatever comes
        raise _unusable(param, _GBNF_ERRORS.get(type(error)) or str(error)) from error


_GBNF_ERRORS: Mapping[type[Exception], str] = {
    IndexError: "it ends in a backslash",
    RecursionError: "its groups stand in each other too deep",
}
"""Errors that say nothing of the grammar |-> the only fault that leads to them."""


def _check_size(text: str, param: str) -> None:
    """Before it is translated, which may take long."""
    num_bytes = len(text.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise invalid(param, f"{param} has {num_bytes} bytes, at most {MAX_GRAMMAR_BYTES} are allowed")


def choice_grammar(choices: list[str]) -> str:
    """Grammar of some texts, one of which is the answer."""
    texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))
    texts = texts.replace("\x7f", "\\u007f")  # a control character to Lark, and none to JSON
    return lark_grammar(f"start: CHOICE\nCHOICE: {texts}")


def tokens_grammar(ids: Sequence[int]) -> str:
    """Grammar of any number of these tokens, whatever they spell."""
    numbers = sorted(set(ids))
    runs = (list(run) for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]))
    ranges = (f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else str(run[0][1]) for run in runs)
    return lark_grammar(f"start: allowed*\nallowed: <[{','.join(ranges)}]>")


class GrammarCheck:
    """Compiles grammars before their requests are taken: what it lets through, every worker can draw by."""

    def __init__(self, codec: TextCodec) -> None:
        self._grammars = AnswerGrammars(codec.vocabulary, _NUM_THREADS)

    async def check(self, constraint: Constraint) -> None:
        """Raises ApiError 400, which names what the grammar has that cannot be done."""
        reason = await self._reason(constraint.grammar)
        if reason is None:
            return
        for part in constraint.parts[:_MOST_PARTS]:
            grammar = json_grammar({**part.schema}, part.param)
            of_part = await self._reason(grammar)
            if of_part is not None:
                raise _unusable(part.param, of_part, part.owner, grammar)
        raise _unusable(constraint.param, reason, grammar=constraint.grammar)

    async def _reason(self, grammar: str) -> str | None:
        """Why it is of no use; None: it is."""
        try:
            await asyncio.shield(asyncio.wrap_future(self._grammars.compile(grammar)))
        except GrammarError as error:
            return str(error)
        return None


def _of_response_format(given: ResponseFormat | None, spaces: str) -> list[Constraint]:
    param = "response_format"
    if given is None or given.type == "text":
        return []
    if given.type == "structural_tag":
        raise unsupported(param, "response_format of type structural_tag is not supported")
    if given.type == "json_object":
        rules: Schema = {"type": "object"} if given.rules is None else given.rules
        return [Constraint(param, json_grammar(rules, param, spaces))]
    rules_given = given.rules if given.json_schema is None else given.json_schema.rules
    if rules_given is None:
        raise missing("response_format.json_schema.schema")
    return [Constraint(param, json_grammar(rules_given, param, spaces))]


def _of_structured_outputs(given: StructuredOutputs | None, spaces: str) -> list[Constraint]:
    if given is None:
        return []
    for name, value in (
        ("structural_tag", given.structural_tag),
        ("disable_additional_properties", given.disable_additional_properties),
    ):
        if value:
            raise unsupported(f"structured_outputs.{name}")
    if given.whitespace_pattern is not None:
        spaces = given.whitespace_pattern
    spaces = "" if given.disable_any_whitespace else spaces
    found = []
    if given.json_rules not in (None, ""):
        param = "structured_outputs.json"
        found.append(Constraint(param, json_grammar(_schema_of(given.json_rules, param), param, spaces)))
    if given.json_object:
        param = "structured_outputs.json_object"
        found.append(Constraint(param, json_grammar({"type": "object"}, param, spaces)))
    found += _of_texts("structured_outputs.regex", given.regex, regex_grammar)
    found += _of_texts("structured_outputs.grammar", given.grammar, any_grammar)
    found += _of_choices("structured_outputs.choice", given.choice)
    return found


def _of_texts(param: str, text: str | None, grammar: Callable[[str, str], str]) -> list[Constraint]:
    return [Constraint(param, grammar(text, param))] if text else []


def _of_choices(param: str, choices: list[str] | None) -> list[Constraint]:
    if choices is None:
        return []
    if not choices:
        raise invalid(param, f"{param} is empty: no answer is among none")
    if len(choices) > MAX_CHOICES:
        raise invalid(param, f"{param} has {len(choices)} texts, at most {MAX_CHOICES} are allowed")
    return [Constraint(param, choice_grammar(choices))]


def _schema_of(given: object, param: str) -> Schema:
    """A schema that may come as the text of one."""
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given)
        except (ValueError, RecursionError) as error:
            raise invalid(param, f"{param} is a text that is no JSON: {excerpt(given)}") from error
    if not isinstance(given, dict | bool):
        raise invalid(param, f"{param} is {excerpt(given)}, expected a JSON schema: an object, true or false")
    return given


def _json_text(value: object, param: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise _unusable(param, "arrays and objects stand in each other too deep") from error


def _unusable(param: str, reason: str, owner: str = "", grammar: str = "") -> ApiError:
    of = f" of {owner}" if owner else ""
    return invalid(param, f"{param}{of} cannot be followed: {told(reason, grammar)}", "unsupported_grammar")
