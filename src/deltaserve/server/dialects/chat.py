"""OpenAI's chat completions."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

from pydantic import ConfigDict, Field

from deltaserve.server.api_errors import Json, invalid
from deltaserve.server.body_fields import Items, at_most
from deltaserve.server.chat_messages import ChatMessage, encode_messages
from deltaserve.server.dialect import Dialect
from deltaserve.server.jobs import Asker, Common, Job, OutputLimit, Sample, check_model, compose, new_id
from deltaserve.server.openai_format import OpenAiFormat
from deltaserve.server.prompts import Prompt
from deltaserve.server.sampling_fields import MAX_LOGPROBS, EndpointFields
from deltaserve.server.text.answer_channels import Channels
from deltaserve.server.text.sample_text import TextOptions, TextPiece
from deltaserve.server.text.text_codec import TextCodec
from deltaserve.server.usage import finite

RESERVED_OPTIONS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "namespace", "range"}
)
MAX_OPTIONS = 16


class ChatBody(Common):
    """OpenAI's fields plus extensions."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}]}
    )
    messages: Items[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    separate_reasoning: bool | None = None
    """SGLang's: false leaves an answer that came in channels as it came, markers and all."""
    include_reasoning: bool | None = None
    """vLLM's: false leaves reasoning out."""
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
    prompt = Prompt(encode_messages(body.messages, options, asker.codec, asker.limits, asker.unknown_fields))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    asked = EndpointFields(limit.resolve(prompt), logprobs, body.prompt_logprobs)
    job = compose(body, asker, [prompt], [asked], new_id("chatcmpl-"))
    return replace(job, text=_in_channels(job.text, asker.codec.channels, body))


def _in_channels(text: TextOptions, channels: Channels | None, body: ChatBody) -> TextOptions:
    """Channels of the answer; a client that wants to see control tokens gets it as the model wrote it."""
    if channels is None or not text.skips_special_tokens:
        return text
    if body.separate_reasoning is False:
        return replace(text, skips_special_tokens=False)
    return replace(text, channels=channels)


def _effort(effort: str | None) -> Mapping[str, object]:
    """What templates call it; those of hybrid models have a switch, which "none" turns off."""
    if not effort:
        return {}
    return {"reasoning_effort": effort, **({"enable_thinking": False, "thinking": False} if effort == "none" else {})}


def _options(options: Mapping[str, object]) -> Mapping[str, object]:
    """Switches of the template (`enable_thinking`), never the names it gets from us."""
    for name in options:
        if name in RESERVED_OPTIONS or name.endswith("_token") or not name.isidentifier() or name.startswith("_"):
            raise invalid("chat_template_kwargs", "an entry has a reserved name or is not an identifier")
    return options


class ChatFormat(OpenAiFormat):
    """Choices with a message or its deltas, and logprobs as a list of entries."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_at_root = True

    def __init__(self, codec: TextCodec, job: Job, fields: ChatBody) -> None:
        super().__init__(codec, job, fields)
        self._shows_reasoning = fields.include_reasoning is not False

    def message(self, sample: Sample, piece: TextPiece) -> Json:
        return {"message": {"role": "assistant", "content": piece.text, **self._reasoning(piece), "refusal": None}}

    def delta(self, sample: Sample, piece: TextPiece, *, is_first: bool) -> Json:
        role = {"role": "assistant"} if is_first else {}
        content = {"content": piece.text} if is_first or piece.text else {}
        return {"delta": {**role, **content, **self._reasoning(piece)}}

    def _reasoning(self, piece: TextPiece) -> Json:
        """The reasoning, named as DeepSeek's API, SGLang and vLLM named it; later versions of vLLM say `reasoning`."""
        return {"reasoning_content": piece.reasoning} if piece.reasoning and self._shows_reasoning else {}

    def logprobs(self, sample: Sample, piece: TextPiece, *, is_first: bool) -> Json:
        entries = [
            self._entry(token, value.logprob) | {"top_logprobs": [self._entry(*pair) for pair in value.top]}
            for token, value in zip(piece.tokens, piece.logprobs, strict=True)
        ]
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        return {
            "token": self._label(token),
            "logprob": finite(logprob),
            "bytes": list(self._codec.token_bytes(token)),
        }


DIALECT = Dialect(
    "/v1/chat/completions",
    "Continue a conversation",
    ChatBody,
    chat_job,
    ChatFormat,
    ("messages", "chat_template_kwargs"),
)
