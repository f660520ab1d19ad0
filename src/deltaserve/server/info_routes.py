"""The endpoints that generate nothing: models, tokenizer, health, metrics, drain."""

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from deltaserve import __version__
from deltaserve.base.errors import FailReason, RequestFailed
from deltaserve.base.ids import Role, Room
from deltaserve.base.sampling import SamplingParams
from deltaserve.base.tokens import pack_u32
from deltaserve.request.client import Generation, RoleAnswer, RoleRefused, UnknownWorker
from deltaserve.server.api_errors import ApiError, excerpt, from_failure, invalid, not_ready, retry_after
from deltaserve.server.body_fields import Body, Items, parse
from deltaserve.server.caller import caller_of
from deltaserve.server.chat import ChatMessage, encode_messages, template_messages
from deltaserve.server.completions import check_length, read_ids
from deltaserve.server.front import Front
from deltaserve.server.jobs import check_model
from deltaserve.server.read import in_thread_if, read_object
from deltaserve.server.replies import json_reply
from deltaserve.wire.messages import CacheUse

_log = logging.getLogger("deltaserve.server")
_PROBE_S = 20.0
_ROLES = {role.value: role for role in (Role.PREFILL, Role.DECODE)}
_LONGEST_GRACE_S = 3600.0


class TokenizeBody(Body):
    """Either a raw prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """Ids to turn into text."""

    model: str | None = None
    tokens: list[object]
    skip_special_tokens: bool | None = None


class RoleBody(Body):
    """Which worker is to do what."""

    worker: str
    role: str
    grace_s: float | None = None


@dataclass(slots=True)
class InfoRoutes:
    """Handlers over one front."""

    front: Front
    _created: int = field(default_factory=lambda: int(time.time()))

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        return json_reply({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}"""
        check_model(request.path_params["name"], self.front.settings)
        return json_reply(self._model())

    async def model_info(self, request: Request) -> Response:
        """GET /model_info"""
        settings, text, limits = self.front.settings, self.front.text, self.front.engine.limits()
        return json_reply(
            {
                "model": settings.model_name,
                "served_model_name": settings.model_name,
                "model_path": settings.model_path or settings.model_name,
                "tokenizer_path": settings.model_path or settings.model_name,
                "is_generation": True,
                "vocab_size": text.vocab_size,
                "eos_token_ids": list(text.eos_ids),
                "has_chat_template": text.has_chat_template,
                "max_context_len": limits.max_context_len if limits else None,
                "max_prompt_len": min(limits.max_prompt_len, limits.max_context_len - 1) if limits else None,
                "version": __version__,
            }
        )

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize. Its work is that of a prompt: it takes a place, as one does."""
        with self.front.admission.passing(caller_of(request).namespace):
            return await self._tokenize(request)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize"""
        with self.front.admission.passing(caller_of(request).namespace):
            return await self._detokenize(request)

    async def _tokenize(self, request: Request) -> Response:
        body = parse(TokenizeBody, await self._object(request), self.front.ignore_field)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        check_model(body.model, self.front.settings)
        text, limits = self.front.text, self.front.engine.limits()
        if body.messages is not None:
            messages = template_messages(body.messages, limits)
            tokens = await in_thread_if(True, lambda: encode_messages(messages, {}, text, limits))
        else:
            prompt, add = body.prompt or "", body.add_special_tokens is not False
            if limits is not None:
                check_length(prompt, "prompt", text, limits)
            tokens = await in_thread_if(True, lambda: text.encode(prompt, add_special_tokens=add))
        reply: dict[str, object] = {
            "count": len(tokens),
            "max_model_len": limits.max_context_len if limits else None,
            "tokens": list(tokens),
        }
        if body.return_token_strs:
            reply["token_strs"] = [text.token_label(token) for token in tokens]
        return json_reply(reply)

    async def _detokenize(self, request: Request) -> Response:
        body = parse(DetokenizeBody, await self._object(request), self.front.ignore_field)
        check_model(body.model, self.front.settings)
        text = self.front.text
        tokens = read_ids(body.tokens, "tokens", text.vocab_size)
        skip = bool(body.skip_special_tokens)
        return json_reply({"prompt": await in_thread_if(True, lambda: text.decode(tokens, skip_special_tokens=skip))})

    async def livez(self, request: Request) -> Response:
        """GET /livez: event loop, control plane and threads move. Workers are not asked: their lives are their own."""
        complaint = await self.front.liveness.complaint()
        if complaint is None:
            return json_reply({"status": "live"})
        return json_reply({"status": "not_live", "reason": complaint}, 503)

    async def readyz(self, request: Request) -> Response:
        """GET /readyz, /health: whether a request admitted now would be served, and why not."""
        reasons = self.front.health.reasons()
        if not reasons:
            return json_reply({"status": "ready", "reasons": reasons})
        return json_reply({"status": "not_ready", "reasons": reasons}, 503, retry_after())

    async def health_generate(self, request: Request) -> Response:
        """GET /health_generate: one token is generated, past every cache. Costs a prefill: it needs a key."""
        self.front.health.check()
        room, sampling = Room(secrets.token_bytes(16)), SamplingParams(max_tokens=1, seed=0, temperature=0.0)
        namespace = caller_of(request).namespace
        probe = Generation(room, pack_u32((0,)), namespace, sampling, _PROBE_S, CacheUse.BYPASS)
        try:
            async with asyncio.timeout(_PROBE_S):
                async for _ in self.front.engine.generate(probe):
                    pass
        except TimeoutError as error:
            raise from_failure(RequestFailed(FailReason.DEADLINE, "the engine did not answer a probe")) from error
        except RequestFailed as failure:
            raise from_failure(failure) from failure
        return json_reply({"status": "ready"})

    async def loads(self, request: Request) -> Response:
        """GET /v1/loads: SGLang's, of the whole cluster as one."""
        admission = self.front.admission
        load = {"num_running_reqs": admission.num_running, "num_waiting_reqs": admission.num_waiting}
        return json_reply({"loads": [{"dp_rank": 0, **load, "num_total_reqs": sum(load.values())}]})

    async def version(self, request: Request) -> Response:
        """GET /version"""
        return json_reply({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics"""
        return Response(self.front.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def server_info(self, request: Request) -> Response:
        """GET /server_info"""
        admission, health = self.front.admission, self.front.health
        return json_reply(
            {
                "version": __version__,
                "model": self.front.settings.model_name,
                "requests": admission.num_requests,
                "tokens": admission.num_tokens,
                "draining": health.draining,
                "drained": health.draining and admission.num_requests == 0,
                "engine": self.front.engine.stats(),
            }
        )

    async def drain(self, request: Request) -> Response:
        """POST /admin/drain: refuse new requests, finish those inside. Repeats are harmless."""
        _refuse_browser(request)
        if not self.front.health.draining:
            _log.warning("draining, as asked by /admin/drain: no new request is taken until this server is restarted")
        self.front.health.draining = True
        return json_reply({"draining": True, "drained": self.front.admission.num_requests == 0})

    async def change_role(self, request: Request) -> Response:
        """POST /admin/role: a worker drains and takes up another role; its cache stays."""
        _refuse_browser(request)
        body = parse(RoleBody, await self._object(request), self.front.ignore_field)
        role = _ROLES.get(body.role)
        if role is None:
            raise invalid("role", f"{excerpt(body.role)} is none of {', '.join(_ROLES)}")
        grace_s = self.front.settings.grace_s if body.grace_s is None else body.grace_s
        if not 0 <= grace_s <= _LONGEST_GRACE_S:  # nor NaN
            raise invalid("grace_s", f"expected 0 to {_LONGEST_GRACE_S:g} seconds")
        try:
            answer = self.front.engine.change_role(body.worker, role, grace_s)
        except UnknownWorker as error:
            raise ApiError(404, "not_found", str(error), "worker") from error
        except RoleRefused as error:
            raise ApiError(409, "role_refused", str(error)) from error
        is_changing = answer is RoleAnswer.CHANGING
        if is_changing:
            _log.warning("%s becomes a %s worker, as asked by /admin/role", body.worker[:80], role.value)
        reply = {"worker": body.worker, "role": role.value, "changing": is_changing}
        return json_reply(reply, 202 if is_changing else 200)

    async def flush_cache(self, request: Request) -> Response:
        """POST /flush_cache: every worker drops the pages that no request holds."""
        _refuse_browser(request)
        evictable = self.front.engine.flush_cache()
        if not evictable:
            raise not_ready("no worker is there")
        return json_reply({"flushing": True, "evictable_pages": evictable}, 202)

    async def past_request(self, request: Request) -> Response:
        """GET /admin/requests/{id}: where a recent request's time went."""
        line = self.front.recorder.find(request.path_params["id"])
        if line is None:
            raise ApiError(404, "not_found", "no recent request has this id")
        return json_reply(line)

    async def _object(self, request: Request) -> dict[str, object]:
        return await read_object(request, self.front.bodies)

    def _model(self) -> dict[str, object]:
        limits = self.front.engine.limits()
        return {
            "id": self.front.settings.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "deltaserve",
            "root": self.front.settings.model_path or self.front.settings.model_name,
            "max_model_len": limits.max_context_len if limits else None,
        }


def _refuse_browser(request: Request) -> None:
    """A page of another origin must not operate the server. Raises ApiError 403."""
    if "origin" in request.headers:
        raise ApiError(403, "forbidden", "admin calls from a browser are refused")
