"""The server that a worker of Dynamo stands for: what it is, whether it is there, and its answers, by HTTP."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Any

import httpx

from deltaserve.commands.client.completion_stream import ServerError, events
from deltaserve.commands.client.http_client import async_http_client, fault
from deltaserve.commands.dynamo.translation import BrokenStream, Json, ServerFacts, error_text
from deltaserve.core.errors import ConfigError, DeltaserveError

_TIMES = httpx.Timeout(None, connect=5.0)
"""An answer takes as long as it takes: the server has a deadline, and Dynamo's frontend says when nobody waits."""
_PROBE_S = 5.0
_LOOK_S = 1.0
_MOST_MISSED = 3
_MOST_UNHEARD = 12
"""Looks in a row at which nobody answers the call for a connection: a machine that is gone refuses nothing."""


class HttpRefusal(DeltaserveError):
    """The server answered with an error's status; the message is its own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ServerAway(DeltaserveError):
    """There is no connection to the server."""


class AskedServer:
    """One server, over as many connections as there are requests."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """Raises ConfigError for a URL that is none."""
        self.url = url
        self._http = async_http_client(url, _TIMES, headers)

    async def wait(self) -> ServerFacts:
        """What it is, as soon as it is ready. Raises ConfigError where it never will be what is needed."""
        while (reply := await self._model_info()) is None:
            await asyncio.sleep(_LOOK_S)
        if reply.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise ConfigError(f"{self.url}: the server wants a key: --api-key-file FILE")
        try:
            told = reply.json()
            return ServerFacts(str(told["served_model_name"]), str(told["model_path"]), int(told["max_context_len"]))
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{self.url}: no deltaserve is there: GET /model_info does not tell of a model") from None

    async def _model_info(self) -> httpx.Response | None:
        """What it answers once it is ready; None: it is not, or not there."""
        try:
            if (await self._http.get("/readyz", timeout=_PROBE_S)).status_code == httpx.codes.OK:
                return await self._http.get("/model_info", timeout=_PROBE_S)
        except httpx.HTTPError:
            pass
        return None

    async def until_gone(self) -> str:
        """Ends when nobody has listened there for a few looks in a row, and says so.

        A server that listens and is not ready is not gone: its streams wait for a worker, and new requests may try
        another.
        """
        missed, unheard = 0, 0
        while missed < _MOST_MISSED and unheard < _MOST_UNHEARD:
            await asyncio.sleep(_LOOK_S)
            try:
                await self._http.get("/livez", timeout=_PROBE_S)
                missed, unheard = 0, 0
            except httpx.ConnectTimeout:
                unheard += 1
            except httpx.TimeoutException:
                unheard = 0  # it is busy: there is somebody
            except httpx.HTTPError:
                missed += 1
        return f"{self.url}: the server is gone"

    async def stream(self, body: Json) -> AsyncGenerator[Mapping[str, Any], None]:
        """The events of a completion. Leaving it ends the request at the server, too.

        Raises HttpRefusal, ServerAway, BrokenStream.
        """
        began = False
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as reply:
                if reply.status_code != httpx.codes.OK:
                    raise HttpRefusal(reply.status_code, error_text(reply.status_code, await _json_of(reply)))
                began = True
                async for event in events(reply.aiter_bytes()):
                    yield event
        except ServerError as error:
            raise BrokenStream(str(error)) from error
        except httpx.HTTPError as error:
            raise (BrokenStream if began else ServerAway)(fault(self.url, error)) from error

    async def close(self) -> None:
        """No request can be made any more."""
        await self._http.aclose()


async def _json_of(reply: httpx.Response) -> object:
    content: object = None
    with suppress(ValueError):
        content = json.loads(await reply.aread())
    return content
