"""One chat request in nobody's words: what every dialect of chats translates its body to, and the job of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from deltaserve.control.front.client import Limits
from deltaserve.server.api_errors import ApiError, invalid, unsupported
from deltaserve.server.body_fields import Body, UnknownFields, at_most
from deltaserve.server.chat_messages import ChatMessage, encode_messages
from deltaserve.server.jobs import Asker, Common, Job, OutputLimit, compose
from deltaserve.server.prompts import KeptTokens, Prompt, limits_to_cut, num_kept
from deltaserve.server.sampling_fields import EndpointFields
from deltaserve.server.structured_output import Constraint, PartSchema, constraint_of
from deltaserve.server.text.answers.answer_grammar import AnswerShape, Calls, answer_grammar, can_bound
from deltaserve.server.text.answers.answer_reader import AnswerReading, PromptEnd, ShowReasoning
from deltaserve.server.text.answers.answer_syntax import AnswerSyntax
from deltaserve.server.text.answers.call_grammar import GrammarTooLarge, loosened
from deltaserve.server.text.sample_text import TextOptions
from deltaserve.server.text.text_codec import TextCodec
from deltaserve.server.thinking import ReasoningLimit
from deltaserve.server.tool_use import CallMode, ToolUse

RESERVED_OPTIONS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "namespace", "range"}
)
MAX_OPTIONS = 16
TemplateKwargs = Annotated[dict[str, str | bool | int | float | None], at_most(MAX_OPTIONS)]
"""What a client hands to the template."""


class TemplateFields(Body):
    """How a conversation is handed to the template, in vLLM's names."""

    chat_template_kwargs: TemplateKwargs | None = None
    continue_final_message: bool | None = None
    """The answer goes on with the last message, which is the assistant's."""
    add_generation_prompt: bool | None = None
    """False leaves out what the template writes where an answer begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A conversation to go on with, and how."""

    fields: Common
    """Sampling, samples, streaming, salts and stop strings, under OpenAI's names."""
    messages: Sequence[ChatMessage]
    max_tokens: int | None
    """Most output tokens, as asked."""
    max_tokens_param: str = "max_tokens"
    """The client's name of it, for errors."""
    logprobs: int | None = None
    """Likeliest tokens told beside each; None: no logprobs."""
    template_options: Mapping[str, object] = field(default_factory=dict)
    """Made by `template_options`."""
    tools: ToolUse = field(default_factory=ToolUse)
    """Made by `tool_use.tool_use`."""
    most_reasoning: ReasoningLimit | None = None
    """None: the model reasons as long as it likes."""
    tells_reasoning: bool = True
    """Whether reasoning is told apart; otherwise it stays in the content with its markers."""
    shown: ShowReasoning = ShowReasoning.AS_IT_COMES
    is_open: bool = False
    """The last message is the assistant's, and gone on with."""
    kept: KeptTokens = None
    """Tokens of the conversation as the model reads it that are taken."""


def template_options(effort: str | None, options: Mapping[str, object], param: str) -> Mapping[str, object]:
    """What a template gets beside messages and tools. `options`: switches of the template (`enable_thinking`), never
    names it gets from us. Raises ApiError 400 naming `param`.

    `effort`: what templates call `reasoning_effort`; those of hybrid models have a switch, which "none" turns off.
    """
    for name in options:
        if name in RESERVED_OPTIONS or name.endswith("_token") or not name.isidentifier() or name.startswith("_"):
            raise invalid(param, "an entry has a reserved name or is not an identifier")
    if not effort:
        return options
    off = {"enable_thinking": False, "thinking": False} if effort == "none" else {}
    return {"reasoning_effort": effort, **off, **options}


def prompt_end_options(fields: TemplateFields) -> Mapping[str, object]:
    """What the template gets of how the prompt ends. Raises ApiError 400 where it would end in two ways."""
    if fields.continue_final_message and fields.add_generation_prompt:
        raise invalid("add_generation_prompt", "continue_final_message goes on with a message: no other one begins")
    return {"add_generation_prompt": False} if fields.add_generation_prompt is False else {}


def chat_job(request: ChatRequest, asker: Asker, job_id: str) -> Job:
    """Validate everything that needs the tokenizer or the limits. Raises ApiError 400."""
    param, default = request.max_tokens_param, asker.settings.default_max_tokens
    limit = OutputLimit(asker.limits, "messages", param, request.max_tokens, default)
    kept = num_kept(request.kept, limit.longest_prompt)
    prompt = chat_prompt(request, replace(asker, limits=limits_to_cut(asker.limits, kept))).cut(kept)
    asked = EndpointFields(limit.resolve(prompt), request.logprobs, request.fields.prompt_logprobs)
    constraint = _constraint(request, asker, prompt, asked.max_tokens)
    job = compose(request.fields, asker, [prompt], [asked], job_id, constraint)
    return replace(job, text=_text_options(job.text, request, asker.codec, prompt))


def chat_prompt(request: ChatRequest, asker: Asker) -> Prompt:
    """The conversation as the model reads it. Raises ApiError 400."""
    return Prompt(chat_tokens(request, asker.codec, asker.limits, asker.unknown_fields))


def chat_tokens(
    request: ChatRequest, codec: TextCodec, limits: Limits | None, unknown: UnknownFields
) -> tuple[int, ...]:
    """The same as ids. `limits`: None while no worker is there. Raises ApiError 400."""
    tools = request.tools
    _check_tools(tools, codec)
    shown = [tool.as_template_takes_it() for tool in tools.tools] if codec.shows_tools else []
    options = {**request.template_options, **({"tools": shown} if shown else {})}
    return encode_messages(request.messages, options, codec, limits, unknown, is_open=request.is_open)


def _check_tools(tools: ToolUse, codec: TextCodec) -> None:
    """What cannot be done is refused, and never left out in silence."""
    if tools.mode is CallMode.NONE:
        return
    if not codec.shows_tools:
        way_out = 'leave them out, send tool_choice "none", or serve a model whose template shows them'
        raise ApiError(400, "unsupported", f"the model's chat template does not show tools: {way_out}", "tools")
    if codec.answers.calls is None:
        way_out = 'send tool_choice "none", or start the server with --tool-call-parser NAME'
        text = f"it is not known how this model writes calls (no format reads its template's): {way_out}"
        raise ApiError(400, "unsupported", text, "tools")


def _constraint(request: ChatRequest, asker: Asker, prompt: Prompt, max_tokens: int) -> Constraint | None:
    """What the answer must be: calls that are required, or are strict; the content that the request asks for; reasoning
    before either, no longer than it may be. Raises ApiError 400 where it cannot be had."""
    codec, tools, answers = asker.codec, request.tools, asker.codec.answers
    own = _content_constraint(request, asker)
    calls = _calls(tools, own)
    prompt_end = _prompt_end(answers.reasoning, request, codec, prompt)
    limit = _limit(request, codec, prompt_end, max_tokens)
    if calls is Calls.NONE and limit is None and (own is None or answers.reasoning is None):
        return own
    shape = AnswerShape(
        calls=calls,
        tools={} if tools.mode is CallMode.NONE else _schemas(tools),
        several=tools.is_parallel,
        content=None if own is None else own.grammar,
        prompt_end=prompt_end,
        most_reasoning=None if limit is None else limit.tokens,
    )
    asked = "tool_choice" if calls is Calls.MUST else "tools" if calls is Calls.MAY or limit is None else limit.param
    param = own.param if own is not None else asked
    try:
        grammar = answer_grammar(shape, answers.calls, answers.reasoning, codec.marker_tokens)
    except GrammarTooLarge as error:
        raise invalid(param, f"{param} makes {error}, as many are allowed") from error
    if grammar is not None:
        return Constraint(param, grammar, _client_schemas(tools) if calls is not Calls.NONE else ())
    if calls is Calls.MUST:
        raise unsupported(param, 'calls in the format of this model cannot be forced: send tool_choice "auto"')
    raise unsupported(param, f"{param} beside tools is not possible in the format of this model: send one of them")


def _content_constraint(request: ChatRequest, asker: Asker) -> Constraint | None:
    """What the content must be. Beside a call that is required, `response_format` is that of the answer behind the
    calls: agents send both with every turn. Raises ApiError 400 for other fields there."""
    own = constraint_of(request.fields)
    if own is None or request.tools.mode is not CallMode.REQUIRED:
        return own
    if not own.param.startswith("response_format"):
        raise invalid(own.param, f"tool_choice asks for a call, and {own.param} for a text: give one of them")
    asker.unknown_fields.leave_out("response_format", "tool_choice asks for a call, and the format is that of a text")
    return None


def _limit(request: ChatRequest, codec: TextCodec, prompt_end: PromptEnd, max_tokens: int) -> ReasoningLimit | None:
    """The limit of reasoning, where there may be more. Raises ApiError 400 where it cannot be held."""
    limit, reasoning = request.most_reasoning, codec.answers.reasoning
    if limit is None or reasoning is None or prompt_end is PromptEnd.BEHIND:
        return None
    if limit.tokens >= max_tokens - 1:  # with the marker that ends it nothing is left: agents send such limits
        return None
    if not can_bound(reasoning, codec.marker_tokens):
        text = "the marker that ends this model's reasoning is no token of its vocabulary: how long it reasons is its"
        raise unsupported(limit.param, f"{text} own choice, so leave {limit.param} out")
    return limit


def _calls(tools: ToolUse, own: Constraint | None) -> Calls:
    """A call that nobody relies on is not constrained: rows with a grammar cost more."""
    if tools.mode is CallMode.REQUIRED:
        return Calls.MUST
    is_strict = any(tool.is_strict and tool.name in tools.allowed for tool in tools.tools)
    is_bound = own is not None or is_strict or not tools.is_parallel
    return Calls.MAY if tools.mode is CallMode.AUTO and is_bound else Calls.NONE


def _schemas(tools: ToolUse) -> Mapping[str, Mapping[str, object]]:
    """Schemas as arguments must satisfy them: whole where the client asked for it, and always of an object."""
    strict = {tool.name for tool in tools.tools if tool.is_strict}
    asked = {name: schema if name in strict else loosened(schema) for name, schema in tools.callable.items()}
    return {name: {**schema, "type": "object"} for name, schema in asked.items()}


def _client_schemas(tools: ToolUse) -> Sequence[PartSchema]:
    """Schemas that are followed whole."""
    return [
        PartSchema(
            f"tools[{index}].function.parameters", f"the tool {tool.name}", {**tool.parameters, "type": "object"}
        )
        for index, tool in enumerate(tools.tools)
        if tool.is_strict and tool.parameters is not None and tool.name in tools.allowed
    ]


def _text_options(text: TextOptions, request: ChatRequest, codec: TextCodec, prompt: Prompt) -> TextOptions:
    """A client that wants to see control tokens gets reasoning as the model wrote it."""
    answers = codec.answers
    reasoning = answers.reasoning if request.tells_reasoning and text.skips_special_tokens else None
    if not request.tells_reasoning and _has_control(answers.reasoning, codec):
        text = replace(text, skips_special_tokens=False)
    calls = answers.calls if request.tools.callable else None
    if calls is None and reasoning is None:
        return text
    reading = AnswerReading(
        spelling=answers.spelling,
        new_call_id=codec.new_call_id,
        calls=calls,
        tools=request.tools.callable,
        reasoning=reasoning,
        shown=request.shown,
        prompt_end=_prompt_end(reasoning, request, codec, prompt),
    )
    return replace(text, reading=reading)


def _has_control(reasoning: AnswerSyntax | None, codec: TextCodec) -> bool:
    """Whether markers are control tokens, which a text would not show."""
    return reasoning is not None and any(marker in codec.control_ids for marker in reasoning.markers)


def _prompt_end(reasoning: AnswerSyntax | None, request: ChatRequest, codec: TextCodec, prompt: Prompt) -> PromptEnd:
    """A message that is gone on with has reasoned, unless it is about to."""
    thinking = None if reasoning is None else reasoning.thinking
    if thinking is None:
        return PromptEnd.BEFORE
    begun = request.messages[-1].content if request.is_open else None
    if not isinstance(begun, str) or not begun.strip():
        return codec.prompt_end(prompt.tokens, thinking)
    _, marker, rest = begun.rpartition(thinking.begin)
    return PromptEnd.INSIDE if marker and thinking.end not in rest else PromptEnd.BEHIND
