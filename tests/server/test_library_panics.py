"""A panic of a library in Rust is a BaseException: it gives a JSON 500 for its request alone, and nobody else's."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from deltaserve.control.front.client import Limits
from deltaserve.server.settings import ServerSettings
from deltaserve.server.text.text_codec import TextCodec
from tests.server.conftest import MODEL, live, served
from tests.server.corpus import chat, completion, generate
from tests.server.oracle import OracleEngine
from tests.server.raw_corpus import BODY, parse, post

pytestmark = pytest.mark.anyio
POISON = "a" * 51 + "!"
"""The pattern below tries every way of cutting it, until the library gives up by a panic."""
JSON = {"content-type": "application/json"}
BODIES = {
    "/v1/completions": completion({"prompt": POISON}),
    "/v1/chat/completions": chat({"messages": [{"role": "user", "content": POISON}]}),
    "/generate": generate({"text": POISON}),
    "/tokenize": json.dumps({"prompt": POISON}).encode(),
}


@pytest.fixture(scope="module")
def brittle(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    """A tokenizer whose pattern is one that the library gives up on."""
    folder = tmp_path_factory.mktemp("brittle")
    shutil.copytree(model_folder, folder, dirs_exist_ok=True)
    path = folder / "tokenizer.json"
    described = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, described["pre_tokenizer"]]}
    path.write_text(json.dumps(described))
    return TextCodec.load(folder)


@pytest.mark.parametrize("path", BODIES)
async def test_a_panic_of_the_tokenizer_is_500_and_counted(brittle: TextCodec, path: str) -> None:
    async with served(brittle, OracleEngine(), ServerSettings(MODEL)) as case:
        for number in (1, 2):
            reply = await case.client.post(path, content=BODIES[path], headers=JSON)
            assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
            assert reply.headers["x-request-id"] in reply.json()["error"]["message"]
            counted = f'deltaserve_request_errors_total{{code="internal_error"}} {number}.0'
            assert counted in case.front.metrics.text().decode()
        assert (await case.client.post("/v1/completions", content=BODY, headers=JSON)).status_code == 200


async def test_over_a_socket_too(brittle: TextCodec) -> None:
    async with live(brittle, OracleEngine(), ServerSettings(MODEL, port=0)) as server:
        status, headers, body = parse(await server.talk(post(BODIES["/v1/completions"], "Connection: close")))
        assert (status, headers["content-type"]) == (500, "application/json")
        assert json.loads(body)["error"]["code"] == "internal_error"
        assert parse(await server.talk(post(BODY, "Connection: close")))[0] == 200


class Panic(BaseException):
    """As pyo3's: no Exception."""


class Broken(OracleEngine):
    """Its limits are asked for by every generating handler."""

    def limits(self) -> Limits | None:
        raise self.failure or Panic


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("fail_after", [0, 2])
async def test_a_panic_in_the_middle_of_an_answer(codec: TextCodec, stream: bool, n: int, fail_after: int) -> None:
    engine = OracleEngine(failure=Panic(), fail_after=fail_after)  # type: ignore[arg-type]
    async with served(codec, engine, ServerSettings(MODEL)) as case:
        body = completion({"stream": stream, "n": n})
        reply = await case.client.post("/v1/completions", content=body, headers=JSON)
        assert '"code":"internal_error"' in reply.text
        assert reply.status_code == (200 if stream and fail_after else 500)
        assert b'deltaserve_requests_total{outcome="internal_error"} 1.0' in case.front.metrics.text()


@pytest.mark.parametrize("error", [Panic(), BaseExceptionGroup("several", [Panic(), ValueError()])])
async def test_any_failure_of_a_handler_is_one(codec: TextCodec, error: BaseException) -> None:
    async with served(codec, Broken(failure=error), ServerSettings(MODEL)) as case:  # type: ignore[arg-type]
        reply = await case.client.post("/v1/completions", content=BODY, headers=JSON)
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")


async def test_a_cancelled_handler_is_not_answered(codec: TextCodec) -> None:
    async with served(codec, Broken(failure=asyncio.CancelledError()), ServerSettings(MODEL)) as case:  # type: ignore[arg-type]
        with pytest.raises(asyncio.CancelledError):
            await case.client.post("/v1/completions", content=BODY, headers=JSON)
