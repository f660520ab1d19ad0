"""Anthropic's messages, and how many tokens they have."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import msgspec
from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from deltaserve.core.ids import Namespace
from deltaserve.core.wire.messages import FinishReason
from deltaserve.server.api_errors import (
    CONTEXT_EXCEEDED,
    AnswerTooLong,
    ApiError,
    ErrorShape,
    Json,
    closed_object,
    excerpt,
    invalid,
    missing,
    unsupported,
)
from deltaserve.server.body_fields import Body, BodyPart, Items, parse
from deltaserve.server.chat_messages import INVALID_JSON
from deltaserve.server.chat_request import ChatRequest, TemplateKwargs, chat_job, chat_prompt, template_options
from deltaserve.server.chat_turns import Turns, kind_of, named_job, place_of, read_part, told_by
from deltaserve.server.dialect import AnswerFormat, Dialect
from deltaserve.server.front import Front
from deltaserve.server.jobs import Asker, Common, Job, KvHintFields, check_model, new_id
from deltaserve.server.read import caller_of
from deltaserve.server.replies import event, json_reply
from deltaserve.server.routes import HttpRoute
from deltaserve.server.sampling_fields import SamplingFields
from deltaserve.server.text.answer_pieces import AnswerPiece, Arguments, CallBegins, Content, Reasoning, arguments_of
from deltaserve.server.text.sample_text import TextPiece
from deltaserve.server.text.text_codec import TextCodec
from deltaserve.server.thinking import (
    Effort,
    ThinkingFields,
    ThinkingOptions,
    asked_limit,
    check_switches,
    thinking_options,
)
from deltaserve.server.tool_use import CallMode, FunctionTool, ToolUse, tool_use
from deltaserve.server.usage import Counted, cached_len, hint_answers

_NAMES = {
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
"""Chat completions' name of a field |-> ours, where they differ."""
_PARTS = {
    "id": "id",
    "tool_call_id": "tool_use_id",
    "function.name": "name",
    "function.arguments": "input",
    "parameters": "input_schema",
}
"""Chat completions' name of a field of a message, call or tool |-> ours."""


class Metadata(BodyPart):
    """Who asks; without effect."""

    user_id: str | None = None


class OutputFormat(BodyPart):
    """Form of the answer's text."""

    type: Literal["json_schema"]
    schema_: dict[str, object] = Field(alias="schema")


class OutputConfig(BodyPart):
    """How the answer is to be."""

    effort: Effort = None
    format: OutputFormat | None = None


class CallChoice(BodyPart):
    """Whether tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ContextManagement(BodyPart):
    """What is to be taken out of the conversation before the model reads it."""

    edits: Items[dict[str, object]] | None = None


class ConversationBody(Body):
    """A conversation, as far as a model reads it."""

    model: str | None = None
    messages: Items[dict[str, object]]
    system: str | Items[dict[str, object]] | None = None
    tools: Items[dict[str, object]] | None = None
    tool_choice: CallChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, object] | None = None
    """What `output_config.format` was called in a beta."""
    cache_control: dict[str, object] | None = None
    """A hint, as it is in blocks: every prefix is found again without one, and kept for longer with it."""
    mcp_servers: Items[dict[str, object]] | None = None
    container: str | dict[str, object] | None = None
    context_management: ContextManagement | None = None
    chat_template_kwargs: TemplateKwargs | None = None


class CountBody(ConversationBody):
    """Anthropic's fields."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"messages": [{"role": "user", "content": "Hello"}]}]})


class MessagesBody(ConversationBody, SamplingFields):
    """Anthropic's fields, and the sampling fields of chat completions."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}]}
    )
    max_tokens: int
    stop_sequences: Items[str] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    cache_salt: str | None = None
    kv_hints: KvHintFields | None = None
    priority: int | None = None


_COMMON = {*SamplingFields.model_fields, "model", "stream", "cache_salt", "kv_hints", "priority"}
_DEFAULT_TTL_S = 300
_TTL_S: Mapping[str, int] = {"5m": 300, "1h": 3600}
"""What Anthropic's `cache_control` of prompt caching says |-> seconds."""
_ELSEWHERE = {
    "stop": "send stop_sequences",
    "prompt_logprobs": "an answer here has no place for them",
}
"""Sampling fields of chat completions that are none here |-> the way out."""


class MessageTurn(BodyPart):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Items[dict[str, object]]


class TextBlock(BodyPart):
    """A text."""

    text: str


class ThinkingBlock(BodyPart):
    """Thinking of an earlier answer. The signature is not looked at: whoever sends it may think what they like."""

    thinking: str


class ToolUseBlock(BodyPart):
    """A call of an earlier answer."""

    id: str
    name: str
    input: dict[str, object]


class ToolResultBlock(BodyPart):
    """What a call returned."""

    tool_use_id: str
    content: str | Items[dict[str, object]] | None = None
    is_error: bool | None = None


def _job(body: MessagesBody, asker: Asker) -> Job:
    """Validate everything that needs the tokenizer or the limits. Raises ApiError 400 or 404."""
    check_model(body.model, asker.settings)
    for field, way_out in _ELSEWHERE.items():
        if getattr(body, field) not in (None, []):
            raise unsupported(field, f"{field} is not supported: {way_out}")
    turns = _turns(body, asker)
    name, retain_s = place_of(turns, _NAMES, _PARTS), _marked_s(body)
    with told_by(name):
        request = replace(
            _request(body, turns, asker), fields=_common(body, retain_s, asker), max_tokens=body.max_tokens
        )
        return named_job(chat_job(request, asker, new_id("msg_")), name)


def _common(body: MessagesBody, retain_s: int, asker: Asker) -> Common:
    """`retain_s`: for how long marks want the conversation kept."""
    given: dict[str, object] = body.model_dump(include=_COMMON, exclude_none=True)
    if body.stop_sequences:
        given["stop"] = body.stop_sequences
    if body.kv_hints is None and retain_s:
        given["kv_hints"] = {"retain_s": retain_s}
    wanted = body.output_config and body.output_config.format
    if wanted:
        given["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted.schema_}}
    return parse(Common, given, asker.unknown_fields)


def _marked_s(body: ConversationBody) -> int:
    """Seconds for which the client marked a prefix to be kept, the longest of them; 0: it marked none. Which part of
    the conversation is marked does not matter: all of it is kept, as its next turn needs it. Raises ApiError 400."""
    marked = {"": {"cache_control": body.cache_control}} | _parts_of("system", body.system)
    marked |= _parts_of("tools", body.tools)
    for place, turn in _parts_of("messages", body.messages).items():
        blocks = _parts_of(f"{place}content", turn.get("content"))
        marked |= {place: turn} | blocks
        for inner, block in blocks.items():
            marked |= _parts_of(f"{inner}content", block.get("content"))
    marks = {f"{place}cache_control": part.get("cache_control") for place, part in marked.items()}
    return max((_ttl_s(name, mark) for name, mark in marks.items() if isinstance(mark, dict)), default=0)


def _parts_of(name: str, parts: object) -> dict[str, Mapping[str, object]]:
    """Place |-> part, of turns, tools or blocks; none where a text stands in their place."""
    found = enumerate(parts) if isinstance(parts, list) else ()
    return {f"{name}[{index}].": part for index, part in found if isinstance(part, dict)}


def _ttl_s(name: str, mark: Mapping[str, object]) -> int:
    ttl = mark.get("ttl")
    if ttl is None:
        return _DEFAULT_TTL_S
    if not isinstance(ttl, str) or ttl not in _TTL_S:
        allowed = " or ".join(f"'{each}'" for each in _TTL_S)
        raise invalid(f"{name}.ttl", f"{name}.ttl is {excerpt(ttl)}, allowed is {allowed}")
    return _TTL_S[ttl]


def _request(body: ConversationBody, turns: Turns, asker: Asker) -> ChatRequest:
    """The conversation without sampling. Raises ApiError 400."""
    for name in ("mcp_servers", "container"):
        if getattr(body, name):
            raise unsupported(name, f"{name} is not supported: nothing is run here")
    if body.context_management is not None:
        _check_edits(body.context_management, asker)
    if body.output_format is not None:
        raise unsupported("output_format", "output_format is not supported: send output_config.format")
    given, asked = body.chat_template_kwargs or {}, ThinkingFields(thinking=body.thinking)
    check_switches(asked, given)
    effort = None if body.output_config is None else body.output_config.effort
    switches = thinking_options(body.thinking or ThinkingOptions(type="disabled"))
    return ChatRequest(
        fields=Common(),
        messages=turns.read(),
        max_tokens=None,
        template_options=template_options(effort, {**switches, **given}, "chat_template_kwargs"),
        most_reasoning=asked_limit(asked, given),
        tools=_tools(body),
        is_open=turns.messages[-1]["role"] == "assistant",
    )


_CLEAR_THINKING = "clear_thinking_20251015"
"""Edit that takes out earlier thinking: which of it a model reads again is its template's choice."""
_ALL = ("all", {"type": "all"})
"""Ways to say that all thinking is kept."""


def _check_edits(asked: ContextManagement, asker: Asker) -> None:
    """Raises ApiError 400 for an edit that is not made here."""
    other = next(iter(asked.model_extra or ()), None)
    if other is not None:
        raise unsupported("context_management", f"context_management has {excerpt(other)}: only edits is supported")
    for index, edit in enumerate(asked.edits or ()):
        kind_of(edit, (_CLEAR_THINKING,), f"context_management.edits[{index}]")
        if edit.get("keep") not in _ALL:
            reason = "which thinking of earlier turns is read again is the choice of the model's chat template"
            asker.unknown_fields.leave_out("context_management.edits[].keep", reason)


# ---------------------------------------------------------------- messages


def _turns(body: ConversationBody, asker: Asker) -> Turns:
    turns = Turns()
    system = _system(body.system or "", asker)
    if system:
        turns.add("system", role="system", content=system)
    if not body.messages:
        raise invalid("messages", "messages is empty")
    for index, given in enumerate(body.messages):
        place = f"messages[{index}]"
        turn = read_part(MessageTurn, given, place)
        if isinstance(turn.content, str):
            turns.add(place, role=turn.role, content=turn.content)
            continue
        if not turn.content and turn.role == "user":
            raise invalid(f"{place}.content", "a turn of the user has no blocks")
        read = _TurnBlocks(turns, turn.role, place, asker)
        for number, block in enumerate(turn.content):
            where = f"{place}.content[{number}]"
            read.kinds[kind_of(block, read.kinds, where)](block, where)
        read.end()
    if not turns.messages:
        raise invalid("messages", "no turn has any blocks")
    return turns


_BILLING_HEADER = "x-anthropic-billing-header:"
"""Beginning of a line that Claude Code puts in front of its system prompt. It says who is to pay, and differs with
every request: as part of a prompt it would keep all that follows from being found in a cache."""


def _system(system: str | Sequence[Mapping[str, object]], asker: Asker) -> object:
    """The system prompt without what is not for the model."""
    texts = _texts(system, "system")
    told = [texts] if isinstance(texts, str) else [part["text"] for part in texts]
    kept = [_without_billing_header(text) for text in told]
    if kept == told:
        return texts
    asker.unknown_fields.leave_out("system.x-anthropic-billing-header", "nobody is billed here")
    return kept[0] if isinstance(texts, str) else [{"type": "text", "text": text} for text in kept if text]


def _without_billing_header(text: str) -> str:
    return text.partition("\n")[2].lstrip("\n") if text.startswith(_BILLING_HEADER) else text


def _texts(content: str | Sequence[Mapping[str, object]], place: str) -> str | list[dict[str, str]]:
    """A text, or text blocks, as chat completions have them."""
    if isinstance(content, str):
        return content
    texts = []
    for number, block in enumerate(content):
        kind_of(block, ("text",), f"{place}[{number}]")
        texts.append({"type": "text", "text": read_part(TextBlock, block, f"{place}[{number}]").text})
    return texts


class _TurnBlocks:
    """The blocks of one turn: results of calls are messages of their own, the rest is one."""

    def __init__(self, turns: Turns, role: str, place: str, asker: Asker) -> None:
        self._turns = turns
        self._role = role
        self._place = place
        self._asker = asker
        self._texts: list[Json] = []
        self._thoughts: list[str] = []
        self._calls: list[tuple[ToolUseBlock, str]] = []
        said = {"text": self._text}
        answered = {
            "thinking": self._thinking,
            "redacted_thinking": self._redacted_thinking,
            "tool_use": self._tool_use,
        }
        self.kinds = said | (answered if role == "assistant" else {"tool_result": self._tool_result})

    def _text(self, block: Mapping[str, object], place: str) -> None:
        self._texts.append({"type": "text", "text": read_part(TextBlock, block, place).text})

    def _thinking(self, block: Mapping[str, object], place: str) -> None:
        self._thoughts.append(read_part(ThinkingBlock, block, place).thinking)

    def _redacted_thinking(self, block: Mapping[str, object], place: str) -> None:
        reason = "it is encrypted, and only Anthropic can read it"
        self._asker.unknown_fields.leave_out("messages[].content[] of type redacted_thinking", reason)

    def _tool_use(self, block: Mapping[str, object], place: str) -> None:
        self._calls.append((read_part(ToolUseBlock, block, place), place))

    def _tool_result(self, block: Mapping[str, object], place: str) -> None:
        self.end()
        read = read_part(ToolResultBlock, block, place)
        if read.is_error:
            self._asker.unknown_fields.leave_out("messages[].content[].is_error")
        content = _texts(read.content or "", f"{place}.content")
        self._turns.add(place, role="tool", tool_call_id=read.tool_use_id, content=content)

    def end(self) -> None:
        """What was said so far becomes a message."""
        if not (self._texts or self._thoughts or self._calls):
            return
        thoughts = {"reasoning_content": "".join(self._thoughts)} if self._thoughts else {}
        self._turns.add(self._place, role=self._role, content=list(self._texts) or None, **thoughts)
        for call, place in self._calls:
            self._turns.call(place, call.id, call.name, call.input)
        self._texts.clear()


# ---------------------------------------------------------------- tools


class ToolEntry(BodyPart):
    """A function that may be called."""

    name: str
    description: str | None = None
    input_schema: dict[str, object]
    strict: bool | None = None


def _tools(body: ConversationBody) -> ToolUse:
    tools: list[FunctionTool] = []
    for index, given in enumerate(body.tools or ()):
        place = f"tools[{index}]"
        kind_of({**given, "type": given.get("type") or "custom"}, ("custom",), place)
        read = read_part(ToolEntry, given, place)
        tools.append(FunctionTool(read.name, read.description, read.input_schema, bool(read.strict)))
    choice = body.tool_choice or CallChoice(type="auto")
    if choice.type == "tool" and choice.name is None:
        raise missing("tool_choice.name")
    mode = {"auto": CallMode.AUTO, "none": CallMode.NONE}.get(choice.type, CallMode.REQUIRED)
    only = [choice.name] if choice.type == "tool" and choice.name is not None else None
    return tool_use(tools, mode, only, is_parallel=not choice.disable_parallel_tool_use)


# ---------------------------------------------------------------- answer


class MessagesFormat(AnswerFormat):
    """A message: blocks of thinking, text and calls, in the order in which the model made them."""

    def __init__(self, codec: TextCodec, job: Job, fields: MessagesBody) -> None:
        self._job = job
        self._open: AnswerPiece | None = None
        """What began the block that goes on."""
        self._num_blocks = 0
        self._last: TextPiece | None = None
        self._has_begun = False

    def whole(self, pieces: Mapping[int, TextPiece], counted: Counted) -> Json:
        """The message, complete."""
        piece = pieces[0]
        return self._message(list(_blocks(piece, self._job.id)), counted) | _ending(piece)

    def events(self, piece: TextPiece, counted: Counted, *, is_first: bool) -> bytes:
        """What begins, goes on and ends with `piece`."""
        self._last = piece
        return b"".join([*self._beginning(counted), *(event(each, str(each["type"])) for each in self._grow(piece))])

    def last_events(self, counted: Counted) -> bytes:
        """Why the message ended, and all counts."""
        assert self._last is not None
        ending: Json = {"type": "message_delta", "delta": _ending(self._last), "usage": self._usage(counted)}
        return event(ending, "message_delta") + event({"type": "message_stop"}, "message_stop")

    def error_events(self, error: ApiError) -> bytes:
        """The error in the shape that it would have had in place of the answer."""
        return event(_error_body(error), "error")

    def _beginning(self, counted: Counted) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            yield event({"type": "message_start", "message": self._message([], counted)}, "message_start")

    def _grow(self, piece: TextPiece) -> Iterator[Json]:
        for part in piece.parts:
            if not self._goes_on(part):
                yield from self._end_block()
                self._open = part
                yield {"type": "content_block_start", "index": self._num_blocks, "content_block": _block(part, "")}
            if not isinstance(part, CallBegins):
                yield {"type": "content_block_delta", "index": self._num_blocks, "delta": _delta(part)}
        if piece.finish is not None:
            yield from self._end_block()

    def _goes_on(self, part: AnswerPiece) -> bool:
        if isinstance(part, Arguments):
            return isinstance(self._open, CallBegins)
        return type(part) is type(self._open) and not isinstance(part, CallBegins)

    def _end_block(self) -> Iterator[Json]:
        if isinstance(self._open, Reasoning):
            signature: Json = {"type": "signature_delta", "signature": self._job.id}
            yield {"type": "content_block_delta", "index": self._num_blocks, "delta": signature}
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._num_blocks}
            self._num_blocks += 1

    def _message(self, content: list[Json], counted: Counted) -> Json:
        return {
            "id": self._job.id,
            "type": "message",
            "role": "assistant",
            "model": self._job.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(counted),
        }

    def _usage(self, counted: Counted) -> Json:
        """Tokens that were found in a cache are counted apart from the others."""
        count = counted[0]
        cached = 0 if count.report is None else cached_len(count.report)
        return {
            "input_tokens": self._job.prompt_len - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": count.num_tokens,
            **hint_answers(counted),
        }


def _ending(piece: TextPiece) -> Json:
    """Why an answer ended."""
    if piece.finish is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(piece.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": piece.stop_reason}
    return {"stop_reason": "tool_use" if piece.num_calls else "end_turn", "stop_sequence": None}


def _blocks(piece: TextPiece, signature: str) -> Iterator[Json]:
    """The blocks of a whole answer. `signature`: of its thinking, any text: nobody looks at it but libraries, which
    drop thinking without one."""
    for part in piece.parts:
        if isinstance(part, CallBegins):
            yield _block(part, arguments_of(part, piece.parts))
        elif not isinstance(part, Arguments):
            signed = {"signature": signature} if isinstance(part, Reasoning) else {}
            yield _block(part, part.text) | signed


def _block(part: AnswerPiece, text: str) -> Json:
    if isinstance(part, CallBegins):
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": _object(text)}
    if isinstance(part, Reasoning):
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}  # without citations: strict clients take no null


def _object(text: str) -> object:
    """Arguments as an object; those of a call that was cut, not written well or too deep to be read, as they are."""
    try:
        read = msgspec.json.decode(text) if text else {}
    except (ValueError, RecursionError):
        read = None
    return read if isinstance(read, dict) else {INVALID_JSON: text}


def _delta(part: Content | Reasoning | Arguments) -> Json:
    if isinstance(part, Arguments):
        return {"type": "input_json_delta", "partial_json": part.text}
    if isinstance(part, Reasoning):
        return {"type": "thinking_delta", "thinking": part.text}
    return {"type": "text_delta", "text": part.text}


# ---------------------------------------------------------------- errors, counting

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    421: "permission_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _error_body(error: ApiError) -> Json:
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    param, told = error.param, error.message
    if param is not None and not told.startswith((f"{param} ", f"{param}:")):
        told = f"{param}: {told}"
    if isinstance(error, AnswerTooLong):  # Claude Code asks for less, or compacts, where the text begins so
        numbers = f"{error.prompt_len} + {error.asked_len} > {error.context_len}"
        told = f"input length and `max_tokens` exceed context limit: {numbers}, decrease either ({told})"
    elif error.code == CONTEXT_EXCEEDED:  # it compacts a conversation only where the text begins so
        told = f"prompt is too long: {told}"
    return {"type": "error", "error": {"type": kind, "message": told[:500]}}


_ID_HEADERS = (b"x-request-id", b"request-id")
"""Ours, and Anthropic's, which its libraries tell of an error."""
_TEXT: Json = {"type": "string"}
ERRORS = ErrorShape(
    "AnthropicError",
    "An error in Anthropic's shape",
    closed_object(type=_TEXT, error=closed_object(type=_TEXT, message=_TEXT)),
    _error_body,
)


async def _count(front: Front, request: Request) -> Response:
    """POST /v1/messages/count_tokens. Its work is that of a prompt: it takes a place, as one does."""
    with front.admission.place(caller_of(request).namespace):
        async with front.read(request, CountBody) as body:
            num_tokens = await front.threads.run(lambda: _num_tokens(body, front))
    return json_reply({"input_tokens": num_tokens})


def _num_tokens(body: CountBody, front: Front) -> int:
    asker = Asker(Namespace(""), 0.0, front.limits(), front.text, front.settings, front.unknown_fields)
    check_model(body.model, asker.settings)
    turns = _turns(body, asker)
    with told_by(place_of(turns, _NAMES, _PARTS)):
        return len(chat_prompt(_request(body, turns, asker), asker).tokens)


DIALECT = Dialect(
    "/v1/messages",
    "Answer a conversation, in Anthropic's dialect",
    MessagesBody,
    _job,
    MessagesFormat,
    ("messages", "system", "tools", "chat_template_kwargs"),
    ERRORS,
    (
        HttpRoute(
            "POST",
            "/v1/messages/count_tokens",
            _count,
            "Tokens of a conversation",
            CountBody,
            errors=ERRORS,
            id_headers=_ID_HEADERS,
        ),
    ),
    id_headers=_ID_HEADERS,
)
