"""Serve with whatever sources are on the path, ask, print as JSON: `python -m tests.server.try_dialects FOLDER [PATH]`.

Without a path: path -> status of each body's example. With one, of `named_events.py`: what came back in each case.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx

from deltaserve.core.errors import FailReason, RequestFailed
from deltaserve.core.ids import Namespace
from deltaserve.server.settings import ApiKey, ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.patience import PATIENCE_S
from tests.server.conftest import MODEL, live
from tests.server.oracle import OracleEngine

KEY = "k" * 40
OPEN = ServerSettings(MODEL, port=0)
KEYED = ServerSettings(MODEL, port=0, admin_port=0, api_keys=(ApiKey(KEY, Namespace("team")),))


def named(text: str) -> list[list[Any]]:
    """(name, JSON) of the events of a complete stream."""
    *parts, rest = text.split("\n\n")
    assert rest == ""
    lines = [part.split("\n") for part in parts]
    return [[name.removeprefix("event: "), json.loads(data.removeprefix("data: "))] for name, data in lines]


async def statuses(codec: TextCodec) -> dict[str, int]:
    async with (
        live(codec, OracleEngine(), OPEN) as case,
        httpx.AsyncClient(base_url=case.url, timeout=PATIENCE_S) as client,
    ):
        described = (await client.get("/openapi.json")).json()
        found = {}
        for path, methods in described["paths"].items():
            if "text/event-stream" in methods.get("post", methods.get("get"))["responses"]["200"]["content"]:
                name = methods["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].split("/")[-1]
                (example,) = described["components"]["schemas"][name]["examples"]
                found[path] = (await client.post(path, json=example)).status_code
        return found


async def cases(codec: TextCodec, path: str) -> dict[str, Any]:
    body = {"says": "dab", "most": 2}
    found: dict[str, Any] = {}
    async with (
        live(codec, OracleEngine(), OPEN) as case,
        httpx.AsyncClient(base_url=case.url, timeout=PATIENCE_S) as client,
    ):
        described = (await client.get("/openapi.json")).json()
        found["paths"], found["described"] = list(described["paths"]), described["paths"][path]
        replies = {
            "whole": await client.post(path, json=body),
            "wrong_field": await client.post(path, json=body | {"most": "two"}),
            "wrong_method": await client.get(path),
        }
        found["streamed"] = named((await client.post(path, json=body | {"live": True})).text)
    failure = RequestFailed(FailReason.COMPUTE_FAILED, "a step failed")
    for name, fail_after in (("failed_midway", 1), ("failed_before", 0)):
        engine = OracleEngine(failure=failure, fail_after=fail_after)
        async with (
            live(codec, engine, OPEN) as case,
            httpx.AsyncClient(base_url=case.url, timeout=PATIENCE_S) as client,
        ):
            reply = await client.post(path, json=body | {"live": True})
            found[name] = named(reply.text) if fail_after else [reply.status_code, reply.json()]
    async with (
        live(codec, OracleEngine(), KEYED) as case,
        httpx.AsyncClient(base_url=case.url, timeout=PATIENCE_S) as client,
    ):
        replies["without_key"] = await client.post(path, json=body)
    return found | {name: [reply.status_code, reply.json()] for name, reply in replies.items()}


if __name__ == "__main__":
    codec = TextCodec.load(Path(sys.argv[1]))
    print(json.dumps(asyncio.run(cases(codec, sys.argv[2]) if len(sys.argv) > 2 else statuses(codec))))
