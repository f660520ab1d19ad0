"""Which field names a request may carry: honoured, refused by name, or ignored and counted."""

import logging
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Annotated, TypeVar

from prometheus_client import Counter
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from deltaserve.server.api_errors import ApiError, invalid, unsupported
from deltaserve.server.field_errors import first_error

_log = logging.getLogger("deltaserve.server")
INTERNAL_PREFIXES = ("bootstrap_", "kv_transfer", "disagg_", "disaggregation_", "page", "ticket", "worker", "_")
_INTERNAL = """
    room rooms attempt peer prefill decode prefill_url decode_url namespace tenant data_parallel_rank
    routed_dp_rank kv_params host port fake_kv
"""
INTERNAL_NAMES = frozenset(_INTERNAL.split())
"""Names of this server's inside. A client that sends one is confused or probing; it is told so."""

_NEVER: Mapping[type, str] = {
    str: """
        suffix chat_template structural_tag custom_logit_processor lora_path stop_regex prompt_embeds function_call
    """,
    list: """
        functions tools documents image_data video_data audio_data images logits_processors input_embeds prompt_embeds
        token_ids_logprob text_token_ids_logprob lora_path lora stop_regex
    """,
    dict: """
        audio prediction web_search_options moderation mm_processor_kwargs lora_request custom_params vllm_xargs
        session_params thinking function_call
    """,
    bool: "continue_final_message echo use_beam_search return_hidden_states thinking",
    int: "truncate_prompt_tokens thinking_budget thinking_token_budget",
}
"""Type |-> fields of that type, whose empty value asks for nothing. There is no empty number."""
_CONSTRAINTS = """
    structured_outputs guided_json guided_regex guided_choice guided_grammar guided_whitespace_pattern json_schema regex
    ebnf grammar
"""
"""What an answer must be, where the endpoint has another field for that or none: a client must not take what comes for
what it asked for."""
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    **{
        name: (None, *(kind() for kind, names in _NEVER.items() if kind is not int and name in names.split()))
        for names in _NEVER.values()
        for name in names.split()
    },
    **dict.fromkeys(_CONSTRAINTS.split(), (None, "")),
    "response_format": (None, "", {"type": "text"}),
    "tool_choice": (None, "", "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "modalities": (None, [], ["text"]),
    "length_penalty": (None, 1, 1.0),
    "early_stopping": (None, False),
    "add_generation_prompt": (None, True),
}
"""Known fields this server does not honour, with the values that ask for nothing."""

_WAYS_OUT = {"functions": "tools", "function_call": "tool_choice"}
"""Field |-> its name today."""

_HINTS = (
    "user safety_identifier prompt_cache_key service_tier verbosity reasoning_effort rid request_id conversation_id"
    " guided_decoding_backend"
)
HINTS = frozenset(_HINTS.split())
"""Short texts that change no answer: by their definition, or where no field of the endpoint has their name."""
MAX_HINT_BYTES = 256
NO_EFFECT: Mapping[str, type] = {
    "store": bool,
    "metadata": dict,
    "priority": int,
    "no_logs": bool,
    "log_metrics": bool,
    "custom_labels": dict,
    "separate_reasoning": bool,
    "stream_reasoning": bool,
    "spaces_between_special_tokens": bool,
}
"""Name |-> the type of its values. Clients send them by habit; no answer depends on them where they are no fields."""
_TOOLS = frozenset({"tools", "tool_choice", "parallel_tool_calls", "functions"})
"""Nothing is asked by them where `tool_choice` is "none"."""
MAX_OTHERS = 128
"""Names in one object that are no fields of ours."""
MAX_FIELD_NAMES = 256
"""Distinct ignored names that are remembered, for one warning each."""
_REMEMBERED_CHARS = 80
"""Characters of each name that are remembered."""

Model = TypeVar("Model", bound=BaseModel)
Item = TypeVar("Item")

Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list whose first bad item ends the reading. pydantic would collect an error for each: a body of 8 MiB held the
interpreter, and with it every other request, for a minute."""


def at_most(limit: int) -> BeforeValidator:
    """Limit the entries of a mapping whose values are checked: too many are refused before the first is looked at."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > limit:
            raise PydanticCustomError("too_long", f"at most {limit} entries are allowed, there are {len(value)}")
        return value

    return BeforeValidator(check)


class Body(BaseModel):
    """A request body: strict types (no "1" for 1, no true for 1), other names kept aside in `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class BodyPart(BaseModel):
    """An object inside a body. Other names are kept aside as well."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class UnknownFields:
    """Counts request fields nobody knows; warns once per name, with the known one it may be meant for."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._warned: set[str] = set()

    def ignore(self, name: str, known: Collection[str]) -> None:
        """`known`: the names that would be known there."""
        if self._is_new(name):
            by_last = {each.rpartition(".")[2]: each for each in known}
            near = get_close_matches(name.rpartition(".")[2][:80], by_last, n=1, cutoff=0.75)
            hint = f"; did the client mean {by_last[near[0]]!r}?" if near else ""
            _log.warning("request field %r is unknown and ignored%s", name[:80], hint)

    def leave_out(self, name: str, reason: str = "the model's chat template does not show it") -> None:
        """A known field that asks for what is not done, without which the request is served."""
        if self._is_new(name):
            _log.warning("request field %r is ignored: %s", name[:80], reason)

    def warn(self, text: str) -> None:
        """Something that is done as it was asked, and seldom meant. Said once."""
        if text not in self._warned:
            self._warned.add(text)
            _log.warning("%s", text)

    def _is_new(self, name: str) -> bool:
        """Counts the field; whether it is to be warned of."""
        self._counter.labels("messages" if name.startswith("messages[]") else "body").inc()
        name = name[:_REMEMBERED_CHARS]  # a name may be as long as a body
        if name in self._warned or len(self._warned) >= MAX_FIELD_NAMES:
            return False
        self._warned.add(name)
        return True


def parse(model: type[Model], raw: Mapping[str, object], unknown: UnknownFields) -> Model:
    """`raw` as `model`. Raises ApiError 400 naming the field. Names nobody knows are ignored, and what they stand for
    is not kept: it may be a whole body, and the answer takes long."""
    known = model.model_fields.keys()
    others = [name for name in raw if name not in known]
    if len(others) > MAX_OTHERS:
        raise ApiError(400, "unknown_parameter", f"{len(others)} unknown fields, at most {MAX_OTHERS} are ignored")
    inner = frozenset(name for name in others if _is_internal(name))
    for name in inner:
        if raw[name] is not None:  # null asks for nothing: proxies write out the defaults of what they forward
            raise ApiError(400, "unknown_parameter", "this field is not part of the public API", name[:80])
    no_tools = raw.get("tool_choice") == "none"
    for name in others:
        if name in inner:
            continue
        if not (no_tools and name in _TOOLS) and not _is_accepted(name, raw[name]):
            unknown.ignore(name, known)
    try:
        return model.model_validate({name: value for name, value in raw.items() if name in known})
    except ValidationError as error:
        raise first_error(error) from error


def _is_internal(name: str) -> bool:
    return name in INTERNAL_NAMES or name.startswith(INTERNAL_PREFIXES)


def _is_accepted(name: str, value: object) -> bool:
    """False for a name nobody knows. Raises for a known one that asks for something we do not do."""
    if name in HINTS:
        if value is not None and not _is_hint(name, value):
            raise invalid(name, f"{name} must be a string of at most {MAX_HINT_BYTES} bytes")
        return True
    if name in NO_EFFECT:
        if value is not None and type(value) is not NO_EFFECT[name]:  # true is an int
            raise invalid(name, f"{name} has the wrong type")
        return True
    if name not in UNSUPPORTED:
        return False
    # True == 1 in Python: compare types as well.
    if not any(type(value) is type(neutral) and value == neutral for neutral in UNSUPPORTED[name]):
        raise unsupported(name, f"{name} is not supported: send {_WAYS_OUT[name]}" if name in _WAYS_OUT else None)
    return True


def _is_hint(name: str, value: object) -> bool:
    """Whether a hint may have this value. Some send a whole record as `user`: its id, name and address."""
    if name == "user" and isinstance(value, dict):
        return True
    return isinstance(value, str) and len(value.encode()) <= MAX_HINT_BYTES
