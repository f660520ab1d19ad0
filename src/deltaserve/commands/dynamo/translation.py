"""Requests and answers between Dynamo's token pipeline and /v1/completions, pure: Dynamo is not imported.

Dynamo's frontend makes tokens of a prompt and text of tokens, so ids go in and ids come out. What it asks for and a
server cannot do is refused by name: an answer without it would look as if it had been done.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from deltaserve.commands.client.completion_stream import error_in
from deltaserve.core.errors import DeltaserveError

Json = dict[str, Any]

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "include_stop_str_in_output"),
)
"""Fields of `sampling_options` that are called alike here."""
_STOPPING = ("stop", "min_tokens", "ignore_eos")
"""Fields of `stop_conditions` that are called alike here."""
_STOP_IDS = ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")
_GRAMMARS = ("json", "regex", "choice", "grammar", "whitespace_pattern")
"""Fields of `guided_decoding` that `structured_outputs` calls alike."""
_NEUTRAL: Mapping[str, Sequence[object]] = {"n": (1,), "best_of": (1,), "length_penalty": (1,)}
"""Values that ask for nothing, beside False."""
_ANSWERED = {
    "sampling_options": {*_SAMPLING, "guided_decoding"},
    "stop_conditions": {*_STOPPING, *_STOP_IDS, "max_tokens"},
    "output_options": {"logprobs", "skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids"},
    "guided_decoding": {*_GRAMMARS, "backend"},
}
"""Group of fields |-> those that are read, or whose work Dynamo's frontend does."""
_OTHER_INPUTS = ("multi_modal_data", "encoder_result", "prefill_result", "bootstrap_info", "prompt_embeds")
_REASONS = {
    "n": "Dynamo takes the end of the first answer for the end of all",
    "prompt_logprobs": "ask the server itself for those of a prompt",
}
_TOKEN = "token_id:"


class NotSupported(DeltaserveError):
    """What a request asks for that cannot be done; the message names it."""


class BrokenStream(DeltaserveError):
    """The server ended an answer before its end, and may have said why."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What is known of the server before the first request."""

    model: str
    """Its name."""
    model_path: str
    """Where it has the model."""
    context_len: int


def body_of(request: Mapping[str, Any], facts: ServerFacts) -> Json:
    """The body of a streamed POST /v1/completions. Raises NotSupported."""
    _refuse_inputs(request)
    sampling, stopping, output = (_group(request, name) for name in _ANSWERED if name != "guided_decoding")
    grammar = _fields_of("guided_decoding", sampling.get("guided_decoding"))
    prompt = list(request["token_ids"])
    asked, routing = stopping.get("max_tokens"), request.get("routing") or {}
    priority = routing.get("priority")  # of agent_hints, higher first whatever serves
    body: Json = {
        "model": facts.model,
        "prompt": prompt,
        "max_tokens": max(1, facts.context_len - len(prompt)) if asked is None else asked,
        "stop_token_ids": sorted({token for name in _STOP_IDS for token in stopping.get(name) or ()}) or None,
        "structured_outputs": {name: grammar[name] for name in _GRAMMARS if name in grammar} or None,
        "logprobs": output.get("logprobs"),
        "skip_special_tokens": output.get("skip_special_tokens"),
        "cache_salt": routing.get("cache_salt"),
        "priority": None if priority is None else int(priority),
        **{name: sampling.get(name) for name in _SAMPLING},
        **{name: stopping.get(name) for name in _STOPPING},
    }
    given = {name: value for name, value in body.items() if value is not None}
    options = {"stream_options": {"include_usage": True}, "return_token_ids": True, "return_tokens_as_token_ids": True}
    return {**given, "stream": True, **options}


def _refuse_inputs(request: Mapping[str, Any]) -> None:
    for name in _OTHER_INPUTS:
        if request.get(name):
            raise NotSupported(f"{name} is not supported: this worker takes tokens, and does prefill and decode itself")


def _group(request: Mapping[str, Any], name: str) -> Json:
    return _fields_of(name, request.get(name))


def _fields_of(group: str, given: Mapping[str, Any] | None) -> Json:
    """The fields that ask for something. Raises NotSupported for one that is not answered."""
    asked = {name: value for name, value in (given or {}).items() if value is not None}
    for name, value in asked.items():
        if name not in _ANSWERED[group] and value not in (False, *_NEUTRAL.get(name, ())):
            reason = _REASONS.get(name)
            raise NotSupported(f"{name} is not supported by this worker{f': {reason}' if reason else ''}")
    return asked


class Chunks:
    """Turns the events of one streamed completion into Dynamo's chunks.

    The end is held back until the counts have come: Dynamo reads nothing behind it.
    """

    def __init__(self, *, tells_alternatives: bool) -> None:
        """`tells_alternatives`: whether the likeliest other tokens were asked for."""
        self._tells_alternatives = tells_alternatives
        self._end: Json | None = None
        self.is_over = False
        """Whether the end has been handed out."""

    def of(self, event: Mapping[str, Any]) -> Iterator[Json]:
        """What Dynamo is told by one event. Raises BrokenStream for the server's own error."""
        if (said := error_in(event)) is not None:
            raise BrokenStream(said)
        for choice in event.get("choices") or ():
            chunk = self._chunk(choice)
            if choice.get("finish_reason") is not None:
                self._end = chunk | {"finish_reason": choice["finish_reason"]}
            elif chunk["token_ids"]:
                yield chunk
        usage = event.get("usage")
        if usage is not None and self._end is not None:
            self.is_over = True
            yield self._end | {"completion_usage": usage}

    def _chunk(self, choice: Mapping[str, Any]) -> Json:
        tokens = list(choice.get("token_ids") or ())
        told = choice.get("logprobs")
        chunk: Json = {"token_ids": tokens, "index": 0}
        if told and tokens:
            chunk["log_probs"] = list(told["token_logprobs"])
            if self._tells_alternatives:
                chunk["top_logprobs"] = [_ranked(top or {}) for top in told["top_logprobs"]]
        return chunk


def _ranked(top: Mapping[str, float]) -> list[Json]:
    """The likeliest first. Their text is for Dynamo's frontend to make."""
    best = sorted(top.items(), key=lambda pair: -pair[1])
    return [
        {"rank": rank, "token_id": int(label.removeprefix(_TOKEN)), "token": None, "logprob": logprob}
        for rank, (label, logprob) in enumerate(best, 1)
    ]


class Fault(Enum):
    """Kinds of failure that Dynamo tells apart."""

    INVALID = auto()
    """The request is wrong: nobody else would serve it."""
    BUSY = auto()
    LATE = auto()
    AWAY = auto()
    """This worker cannot now: another may be asked, and is, with --migration-limit of its frontend."""
    FAILED = auto()


_FAULTS = {
    **dict.fromkeys((400, 404, 409, 413, 422), Fault.INVALID),
    429: Fault.BUSY,
    **dict.fromkeys((408, 504), Fault.LATE),
    **dict.fromkeys((502, 503), Fault.AWAY),
}


def fault_of(status: int) -> Fault:
    """What an HTTP status of the server means to Dynamo."""
    return _FAULTS.get(status, Fault.FAILED)


def error_text(status: int, content: object) -> str:
    """The server's own words, or its status where it has none in OpenAI's form."""
    error = content.get("error") if isinstance(content, Mapping) else None
    said = error.get("message") if isinstance(error, Mapping) else error
    return str(said)[:500] if said else f"the server answered HTTP {status}"
