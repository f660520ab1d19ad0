"""What the page of /view and `deltaserve top` ask: trees and requests, without a word of any text."""

import asyncio
from typing import Any

import httpx
import pytest

from deltaserve.control.front.client import WorkerTree
from deltaserve.core.ids import Namespace
from deltaserve.core.wire.messages import TreeNode, TreeShape
from deltaserve.server.app import create_admin_app
from deltaserve.server.settings import ApiKey, Right, ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.patience import PATIENCE_S
from tests.server.conftest import MODEL, Served, served
from tests.server.oracle import OracleEngine

pytestmark = pytest.mark.anyio
OPEN = ServerSettings(MODEL)
ROOM = bytes(range(16))
SHAPE = TreeShape(
    page_size=16,
    num_pages=9,
    nodes=(TreeNode(None, "tenant", 0, 5, 1, False, ()), TreeNode(0, "abc123", 3, 5, 1, True, (ROOM,))),
    num_seen=7,
    num_unseen=2,
)


async def asked(case: Served, path: str) -> dict[str, Any]:
    reply = await case.client.get(path)
    assert reply.status_code == 200, reply.text
    told: dict[str, Any] = reply.json()
    return told


async def test_trees(codec: TextCodec) -> None:
    held = (WorkerTree("prefill-0", "prefill", None), WorkerTree("decode-0", "decode", SHAPE, 0.25))
    async with served(codec, OracleEngine(held_trees=held), OPEN) as case:
        prefill, decode = (await asked(case, "/admin/trees"))["workers"]
    assert prefill == {"name": "prefill-0", "role": "prefill", "nodes": None}
    assert (decode["name"], decode["role"], decode["age_s"], decode["page_size"]) == ("decode-0", "decode", 0.25, 16)
    assert (decode["pages"], decode["nodes_seen"], decode["nodes_unseen"]) == (9, 7, 2)
    root, node = decode["nodes"]
    assert (root["parent"], root["label"], root["pages_below"], root["rooms"]) == (None, "tenant", 5, [])
    assert node == {
        "parent": 0,
        "label": "abc123",
        "pages": 3,
        "pages_below": 5,
        "leases": 1,
        "kept": True,
        "rooms": [ROOM.hex()],
    }


async def test_requests_inside_and_over(codec: TextCodec) -> None:
    """One is held in the middle of its answer: it is inside, with what it has, and then among those that ended."""
    engine = OracleEngine(gate=asyncio.Event(), free_tokens=2)
    async with served(codec, engine, OPEN) as case:
        assert await asked(case, "/admin/requests") == {"running": [], "recent": []}
        body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 4}
        answer = asyncio.create_task(case.client.post("/v1/completions", json=body))
        while not engine.num_held:
            await asyncio.sleep(0.001)
        (inside,) = (await asked(case, "/admin/requests"))["running"]
        (sample,) = inside["samples"]
        assert (sample["prompt_tokens"], sample["output_tokens"]) == (3, 2)
        assert sample["room"] == engine.opened[0].room.hex()
        assert inside["age_s"] >= 0
        assert engine.gate is not None
        engine.gate.set()
        done = await answer
        assert done.status_code == 200
        told = await asked(case, "/admin/requests")
        assert told["running"] == []
        (over,) = told["recent"]
        assert (over["id"], over["outcome"], over["samples"][0]["output_tokens"]) == (done.json()["id"], "ok", 4)
        assert over["ended_s_ago"] >= 0
        assert await asked(case, f"/admin/requests/{over['id']}") == {
            name: value for name, value in over.items() if name != "ended_s_ago"
        }


async def test_the_latest_come_first_and_no_more_than_asked_for(codec: TextCodec) -> None:
    async with served(codec, OracleEngine(), OPEN) as case:
        ids = []
        for _ in range(4):
            body = {"model": MODEL, "prompt": [1], "max_tokens": 1}
            ids.append((await case.client.post("/v1/completions", json=body)).json()["id"])
        told = await asked(case, "/admin/requests?limit=3")
        assert [line["id"] for line in told["recent"]] == ids[:0:-1]


async def test_who_went_or_was_refused_is_not_inside(codec: TextCodec) -> None:
    engine = OracleEngine(gate=asyncio.Event())
    async with served(codec, engine, OPEN) as case:
        body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 4, "stream": True}
        answer = asyncio.create_task(case.client.post("/v1/completions", json=body))
        while not engine.num_held:
            await asyncio.sleep(0.001)
        assert len((await asked(case, "/admin/requests"))["running"]) == 1
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)
        assert (await case.client.post("/v1/completions", json={**body, "max_tokens": 0})).status_code == 400
        told = await asked(case, "/admin/requests")
        assert told["running"] == []
        assert [line["outcome"] for line in told["recent"]] == ["client_gone"]


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "1e3", "", "many", "99999999999999999999", "٣"])
async def test_a_limit_that_is_none(codec: TextCodec, limit: str) -> None:
    async with served(codec, OracleEngine(), OPEN) as case:
        reply = await case.client.get("/admin/requests", params={"limit": limit})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "limit"
        assert "expected 1 to 1000" in reply.json()["error"]["message"]


async def test_with_keys_the_page_is_where_the_admin_routes_are_and_its_figures_want_one(codec: TextCodec) -> None:
    keys = (
        ApiKey("a" * 40, Namespace("team"), frozenset({Right.API})),
        ApiKey("b" * 40, Namespace("ops"), frozenset({Right.ADMIN})),
    )
    settings = ServerSettings(MODEL, api_keys=keys, port=30000)
    async with served(codec, OracleEngine(), settings) as case:
        assert (await case.client.get("/view")).status_code == 404
        transport = httpx.ASGITransport(create_admin_app(case.app))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=PATIENCE_S) as admin:
            assert (await admin.get("/view")).status_code == 200
            for path in ("/admin/trees", "/admin/requests"):
                answers = [
                    (await admin.get(path, headers={"Authorization": f"Bearer {secret}"})).status_code
                    for secret in ("a" * 40, "b" * 40)
                ]
                assert ((await admin.get(path)).status_code, answers) == (401, [403, 200])
