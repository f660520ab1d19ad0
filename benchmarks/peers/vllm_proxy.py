"""In front of two vLLM engines: one computes prompts, the other pulls their KV and goes on. Runs in vLLM's environment.

python vllm_proxy.py --port PORT --prefill URL --decode URL
"""

import argparse
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web

NOWHERE = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
"""Fields of the transfer that prefill fills in."""
TIMEOUT_S = 1200.0


class Proxy:
    """Both engines, with a connection for each request."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill, self._decode = prefill, decode
        self._session: Any = None

    async def connect(self, app: web.Application) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), connector=connector)
        yield
        await self._session.close()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        headers = {"X-Request-Id": uuid.uuid4().hex}
        async with self._session.post(self._prefill + request.path, json=prompt_only(body), headers=headers) as reply:
            text = await reply.text()
            if reply.status != 200:
                return web.Response(status=reply.status, text=text)
        body["kv_transfer_params"] = json.loads(text)["kv_transfer_params"]
        async with self._session.post(self._decode + request.path, json=body, headers=headers) as reply:
            answer = web.StreamResponse(status=reply.status, headers={"Content-Type": reply.content_type})
            await answer.prepare(request)
            async for piece in reply.content.iter_any():
                await answer.write(piece)
            await answer.write_eof()
            return answer

    async def models(self, request: web.Request) -> web.Response:
        async with self._session.get(self._decode + request.path) as reply:
            return web.Response(status=reply.status, text=await reply.text(), content_type=reply.content_type)


def prompt_only(body: dict[str, Any]) -> dict[str, Any]:
    """The request that prefill gets: one token, and its KV is kept for whoever comes for it."""
    transfer: dict[str, object] = {"do_remote_decode": True, "do_remote_prefill": False}
    kept = {name: value for name, value in body.items() if name not in ("stream_options", "max_completion_tokens")}
    return {**kept, "max_tokens": 1, "stream": False, "kv_transfer_params": transfer | dict.fromkeys(NOWHERE)}


async def healthy(request: web.Request) -> web.Response:
    return web.Response(text="ok")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", required=True, metavar="URL")
    parser.add_argument("--decode", required=True, metavar="URL")
    args = parser.parse_args()
    proxy = Proxy(args.prefill, args.decode)
    app = web.Application(client_max_size=1 << 26)
    app.cleanup_ctx.append(proxy.connect)
    routes = [web.get("/health", healthy), web.get("/v1/models", proxy.models)]
    app.add_routes([*routes, web.post("/v1/completions", proxy.complete)])
    web.run_app(app, host="127.0.0.1", port=args.port, print=None)


if __name__ == "__main__":
    main()
