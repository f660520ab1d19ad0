"""OpenAI's responses, without any state: a response is not kept, and none is gone on from."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from deltaserve.core.wire.messages import FinishReason
from deltaserve.server.api_errors import ApiError, Json, invalid, unsupported
from deltaserve.server.body_fields import BodyPart, Items, UnknownFields, parse
from deltaserve.server.chat_request import ChatRequest, TemplateKwargs, chat_job, template_options
from deltaserve.server.chat_turns import Turns, kind_of, named_job, place_of, read_part, told_by
from deltaserve.server.dialect import AnswerFormat, Dialect
from deltaserve.server.field_errors import listed, only, shown
from deltaserve.server.jobs import Asker, Common, Job, KvHintFields, check_model, new_id
from deltaserve.server.replies import event
from deltaserve.server.sampling_fields import MAX_LOGPROBS, SamplingFields
from deltaserve.server.text.answer_pieces import AnswerPiece, Arguments, CallBegins, Content, Reasoning
from deltaserve.server.text.sample_text import TextPiece
from deltaserve.server.text.text_codec import TextCodec
from deltaserve.server.thinking import Budget, Effort, limit_of
from deltaserve.server.tool_use import CallMode, FunctionTool, ToolUse, tool_use
from deltaserve.server.usage import Counted, cached_len, hint_answers, logprob_entries

_LOGPROBS = "message.output_text.logprobs"
_NAMES = {"messages": "input", "response_format.json_schema": "text.format", "response_format": "text.format"}
"""Chat completions' name of a field |-> ours, where they differ."""
_PARTS = {
    "id": "call_id",
    "tool_call_id": "call_id",
    "function.name": "name",
    "function.arguments": "arguments",
    "content": "content",
}
"""Chat completions' name of a field of a message or call |-> that of an item."""


class ReasoningOptions(BodyPart):
    """How much the model is to reason. A summary is not made: the reasoning itself is told."""

    effort: Effort = None
    max_tokens: Budget | None = None
    """OpenRouter's."""
    summary: str | None = None
    generate_summary: str | None = None


class TextFormat(BodyPart):
    """Form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, object] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseText(BodyPart):
    """The text of the answer."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseStreamOptions(BodyPart):
    """Padding of events against who guesses at lengths is not made."""

    include_obfuscation: bool | None = None


class ResponsesBody(SamplingFields):
    """OpenAI's fields, and the sampling fields of chat completions."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"input": "Hello", "max_output_tokens": 64}]})
    input: str | Items[dict[str, object]]
    instructions: str | None = None
    model: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    text: ResponseText | None = None
    reasoning: ReasoningOptions | None = None
    tools: Items[dict[str, object]] | None = None
    tool_choice: str | dict[str, object] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    """Limit of tools that a server calls itself: there are none here."""
    include: Items[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    truncation: str | None = None
    metadata: dict[str, object] | None = None
    store: bool | None = None
    """Without effect: nothing is kept."""
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, object] | None = None
    prompt: dict[str, object] | None = None
    context_management: Items[dict[str, object]] | None = None
    moderation: dict[str, object] | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, object] | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    kv_hints: KvHintFields | None = None
    priority: int | None = None
    no_cache: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None


class MessageItem(BodyPart):
    """Something said."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[dict[str, object]]


class CallItem(BodyPart):
    """A call of an earlier answer."""

    call_id: str
    name: str
    arguments: str


class CallOutputItem(BodyPart):
    """What a call returned."""

    call_id: str
    output: str | Items[dict[str, object]]


class TextPart(BodyPart):
    """A text in an item."""

    text: str


class ReasoningItem(BodyPart):
    """Reasoning of an earlier answer, as it was told."""

    content: Items[TextPart] | None = None
    summary: Items[TextPart] | None = None
    encrypted_content: str | None = None


_REFERENCE = (
    "no response is kept here, send the item itself (with the Vercel AI SDK: providerOptions.openai.store = false, or "
    "provider.chat(model))"
)
_STATE = "no response is kept here: send the whole conversation as input"
_REFUSED: Mapping[str, str] = {
    "background": "a response is made while its client waits",
    "previous_response_id": _STATE,
    "conversation": _STATE,
    "prompt": "prompts are not kept here: send instructions and input",
    "context_management": "a conversation is never compacted here: send what is to be read",
    "moderation": "answers are not moderated here",
}
"""Fields that ask for what is not there |-> the way out."""


def _job(body: ResponsesBody, asker: Asker) -> Job:
    """Validate everything that needs the tokenizer or the limits. Raises ApiError 400 or 404."""
    check_model(body.model, asker.settings)
    _refuse(body)
    turns = _turns(body)
    name = place_of(turns, _NAMES, _PARTS)
    with told_by(name):
        request = ChatRequest(
            fields=_common(body, asker),
            messages=turns.read(),
            max_tokens=body.max_output_tokens,
            max_tokens_param="max_output_tokens",
            logprobs=(body.top_logprobs or 0) if _wants_logprobs(body) else None,
            template_options=template_options(
                None if body.reasoning is None else body.reasoning.effort,
                body.chat_template_kwargs or {},
                "chat_template_kwargs",
            ),
            tools=_tools(body, turns, asker.unknown_fields),
            most_reasoning=limit_of({"reasoning.max_tokens": body.reasoning.max_tokens if body.reasoning else None}),
        )
        return named_job(chat_job(request, asker, new_id("resp_")), name)


def _refuse(body: ResponsesBody) -> None:
    for name, way_out in _REFUSED.items():
        if getattr(body, name):
            raise unsupported(name, f"{name} is not supported: {way_out}")
    if body.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "prompt_logprobs is not supported: a response has no place for them")
    if body.truncation not in (None, "disabled"):
        raise unsupported("truncation", "only disabled is supported: a conversation that is too long is refused")
    if body.stream_options and body.stream_options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation")


def _common(body: ResponsesBody, asker: Asker) -> Common:
    own = {"model", "stream", "cache_salt", "extra_key", "kv_hints", "priority", "no_cache"}
    given: dict[str, object] = body.model_dump(include={*SamplingFields.model_fields, *own}, exclude_none=True)
    wanted = body.text and body.text.format
    if wanted and wanted.type != "text":
        schema = wanted.model_dump(
            include={"name", "description", "schema_", "strict"}, by_alias=True, exclude_none=True
        )
        given["response_format"] = {"type": wanted.type, **({"json_schema": schema} if schema else {})}
    return parse(Common, given, asker.unknown_fields)


def _wants_logprobs(body: ResponsesBody) -> bool:
    return _LOGPROBS in (body.include or ()) or bool(body.top_logprobs)


# ---------------------------------------------------------------- input


def _turns(body: ResponsesBody) -> Turns:
    turns = Turns()
    if body.instructions:
        turns.add("instructions", role="system", content=body.instructions)
    if isinstance(body.input, str):
        turns.add("input", role="user", content=body.input)
        return turns
    if not body.input:
        raise invalid("input", "input is empty")
    for index, item in enumerate(body.input):
        kinded = {**item, "type": "message"} if item.get("type") is None and "role" in item else item
        if item.get("type") == "item_reference":
            raise unsupported(f"input[{index}].type", f'input[{index}].type is "item_reference": {_REFERENCE}')
        _ITEMS[kind_of(kinded, _ITEMS, f"input[{index}]")](turns, item, f"input[{index}]")
    return turns


def _message(turns: Turns, item: Mapping[str, object], place: str) -> None:
    read = read_part(MessageItem, item, place)
    content = _content(read.content)
    last = turns.messages[-1] if turns.messages else {}
    if read.role == "assistant" and last.keys() == {"role", "reasoning_content"}:
        last["content"] = content  # the reasoning before it is that of this answer
    elif read.role == "assistant" and "tool_calls" in last:  # said beside the calls, whose results follow
        last["content"] = [*_parts(last.get("content")), *_parts(content)]
    else:
        turns.add(place, role=read.role, content=content)


def _content(content: str | Sequence[Mapping[str, object]]) -> object:
    if isinstance(content, str):
        return content
    without = ("annotations", "logprobs", "prompt_cache_breakpoint")
    return [{name: value for name, value in part.items() if name not in without} for part in content]


def _parts(content: object) -> list[object]:
    """A message's content as a list of parts."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return list(content) if isinstance(content, list) else []


def _call(turns: Turns, item: Mapping[str, object], place: str) -> None:
    read = read_part(CallItem, item, place)
    turns.call(place, read.call_id, read.name, read.arguments)


def _call_output(turns: Turns, item: Mapping[str, object], place: str) -> None:
    read = read_part(CallOutputItem, item, place)
    turns.add(place, role="tool", tool_call_id=read.call_id, content=_content(read.output))


def _reasoning(turns: Turns, item: Mapping[str, object], place: str) -> None:
    read = read_part(ReasoningItem, item, place)
    text = "".join(part.text for part in read.content or read.summary or ())
    if text:
        turns.add(place, role="assistant", reasoning_content=text)
    elif read.encrypted_content:
        raise unsupported(f"{place}.encrypted_content", "reasoning that another server encrypted cannot be read here")


_ITEMS = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _call_output,
    "reasoning": _reasoning,
}


# ---------------------------------------------------------------- tools


class FunctionToolEntry(BodyPart):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class AllowedFunction(BodyPart):
    """A function by its name."""

    type: Literal["function"]
    name: str


class AllowedFunctions(BodyPart):
    """Some of the tools."""

    mode: Literal["auto", "required"]
    tools: Items[AllowedFunction]


_TOOLS = ("function",)
"""Kinds of tools; those that OpenAI's servers call themselves are none of them."""
_HOSTED = "nothing is run here, offer a function in its place"


def _tools(body: ResponsesBody, turns: Turns, unknown: UnknownFields) -> ToolUse:
    mode, only = _choice(body.tool_choice)
    tools: list[FunctionTool] = []
    for index in _functions(body.tools or (), mode, only, unknown):
        place = f"tools[{index}]"
        read = read_part(FunctionToolEntry, (body.tools or ())[index], place)
        tools.append(FunctionTool(read.name, read.description, read.parameters, bool(read.strict)))
        turns.tool_places.append(place)
    return tool_use(tools, mode, only, is_parallel=body.parallel_tool_calls is not False)


def _functions(
    tools: Sequence[Mapping[str, object]], mode: CallMode | None, only: Sequence[str] | None, unknown: UnknownFields
) -> list[int]:
    """Indices of the tools that are functions. The others are left out where the model need not call them: agents offer
    them with every turn. Raises ApiError 400 where it must call one of all, and where they are all that is offered."""
    functions: list[int] = []
    hosted: list[int] = []
    for index, tool in enumerate(tools):
        kind = tool.get("type")
        (hosted if isinstance(kind, str) and kind not in _TOOLS else functions).append(index)
    is_needed = mode is CallMode.REQUIRED and only is None
    if hosted and (is_needed or not (functions or mode is CallMode.NONE)):
        _kind_to_call(tools[hosted[0]], _TOOLS, f"tools[{hosted[0]}]")
    for index in hosted:
        unknown.leave_out(f"tools[] of type {tools[index]['type']}", "nothing is run here, only functions are offered")
    for index in functions:
        kind_of(tools[index], _TOOLS, f"tools[{index}]")
    return functions


def _kind_to_call(value: Mapping[str, object], kinds: Sequence[str], place: str) -> str:
    """The `type` of a tool or of a choice of one. Raises ApiError 400, with the way out for one that is hosted."""
    kind = value.get("type")
    if isinstance(kind, str) and kind not in kinds:
        supported = only([f'"{each}"' for each in kinds])
        raise unsupported(f"{place}.type", f"{place}.type is {shown(kind)}, {supported} supported: {_HOSTED}")
    return kind_of(value, kinds, place)


def _choice(choice: str | Mapping[str, object] | None) -> tuple[CallMode | None, Sequence[str] | None]:
    """(mode, names that may be called)."""
    if choice is None or isinstance(choice, str):
        modes = [mode.value for mode in CallMode]
        if choice and choice not in modes:
            quoted = [f'"{mode}"' for mode in modes]
            raise invalid("tool_choice", f"tool_choice is {shown(choice)}, expected {listed(quoted, 'or')}")
        return (CallMode(choice) if choice else None), None
    if _kind_to_call(choice, ("function", "allowed_tools"), "tool_choice") == "function":
        return CallMode.REQUIRED, [read_part(AllowedFunction, choice, "tool_choice").name]
    allowed = read_part(AllowedFunctions, choice, "tool_choice")
    return CallMode(allowed.mode), [tool.name for tool in allowed.tools]


# ---------------------------------------------------------------- answer


class ResponsesFormat(AnswerFormat):
    """A response: items of reasoning, text and calls, in the order in which the model made them."""

    def __init__(self, codec: TextCodec, job: Job, fields: ResponsesBody) -> None:
        self._codec = codec
        self._job = job
        self._fields = fields
        self._items: list[_OutputItem] = []
        self._number = 0
        """Sequence number of the next event."""
        self._has_begun = False
        self._is_cut = False
        self._due: list[Json] = []
        """Logprobs of tokens whose text has not come: it may lag them."""

    def whole(self, pieces: Mapping[int, TextPiece], counted: Counted) -> Json:
        """The response, complete."""
        for _ in self._grow(pieces[0]):
            pass
        return self._at_end(counted)

    def events(self, piece: TextPiece, counted: Counted, *, is_first: bool) -> bytes:
        """What begins, goes on and ends with `piece`."""
        return b"".join([*self._beginning(), *(self._event(each) for each in self._grow(piece))])

    def last_events(self, counted: Counted) -> bytes:
        """The complete response."""
        body = self._at_end(counted)
        return self._event({"type": f"response.{body['status']}", "response": body})

    def error_events(self, error: ApiError) -> bytes:
        """The response, failed."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        body = self._response("failed", error={"code": code, "message": error.message})
        return b"".join([*self._beginning(), self._event({"type": "response.failed", "response": body})])

    def _beginning(self) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            body = self._response("in_progress")
            yield self._event({"type": "response.created", "response": body})
            yield self._event({"type": "response.in_progress", "response": body})

    def _event(self, body: Json) -> bytes:
        body = {**body, "sequence_number": self._number}
        self._number += 1
        return event(body, str(body["type"]))

    def _grow(self, piece: TextPiece) -> Iterator[Json]:
        """Events of what `piece` adds."""
        self._due += self._logprobs(piece)
        num_placed = len(piece.places)
        placed, self._due = self._due[:num_placed], self._due[num_placed:]
        for part in piece.parts:
            item = self._items[-1] if self._items else None
            if item is None or not item.takes(part):
                if item is not None:
                    yield from item.end("completed")
                item = _OutputItem.begun_by(part, len(self._items))
                self._items.append(item)
                yield from item.begin()
            if isinstance(part, Content):
                number = len(self._items) - 1
                told = [entry for entry, place in zip(placed, piece.places, strict=False) if place == number]
                yield from item.grow(part.text, told)
            elif not isinstance(part, CallBegins):
                yield from item.grow(part.text, [])
        if piece.finish is not None:
            yield from self._end(piece.finish)

    def _end(self, finish: FinishReason) -> Iterator[Json]:
        if not self._items:  # an answer of no text is one all the same
            self._items.append(_OutputItem.begun_by(Content(""), 0))
            yield from self._items[0].begin()
        if self._due and self._items[-1].takes(Content("")):  # of tokens without a text, such as the one that ends it
            yield from self._items[-1].grow("", self._due)
        self._is_cut = finish is FinishReason.LENGTH
        yield from self._items[-1].end("incomplete" if self._is_cut else "completed")

    def _logprobs(self, piece: TextPiece) -> list[Json]:
        """Entries of the tokens in `piece`, where logprobs were asked for."""
        if not _wants_logprobs(self._fields):
            return []
        pairs = zip(piece.tokens, piece.logprobs, strict=True)
        return logprob_entries(pairs, self._codec.token_label, self._codec.token_bytes)

    def _at_end(self, counted: Counted) -> Json:
        count = counted[0]
        used = 0 if count.report is None else cached_len(count.report)
        usage: Json = {
            "input_tokens": self._job.prompt_len,
            "input_tokens_details": {"cached_tokens": used, "cache_write_tokens": 0},
            "output_tokens": count.num_tokens,
            "output_tokens_details": {"reasoning_tokens": count.num_reasoning},
            "total_tokens": self._job.prompt_len + count.num_tokens,
            **hint_answers(counted),
        }
        cut: Json | None = {"reason": "max_output_tokens"} if self._is_cut else None
        status = "incomplete" if self._is_cut else "completed"
        return self._response(status, incomplete_details=cut, usage=usage)

    def _response(self, status: str, **at_end: object) -> Json:
        """The response as it is now, with what was asked for."""
        fields, sampling = self._fields, self._job.samples[0].generation.sampling
        reasoning = fields.reasoning or ReasoningOptions()
        text = fields.text or ResponseText()
        wanted = text.format and text.format.model_dump(by_alias=True, exclude_none=True)
        return {
            "id": self._job.id,
            "object": "response",
            "created_at": self._job.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "max_tool_calls": fields.max_tool_calls,
            "metadata": fields.metadata or {},
            "model": self._job.model,
            "output": [item.told() for item in self._items],
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": wanted or {"type": "text"}, "verbosity": text.verbosity or "medium"},
            "tool_choice": fields.tool_choice or "auto",
            "tools": fields.tools or [],
            "top_logprobs": fields.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": None,
            **at_end,
        }


class _OutputItem:
    """One item of the output as it grows, and the events of it."""

    def __init__(self, kind: type[AnswerPiece], index: int, call: CallBegins | None) -> None:
        prefix = {Content: "msg_", Reasoning: "rs_", CallBegins: "fc_"}[kind]
        self._kind = kind
        self._call = call
        self._place: Json = {"item_id": new_id(prefix), "output_index": index}
        self._texts: list[str] = []
        self._logprobs: list[Json] = []
        self._status = "in_progress"

    @staticmethod
    def begun_by(part: AnswerPiece, index: int) -> "_OutputItem":
        return _OutputItem(type(part), index, part if isinstance(part, CallBegins) else None)

    def takes(self, part: AnswerPiece) -> bool:
        """Whether `part` is more of this item."""
        if isinstance(part, Arguments):
            return self._call is not None
        return self._call is None and type(part) is self._kind

    def begin(self) -> Iterator[Json]:
        yield {"type": "response.output_item.added", "output_index": self._index, "item": self._body(content=[])}
        if self._call is None:
            yield {"type": "response.content_part.added", **self._within(), "part": self._part("", [])}

    def grow(self, text: str, logprobs: list[Json]) -> Iterator[Json]:
        self._texts.append(text)
        self._logprobs += logprobs
        told: Json = {"logprobs": logprobs} if self._kind is Content else {}
        yield {"type": f"response.{self._event}.delta", **self._within(), "delta": text, **told}

    def end(self, status: str) -> Iterator[Json]:
        self._status = status
        text = "".join(self._texts)
        if self._call is None:
            told: Json = {"logprobs": self._logprobs} if self._kind is Content else {}
            yield {"type": f"response.{self._event}.done", **self._within(), "text": text, **told}
            yield {"type": "response.content_part.done", **self._within(), "part": self._part(text, self._logprobs)}
        else:
            yield {"type": f"response.{self._event}.done", **self._within(), "name": self._call.name, "arguments": text}
        yield {"type": "response.output_item.done", "output_index": self._index, "item": self.told()}

    def told(self) -> Json:
        """The item as it is in a response."""
        return self._body(content=[self._part("".join(self._texts), self._logprobs)])

    @property
    def _index(self) -> object:
        return self._place["output_index"]

    @property
    def _event(self) -> str:
        if self._call is not None:
            return "function_call_arguments"
        return "output_text" if self._kind is Content else "reasoning_text"

    def _within(self) -> Json:
        return {**self._place, **({"content_index": 0} if self._call is None else {})}

    def _part(self, text: str, logprobs: list[Json]) -> Json:
        if self._kind is Reasoning:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _body(self, content: list[Json]) -> Json:
        head: Json = {"id": self._place["item_id"], "status": self._status}
        if self._call is not None:
            arguments = "".join(self._texts)
            named = {"call_id": self._call.id, "name": self._call.name, "arguments": arguments}
            return {**head, "type": "function_call", **named}
        if self._kind is Reasoning:
            return {**head, "type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
        return {**head, "type": "message", "role": "assistant", "content": content}


DIALECT = Dialect(
    "/v1/responses",
    "Answer a conversation of items",
    ResponsesBody,
    _job,
    ResponsesFormat,
    ("input", "chat_template_kwargs"),
)
