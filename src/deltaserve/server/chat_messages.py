"""The messages of a conversation as agents send them, checked and handed to the model's chat template."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, model_validator

from deltaserve.control.front.client import Limits
from deltaserve.server.api_errors import ApiError, invalid, missing, unsupported
from deltaserve.server.body_fields import BodyPart, Items, UnknownFields
from deltaserve.server.call_ids import Tied, tied
from deltaserve.server.field_errors import listed
from deltaserve.server.prompts import too_long
from deltaserve.server.read import parse_object
from deltaserve.server.text.template_needs import REASONING_NAMES, TemplateError
from deltaserve.server.text.text_codec import TextCodec, TooManyTokens

_NAME = re.compile(r"[^\s<>|\\]{1,128}\Z")
_SPEAKER = re.compile(r"(?! )([^\s<>|\\]| ){1,128}(?<! )\Z")
_SPEAKER_RULE = "a name has 1 to 128 characters, no white space but spaces inside, and none of < > | \\"
_NAME_RULE = "a name has 1 to 128 characters, no white space and none of < > | \\"
_EMPTY: tuple[object, ...] = (None, "", [], {})

Content = str | Items[dict[str, object]] | None


class MessagePart(BodyPart):
    """A part of a message, as programs in many languages write it: an optional field without a value may stand there
    as null, "", [] or {}."""

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        return {name: each for name, each in value.items() if name == "content" or each not in _EMPTY}


class FunctionCall(MessagePart):
    """What an earlier assistant turn called. `arguments`: a JSON object, or one in a string; empty by default."""

    name: str
    arguments: str | dict[str, object] | None = None


class ToolCall(MessagePart):
    """One call of an earlier assistant turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(MessagePart):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    audio: object = None
    function_call: object = None


def encode_messages(
    messages: Sequence[ChatMessage],
    options: Mapping[str, object],
    codec: TextCodec,
    limits: Limits | None,
    unknown: UnknownFields,
    *,
    is_open: bool = False,
) -> tuple[int, ...]:
    """Ids of a conversation. `is_open`: up to the end of its last message, which is gone on with. Raises ApiError 400
    naming the message, before work is spent on what cannot fit, and for a turn that the template leaves out."""
    if not messages:
        raise invalid("messages", "messages is empty")
    if limits is not None and len(messages) > limits.max_context_len:
        raise too_long(len(messages), "messages", limits)  # no message is shorter than a token
    if is_open and (messages[-1].role != "assistant" or messages[-1].tool_calls):
        raise invalid("messages", "only a last message of the assistant, without calls, can be gone on with")
    read = tied([_read(message, f"messages[{index}]", unknown) for index, message in enumerate(messages)])
    if not codec.has_chat_template:
        raise unsupported("messages", "this model has no chat template; use /v1/completions")
    try:
        encode = codec.encode_open_chat if is_open else codec.encode_chat
        tokens = encode(read.messages, options, limits.max_context_len if limits else None)
    except TooManyTokens as error:
        assert limits is not None
        raise too_long(error.least, "messages", limits) from error
    except TemplateError as error:
        raise invalid("messages", str(error)) from error
    if not tokens:
        raise invalid("messages", "messages render to an empty prompt")
    _tell_left_out(read, options, codec, unknown)
    return tokens


_WAY_OUT = "leave it out, write it as text, or serve a model whose template shows it"


def _tell_left_out(read: Tied, options: Mapping[str, object], codec: TextCodec, unknown: UnknownFields) -> None:
    """A turn that the template leaves out is refused; a field beside others that are shown is counted."""
    for lost in codec.left_out(read.messages, options):
        if lost.is_whole:
            role = read.messages[lost.index]["role"]
            text = f"the model's chat template leaves out this part of a message with role {role}; {_WAY_OUT}"
            raise invalid(f"messages[{read.order[lost.index]}].{lost.field}", text)
        unknown.leave_out(f"messages[].{lost.field}")


def _read(message: ChatMessage, param: str, unknown: UnknownFields) -> dict[str, object]:
    """The message in OpenAI's words; what it has that nobody knows is counted."""
    for field in ("audio", "function_call"):
        if getattr(message, field) is not None:
            raise unsupported(f"{param}.{field}")
    if message.name is not None and not _SPEAKER.match(message.name):
        raise invalid(f"{param}.name", _SPEAKER_RULE)
    if message.tool_calls and message.role != "assistant":
        raise invalid(f"{param}.tool_calls", "only an assistant message has tool_calls")
    count_others(message, "messages[]", unknown)
    content, thoughts = _content(message, param, unknown)
    if content is None and message.role == "tool":
        content = ""  # a function that returns nothing
    if content is None and message.role != "assistant":
        raise missing(f"{param}.content")
    read: dict[str, object] = {"role": message.role, "content": content}
    reasoning = _reasoning(message, thoughts, param)
    if reasoning is not None:
        read["reasoning_content"] = reasoning
    for field in ("name", "tool_call_id"):
        if getattr(message, field) is not None:
            read[field] = getattr(message, field)
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        read["tool_calls"] = [_call(call, f"{param}.tool_calls[{index}]", unknown) for index, call in calls]
    return read


def count_others(part: BaseModel, where: str, unknown: UnknownFields) -> None:
    """Fields of a part that nobody knows are counted."""
    others = {name: value for name, value in (part.model_extra or {}).items() if not _says_nothing(value)}
    known = [f"{where}.{name}" for name in type(part).model_fields] if others else []
    for name in others:
        unknown.ignore(f"{where}.{name}", known)


def _reasoning(message: ChatMessage, thoughts: str, param: str) -> str | None:
    """The reasoning in a message, under whichever of its names; an agent that sends two sends the same twice."""
    named: dict[str, str] = {name: getattr(message, name) for name in REASONING_NAMES if getattr(message, name)}
    said = {*named.values(), *([thoughts] if thoughts else [])}
    if len(said) > 1:
        raise invalid(f"{param}.{next(iter(named))}", f"{listed([*named, *(['content'] if thoughts else [])])} differ")
    return said.pop() if said else None


def _content(message: ChatMessage, param: str, unknown: UnknownFields) -> tuple[object, str]:
    """(None, a text or text parts; reasoning found in parts)."""
    content = message.content
    if message.refusal:
        if content:
            raise unsupported(f"{param}.refusal", "a message has either content or a refusal")
        return message.refusal, ""
    if content is None or isinstance(content, str):
        return content, ""
    texts: list[str] = []
    thoughts: list[str] = []
    for index, part in enumerate(content):
        kind, text = _part(part, f"{param}.content[{index}]", unknown)
        (thoughts if kind in _THOUGHTS else texts).append(text)
    return [{"type": "text", "text": text} for text in texts], "".join(thoughts)


_PARTS: Mapping[str, str] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
    "reasoning": "text",
}
"""Kind of a part |-> where its text stands. Agents send parts of OpenAI's responses as they got them."""
_THOUGHTS = frozenset({"thinking", "reasoning"})


def _part(part: Mapping[str, object], param: str, unknown: UnknownFields) -> tuple[str, str]:
    """A part of a message as (kind, text)."""
    kind = str(part.get("type") or "")
    if not kind:
        raise unsupported(f"{param}.type", 'a part without a type; a text is {"type": "text", "text": "..."}')
    if kind not in _PARTS:
        problem = f"a part of type {kind[:40]!r} is not supported: only text is, and nothing is fetched from a URL"
        raise unsupported(f"{param}.type", problem)
    text = part.get(_PARTS[kind])
    if kind == "thinking" and isinstance(text, list):
        text = "".join(_thought_texts(text, f"{param}.{kind}"))
    if not isinstance(text, str):
        raise invalid(f"{param}.{_PARTS[kind]}", "text must be a string")
    for name in _others(part, ("type", _PARTS[kind])):
        unknown.ignore(f"messages[].content[].{name}", ())
    return kind, text


def _others(part: Mapping[str, object], known: Collection[str]) -> Iterator[str]:
    return (str(name) for name, value in part.items() if name not in known and not _says_nothing(value))


def _says_nothing(value: object) -> bool:
    """Whether the value of a field nobody knows asks for nothing. 0 asks for something."""
    return value is False or value in _EMPTY


def _thought_texts(parts: Sequence[object], param: str) -> Iterator[str]:
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise invalid(param, "thinking is a text or a list of text parts")
        yield text


_NO_ARGUMENTS = ("", "null", "[]")
"""PHP writes an empty object as an empty list."""


INVALID_JSON = "INVALID_JSON"
"""Name under which arguments that are no JSON object stand in one, as they are: those of a call that was cut, or that
the model wrote badly. A conversation that has one goes on."""


def _call(call: ToolCall, param: str, unknown: UnknownFields) -> Mapping[str, object]:
    if not _NAME.match(call.function.name):
        raise invalid(f"{param}.function.name", _NAME_RULE)
    arguments = call.function.arguments
    if arguments is None or (isinstance(arguments, str) and arguments.strip() in _NO_ARGUMENTS):
        arguments = {}
    if isinstance(arguments, str) and not _is_object(arguments):
        reason = f"it is no JSON object, and the model reads it as the text of {INVALID_JSON}"
        unknown.leave_out("messages[].tool_calls[].function.arguments", reason)
        arguments = {INVALID_JSON: arguments}
    count_others(call, "messages[].tool_calls[]", unknown)
    count_others(call.function, "messages[].tool_calls[].function", unknown)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _is_object(arguments: str) -> bool:
    try:
        parse_object(arguments.encode())
    except ApiError:
        return False
    return True
