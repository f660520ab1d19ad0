"""POST /v1/chat/completions: fields, messages, and the job they describe."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field

from deltaserve.request.client import Limits
from deltaserve.server.api_errors import ApiError, invalid, unsupported
from deltaserve.server.body_fields import BodyPart, Items, at_most
from deltaserve.server.jobs import Asker, Common, Job, OutputLimit, check_model, compose, new_id
from deltaserve.server.prompts import Prompt, too_long
from deltaserve.server.read import parse_object
from deltaserve.server.sampling_fields import MAX_LOGPROBS, EndpointFields
from deltaserve.text.template import TemplateError
from deltaserve.text.text_codec import TextCodec, TooManyTokens

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
RESERVED_OPTIONS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "namespace", "range"}
)
MAX_OPTIONS = 16

Content = str | Items[dict[str, object]] | None


class FunctionCall(BodyPart):
    """What an earlier assistant turn called. `arguments` is a JSON object in a string."""

    name: str
    arguments: str


class ToolCall(BodyPart):
    """One call of an earlier assistant turn."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(BodyPart):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    audio: object = None
    function_call: object = None


class ChatBody(Common):
    """OpenAI's chat completions plus extensions."""

    messages: Items[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    chat_template_kwargs: Annotated[dict[str, str | bool | int | float | None], at_most(MAX_OPTIONS)] | None = None


def chat_job(body: ChatBody, asker: Asker) -> Job:
    """Validate everything that needs the tokenizer or the limits. Raises ApiError 400 or 404."""
    check_model(body.model, asker.settings)
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise invalid("max_tokens", "max_tokens and max_completion_tokens differ: the first is the second's old name")
    param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    limit = OutputLimit(asker.limits, "messages", param, wanted, asker.settings.default_max_tokens)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs is only allowed with logprobs")
    options = {**_effort(body.reasoning_effort), **_options(body.chat_template_kwargs or {})}
    prompt = Prompt(encode_messages(body.messages, options, asker.codec, asker.limits))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    asked = EndpointFields(limit.resolve(prompt), logprobs, body.prompt_logprobs)
    return compose(body, asker, [prompt], [asked], new_id("chatcmpl-"))


def encode_messages(
    messages: Sequence[ChatMessage], options: Mapping[str, object], codec: TextCodec, limits: Limits | None
) -> tuple[int, ...]:
    """Ids of a conversation. Raises ApiError 400 naming the message, before work is spent on what cannot fit."""
    if not messages:
        raise invalid("messages", "messages is empty")
    if limits is not None and len(messages) > limits.max_context_len:
        raise too_long(len(messages), "messages", limits)  # no message is shorter than a token
    _check_order(messages)
    shown = [_for_template(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if not codec.has_chat_template:
        raise unsupported("messages", "this model has no chat template; use /v1/completions")
    try:
        tokens = codec.encode_chat(shown, options, limits.max_context_len if limits else None)
    except TooManyTokens as error:
        assert limits is not None
        raise too_long(error.least, "messages", limits) from error
    except TemplateError as error:
        raise invalid("messages", str(error)) from error
    if not tokens:
        raise invalid("messages", "messages render to an empty prompt")
    return tokens


def _check_order(messages: Sequence[ChatMessage]) -> None:
    """A tool message answers a call of the assistant turn it follows. Other rules are the template's."""
    open_calls: set[str] = set()
    for index, message in enumerate(messages):
        param = f"messages[{index}]"
        if message.role != "tool":
            open_calls = {call.id for call in message.tool_calls or []}
            if open_calls and message.role != "assistant":
                raise invalid(f"{param}.tool_calls", "only an assistant message has tool_calls")
        elif message.tool_call_id not in open_calls:
            raise invalid(f"{param}.tool_call_id", "a tool message must answer a call of the assistant turn before it")


def _for_template(message: ChatMessage, param: str) -> dict[str, object]:
    """A message as templates expect it: text content, parsed arguments, only known names."""
    for field in ("audio", "function_call"):
        if getattr(message, field) is not None:
            raise unsupported(f"{param}.{field}")
    if message.name is not None and not _NAME.match(message.name):
        raise invalid(f"{param}.name", "a name is 1 to 64 of A-Z a-z 0-9 _ . -")
    content = _text(message.content, f"{param}.content")
    if content is None and message.role != "assistant":
        raise invalid(f"{param}.content", "content is required", "missing_required_parameter")
    shown: dict[str, object] = {
        # OpenAI's newer name for the same thing; templates know only the old one.
        "role": "system" if message.role == "developer" else message.role,
        "content": content or "",
    }
    for field in ("name", "reasoning_content", "tool_call_id"):
        if getattr(message, field) is not None:
            shown[field] = getattr(message, field)
    if message.tool_calls:
        shown["tool_calls"] = [_call(call, f"{param}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
    return shown


def _text(content: Content, param: str) -> str | None:
    """Content as one string, so that nothing can hide in the seam between two parts."""
    if content is None or isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        kind, text = part.get("type"), part.get("text")
        if kind != "text":
            raise unsupported(f"{param}[{index}].type", "only text content is supported; nothing is fetched from a URL")
        if not isinstance(text, str):
            raise invalid(f"{param}[{index}].text", "text must be a string")
        texts.append(text)
    return "".join(texts)


def _call(call: ToolCall, param: str) -> Mapping[str, object]:
    if not _NAME.match(call.function.name):
        raise invalid(f"{param}.function.name", "a name is 1 to 64 of A-Z a-z 0-9 _ . -")
    try:
        arguments = parse_object(call.function.arguments.encode() or b"{}")
    except ApiError as error:
        raise invalid(f"{param}.function.arguments", f"arguments: {error.message}") from error
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _effort(effort: str | None) -> Mapping[str, object]:
    """What templates call it; those of hybrid models have a switch, which "none" turns off."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, **({"enable_thinking": False, "thinking": False} if effort == "none" else {})}


def _options(options: Mapping[str, object]) -> Mapping[str, object]:
    """Switches of the template (`enable_thinking`), never the names it gets from us."""
    for name in options:
        if name in RESERVED_OPTIONS or name.endswith("_token") or not name.isidentifier() or name.startswith("_"):
            raise invalid("chat_template_kwargs", "an entry has a reserved name or is not an identifier")
    return options
