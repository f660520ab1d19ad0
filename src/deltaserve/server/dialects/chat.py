"""OpenAI's chat completions."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from deltaserve.core.wire.messages import FinishReason
from deltaserve.server.api_errors import Json, invalid, missing
from deltaserve.server.body_fields import Items
from deltaserve.server.chat_messages import ChatMessage, MessagePart
from deltaserve.server.chat_request import (
    ChatRequest,
    TemplateFields,
    chat_job,
    prompt_end_options,
    template_options,
)
from deltaserve.server.chat_tools import ToolDefinition, function_tools
from deltaserve.server.dialect import Dialect
from deltaserve.server.jobs import Asker, Common, Job, Sample, check_model, new_id
from deltaserve.server.openai_format import OpenAiFormat
from deltaserve.server.prompts import KeptTokens, TruncationSide
from deltaserve.server.sampling_fields import MAX_LOGPROBS
from deltaserve.server.text.answer_pieces import Arguments, CallBegins, arguments_of
from deltaserve.server.text.answers.answer_reader import ShowReasoning
from deltaserve.server.text.sample_text import TextPiece
from deltaserve.server.thinking import ThinkingFields, asked_effort, asked_limit, check_switches, thinking_switches
from deltaserve.server.tool_use import CallMode, ToolUse, tool_use
from deltaserve.server.usage import logprob_entries


class FunctionName(MessagePart):
    """Which function."""

    name: str


class NamedTool(MessagePart):
    """A tool by its name."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(MessagePart):
    """Some of the tools."""

    mode: Literal["auto", "required"]
    tools: Items[NamedTool]


class ToolChoice(MessagePart):
    """One function that must be called, or the tools of which some may or must."""

    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class ChatBody(Common, ThinkingFields, TemplateFields):
    """OpenAI's fields plus extensions."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}]}
    )
    messages: Items[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Items[ToolDefinition] | None = None
    tool_choice: Literal["", "none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    """SGLang's: false leaves reasoning in the content, markers and all."""
    stream_reasoning: bool | None = None
    """SGLang's: false shows reasoning when it is complete, in one piece."""
    include_reasoning: bool | None = None
    """vLLM's: false leaves reasoning out."""
    truncate_prompt_tokens: KeptTokens = None
    truncation_side: TruncationSide = None


def _job(body: ChatBody, asker: Asker) -> Job:
    """Validate everything that needs the tokenizer or the limits. Raises ApiError 400 or 404."""
    check_model(body.model, asker.settings)
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise invalid("max_tokens", "max_tokens and max_completion_tokens differ: the first is the second's old name")
    is_old = body.max_completion_tokens is None
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs is only allowed with logprobs")
    given = body.chat_template_kwargs or {}
    check_switches(body, given)
    end = prompt_end_options(body)
    options = template_options(asked_effort(body), given, "chat_template_kwargs")
    request = ChatRequest(
        fields=body,
        messages=body.messages,
        max_tokens=body.max_tokens if is_old else body.max_completion_tokens,
        max_tokens_param="max_tokens" if is_old else "max_completion_tokens",
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        template_options={**thinking_switches(body), **options, **end},
        tools=_tools(body, asker),
        most_reasoning=asked_limit(body, given),
        tells_reasoning=body.separate_reasoning is not False,
        shown=_shown(body),
        is_open=bool(body.continue_final_message),
        kept=body.truncate_prompt_tokens,
    )
    return chat_job(request, asker, new_id("chatcmpl-"))


def _shown(body: ChatBody) -> ShowReasoning:
    if body.include_reasoning is False or (body.reasoning is not None and body.reasoning.exclude):
        return ShowReasoning.NOT
    return ShowReasoning.AT_ONCE if body.stream_reasoning is False else ShowReasoning.AS_IT_COMES


def _tools(body: ChatBody, asker: Asker) -> ToolUse:
    tools = function_tools(body.tools or (), asker.unknown_fields)
    mode, only = _choice(body.tool_choice or None)
    return tool_use(tools, mode, only, is_parallel=body.parallel_tool_calls is not False)


def _choice(choice: str | ToolChoice | None) -> tuple[CallMode | None, Sequence[str] | None]:
    """(mode, names that may be called)."""
    if choice is None or isinstance(choice, str):
        return (CallMode(choice) if choice else None), None
    if choice.type == "function":
        if choice.function is None:
            raise missing("tool_choice.function")
        return CallMode.REQUIRED, [choice.function.name]
    if choice.allowed_tools is None:
        raise missing("tool_choice.allowed_tools")
    allowed = choice.allowed_tools
    return CallMode(allowed.mode), [each.function.name for each in allowed.tools]


class ChatFormat(OpenAiFormat):
    """Choices with a message or its deltas, and logprobs as a list of entries."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_at_root = True

    def message(self, sample: Sample, piece: TextPiece) -> Json:
        calls = list(_calls(piece))
        content = piece.text if piece.text or not calls else None
        said: Json = {"role": "assistant", "content": content, **_reasoning(piece), "refusal": None}
        return {"message": {**said, **({"tool_calls": calls} if calls else {})}}

    def delta(self, sample: Sample, piece: TextPiece, *, is_first: bool) -> Json:
        role = {"role": "assistant"} if is_first else {}
        text = piece.text
        content = {"content": text} if is_first or text else {}
        calls = [_call_delta(part) for part in piece.parts if isinstance(part, CallBegins | Arguments)]
        return {"delta": {**role, **content, **_reasoning(piece), **({"tool_calls": calls} if calls else {})}}

    def finish_reason(self, piece: TextPiece) -> str | None:
        if piece.num_calls and piece.finish is FinishReason.STOP:
            return "tool_calls"
        return super().finish_reason(piece)

    def logprobs(self, sample: Sample, piece: TextPiece, *, is_first: bool) -> Json:
        pairs = zip(piece.tokens, piece.logprobs, strict=True)
        return {"content": logprob_entries(pairs, self._label, self._codec.token_bytes), "refusal": None}


def _reasoning(piece: TextPiece) -> Json:
    """The reasoning, named as DeepSeek's API and SGLang name it, and as later versions of vLLM do."""
    text = piece.reasoning
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _calls(piece: TextPiece) -> Iterator[Json]:
    """The calls of a whole answer."""
    for begun in piece.parts:
        if isinstance(begun, CallBegins):
            arguments = arguments_of(begun, piece.parts)
            yield {"id": begun.id, "type": "function", "function": {"name": begun.name, "arguments": arguments}}


def _call_delta(part: CallBegins | Arguments) -> Json:
    if isinstance(part, Arguments):
        return {"index": part.index, "function": {"arguments": part.text}}
    return {
        "index": part.index,
        "id": part.id,
        "type": "function",
        "function": {"name": part.name, "arguments": ""},
    }


DIALECT = Dialect(
    "/v1/chat/completions",
    "Continue a conversation",
    ChatBody,
    _job,
    ChatFormat,
    ("messages", "chat_template_kwargs", "tools"),
)
