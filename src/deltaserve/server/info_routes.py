"""The endpoints that generate nothing: models, tokenizer, health, metrics, drain. Each gets the front it is of."""

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import Sequence
from functools import partial

from pydantic import ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from deltaserve import __version__
from deltaserve.control.front.client import Generation, Limits, NameTaken, RoleAnswer, RoleRefused, UnknownWorker
from deltaserve.core.errors import FailReason, RequestFailed
from deltaserve.core.ids import Role, Room
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import pack_u32
from deltaserve.core.wire.messages import CacheUse
from deltaserve.server.api_errors import ApiError, excerpt, from_failure, invalid, not_ready, retry_after
from deltaserve.server.body_fields import Body, Items
from deltaserve.server.chat_messages import ChatMessage
from deltaserve.server.chat_request import (
    ChatRequest,
    TemplateFields,
    chat_tokens,
    prompt_end_options,
    template_options,
)
from deltaserve.server.chat_tools import ToolDefinition, function_tools
from deltaserve.server.front import Front
from deltaserve.server.jobs import Common, check_model
from deltaserve.server.prompts import encode_text, read_ids
from deltaserve.server.read import caller_of
from deltaserve.server.replies import json_reply
from deltaserve.server.text.answers.answer_choice import name_of
from deltaserve.server.tool_use import tool_use
from deltaserve.settings.worker_list import parse_worker

_log = logging.getLogger("deltaserve.server")
_PROBE_S = 20.0
_ROLES = {role.value: role for role in (Role.PREFILL, Role.DECODE)}
_LONGEST_GRACE_S = 3600.0


class TokenizeBody(TemplateFields):
    """Either a raw prompt or a conversation, with what its template is to get."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "Hello"}]})
    model: str | None = None
    prompt: str | None = None
    messages: Items[ChatMessage] | None = None
    tools: Items[ToolDefinition] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """Ids to turn into text."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [1, 2, 3]}]})
    model: str | None = None
    tokens: list[object]
    skip_special_tokens: bool | None = None


class JoinBody(Body):
    """A worker that is to be used."""

    worker: str
    """`role@host:port`, or `name=role@host:port`."""


class LeaveBody(Body):
    """A worker that is to be used no more."""

    worker: str
    """Its name, or the entry that it joined by."""
    grace_s: float | None = None


class RoleBody(Body):
    """Which worker is to do what."""

    worker: str
    role: str
    grace_s: float | None = None


async def models(front: Front, request: Request) -> Response:
    """Serve GET /v1/models."""
    names = front.settings.model_names
    return json_reply({"object": "list", "data": [_model(front, name) for name in names]})


async def model(front: Front, request: Request) -> Response:
    """Serve GET /v1/models/{name}."""
    name, settings = request.path_params["name"], front.settings
    check_model(name, settings)
    return json_reply(_model(front, name if name in settings.other_names else settings.model_name))


async def model_info(front: Front, request: Request) -> Response:
    """Serve GET /model_info."""
    text, limits = front.text, front.engine.limits()
    return json_reply(
        {
            **_names(front),
            "is_generation": True,
            "vocab_size": text.vocab_size,
            "eos_token_ids": list(text.eos_ids),
            "has_chat_template": text.has_chat_template,
            "shows_tools": text.shows_tools,
            "tool_call_parser": name_of(text.answers.calls),
            "reasoning_parser": name_of(text.answers.reasoning),
            "sampling_defaults": dataclasses.asdict(text.defaults),
            "max_context_len": limits.max_context_len if limits else None,
            "max_prompt_len": min(limits.max_prompt_len, limits.max_context_len - 1) if limits else None,
            "version": __version__,
        }
    )


async def tokenize(front: Front, request: Request) -> Response:
    """POST /tokenize. Its work is that of a prompt: it takes a place, as one does."""
    with front.admission.place(caller_of(request).namespace):
        async with front.read(request, TokenizeBody) as body:
            if (body.prompt is None) == (body.messages is None):
                raise invalid("prompt", "give either prompt or messages")
            check_model(body.model, front.settings)
            limits = front.engine.limits()
            tokens = await front.threads.run(lambda: _tokens(body, front, limits))
    reply: dict[str, object] = {
        "count": len(tokens),
        "max_model_len": limits.max_context_len if limits else None,
        "tokens": list(tokens),
    }
    if body.return_token_strs:
        reply["token_strs"] = [front.text.token_label(token) for token in tokens]
    return json_reply(reply)


def _conversation(body: TokenizeBody, messages: Sequence[ChatMessage], front: Front) -> ChatRequest:
    end, given = prompt_end_options(body), body.chat_template_kwargs or {}
    return ChatRequest(
        fields=Common(),
        messages=messages,
        max_tokens=None,
        template_options={**template_options(None, given, "chat_template_kwargs"), **end},
        tools=tool_use(function_tools(body.tools or (), front.unknown_fields)),
        is_open=bool(body.continue_final_message),
    )


def _tokens(body: TokenizeBody, front: Front, limits: Limits | None) -> tuple[int, ...]:
    if body.messages is not None:
        return chat_tokens(_conversation(body, body.messages, front), front.text, limits, front.unknown_fields)
    for name in ("tools", "chat_template_kwargs", "continue_final_message"):
        if getattr(body, name):
            raise invalid(name, f"{name} is only allowed with messages")
    return encode_text(
        body.prompt or "", "prompt", front.text, limits, add_special_tokens=body.add_special_tokens is not False
    )


async def detokenize(front: Front, request: Request) -> Response:
    """Serve POST /detokenize."""
    with front.admission.place(caller_of(request).namespace):
        async with front.read(request, DetokenizeBody) as body:
            check_model(body.model, front.settings)
            limits, given = front.engine.limits(), len(body.tokens)
            if limits is not None and given > limits.max_context_len:
                raise invalid("tokens", f"{given} token ids, allowed are {limits.max_context_len}: the context")
            tokens = read_ids(body.tokens, "tokens", front.text.vocab_size)
        decode = partial(front.text.decode, tokens, skip_special_tokens=bool(body.skip_special_tokens))
        return json_reply({"prompt": await front.threads.run(decode)})


async def livez(front: Front, request: Request) -> Response:
    """GET /livez: event loop, control plane and threads move. Workers are not asked: their lives are their own."""
    complaint = await front.liveness.complaint()
    if complaint is None:
        return json_reply({"status": "live"})
    return json_reply({"status": "not_live", "reason": complaint}, 503)


async def readyz(front: Front, request: Request) -> Response:
    """GET /readyz, /health: whether a request admitted now would be served, and why not."""
    reasons = front.health.reasons()
    if not reasons:
        return json_reply({"status": "ready", "reasons": reasons})
    return json_reply({"status": "not_ready", "reasons": reasons}, 503, retry_after())


async def health_generate(front: Front, request: Request) -> Response:
    """GET /health_generate: one token is generated, past every cache. Costs a prefill: it needs a key."""
    front.health.check()
    half = front.settings.half
    if half is not None and half.role is Role.PREFILL:  # there is nobody here to generate for
        return json_reply({"status": "ready"})
    room, sampling = Room(secrets.token_bytes(16)), SamplingParams(max_tokens=1, seed=0, temperature=0.0)
    namespace = caller_of(request).namespace
    probe = Generation(room, pack_u32((0,)), namespace, sampling, _PROBE_S, CacheUse.BYPASS)
    try:
        async with asyncio.timeout(_PROBE_S):
            async for _ in front.engine.generate(probe):
                pass
    except TimeoutError as error:
        raise from_failure(RequestFailed(FailReason.DEADLINE, "the engine did not answer a probe")) from error
    except RequestFailed as failure:
        raise from_failure(failure) from failure
    return json_reply({"status": "ready"})


async def loads(front: Front, request: Request) -> Response:
    """GET /v1/loads: SGLang's, of the whole cluster as one."""
    admission = front.admission
    load = {"num_running_reqs": admission.num_running, "num_waiting_reqs": admission.num_waiting}
    return json_reply({"loads": [{"dp_rank": 0, **load, "num_total_reqs": sum(load.values())}]})


async def load(front: Front, request: Request) -> Response:
    """GET /get_load: SGLang's older form of the same."""
    admission = front.admission
    counts = {"num_reqs": admission.num_running + admission.num_waiting, "num_waiting_reqs": admission.num_waiting}
    return json_reply([{"dp_rank": 0, **counts, "num_tokens": admission.num_tokens}])


async def version(front: Front, request: Request) -> Response:
    """Serve GET /version."""
    return json_reply({"version": __version__})


async def metrics(front: Front, request: Request) -> Response:
    """Serve GET /metrics."""
    return Response(front.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def server_facts(front: Front, request: Request) -> Response:
    """Serve GET /server_info of the API's listener, where the admin routes have one of their own."""
    return json_reply({"version": __version__, **_names(front)})


async def server_info(front: Front, request: Request) -> Response:
    """Serve GET /server_info of the admin routes."""
    admission, health = front.admission, front.health
    return json_reply(
        {
            "version": __version__,
            **_names(front),
            "requests": admission.num_requests,
            "tokens": admission.num_tokens,
            "draining": health.draining,
            "drained": health.draining and admission.num_requests == 0,
            "engine": front.engine.stats(),
        }
    )


async def drain(front: Front, request: Request) -> Response:
    """POST /admin/drain: refuse new requests, finish those inside. Repeats are harmless."""
    _refuse_browser(request)
    if not front.health.draining:
        _log.warning("draining, as asked by /admin/drain: no new request is taken until this server is restarted")
    front.health.draining = True
    return json_reply({"draining": True, "drained": front.admission.num_requests == 0})


async def change_role(front: Front, request: Request) -> Response:
    """POST /admin/role: a worker drains and takes up another role; its cache stays."""
    _refuse_browser(request)
    async with front.read(request, RoleBody) as body:
        return _change_role(front, body)


def _change_role(front: Front, body: RoleBody) -> Response:
    role = _ROLES.get(body.role)
    if role is None:
        raise invalid("role", f"{excerpt(body.role)} is none of {', '.join(_ROLES)}")
    grace_s = _grace_s(front, body.grace_s)
    try:
        answer = front.engine.change_role(body.worker, role, grace_s)
    except UnknownWorker as error:
        raise ApiError(404, "not_found", str(error), "worker") from error
    except RoleRefused as error:
        raise ApiError(409, "role_refused", str(error)) from error
    is_changing = answer is RoleAnswer.CHANGING
    if is_changing:
        _log.info("%s becomes a %s worker, as asked by /admin/role", body.worker[:80], role.value)
    reply = {"worker": body.worker, "role": role.value, "changing": is_changing}
    return json_reply(reply, 202 if is_changing else 200)


def _grace_s(front: Front, asked: float | None) -> float:
    grace_s = front.settings.grace_s if asked is None else asked
    if not 0 <= grace_s <= _LONGEST_GRACE_S:  # nor NaN
        raise invalid("grace_s", f"expected 0 to {_LONGEST_GRACE_S:g} seconds")
    return grace_s


async def workers(front: Front, request: Request) -> Response:
    """GET /admin/workers: every worker that this front knows, where it listens, and whether it is used."""
    return json_reply({"workers": front.engine.stats().workers})


async def join_worker(front: Front, request: Request) -> Response:
    """POST /admin/workers/join: a worker is used as soon as it answers. Repeats are harmless."""
    _refuse_browser(request)
    async with front.read(request, JoinBody) as body:
        try:
            entry = parse_worker(body.worker)
        except ValueError as error:
            raise invalid("worker", str(error)) from error
        try:
            front.engine.add_worker(entry.name, entry.role, entry.url)
        except RoleRefused as error:
            raise ApiError(409, "role_refused", str(error)) from error
        except NameTaken as error:
            raise ApiError(409, "name_taken", str(error), "worker") from error
        return json_reply({"worker": entry.name, "role": entry.role.value, "url": entry.url}, 202)


async def remove_worker(front: Front, request: Request) -> Response:
    """POST /admin/workers/leave: a worker gets no new requests, and is forgotten when it has none."""
    _refuse_browser(request)
    async with front.read(request, LeaveBody) as body:
        name, was_missing = _name_of(body.worker), front.engine.ready()
        try:
            front.engine.remove_worker(name, _grace_s(front, body.grace_s))
        except UnknownWorker as error:
            raise ApiError(404, "not_found", str(error), "worker") from error
        missing = front.engine.ready()
        warning = {} if missing is None or was_missing else {"warning": f"nothing can be served without it: {missing}"}
        return json_reply({"worker": name, "leaving": True, **warning}, 202)


def _name_of(worker: str) -> str:
    """The name of a worker that is given by it, or by an entry of a list."""
    try:
        return parse_worker(worker).name
    except ValueError:
        return worker


async def flush_cache(front: Front, request: Request) -> Response:
    """POST /flush_cache: every worker drops the pages that no request holds."""
    _refuse_browser(request)
    evictable = front.engine.flush_cache()
    if not evictable:
        raise not_ready("no worker is there")
    return json_reply({"flushing": True, "evictable_pages": evictable}, 202)


def _names(front: Front) -> dict[str, object]:
    """What the model is called, and where it is: what routers of other projects read before they send anything."""
    name = front.settings.model_name
    path, *_ = (*front.settings.model_paths, name)
    paths = {"model_path": path, "tokenizer_path": path}
    return {"model": name, "served_model_name": name, **paths, **_half(front)}


def _half(front: Front) -> dict[str, object]:
    """What routers read of a worker of a pair."""
    half = front.settings.half
    if half is None:
        return {}
    sizes = {"tp_size": half.tp_size, "dp_size": 1, "max_running_requests": half.max_running}
    return {"disaggregation_mode": half.role.value, "disaggregation_bootstrap_port": half.port, **sizes}


def _model(front: Front, name: str) -> dict[str, object]:
    limits = front.engine.limits()
    return {
        "id": name,
        "object": "model",
        "created": front.created,
        # smg goes by this word: by it a pair is sent halves, and else vLLM's fields.
        "owned_by": "deltaserve" if front.settings.half is None else "sglang",
        "root": (*front.settings.model_paths, front.settings.model_name)[0],
        "max_model_len": limits.max_context_len if limits else None,
    }


def _refuse_browser(request: Request) -> None:
    """A page of another origin must not operate the server. Raises ApiError 403."""
    if "origin" in request.headers:
        raise ApiError(403, "forbidden", "admin calls from a browser are refused")
