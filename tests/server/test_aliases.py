"""Names of SGLang for what is called otherwise here, and lists of stops that are long."""

from collections.abc import Callable, Mapping
from itertools import pairwise

import pytest

from deltaserve.control.front.client import Generation
from deltaserve.server.settings import ServerSettings
from deltaserve.server.text.stop_filter import StopFilter
from deltaserve.server.text.text_codec import TextCodec
from tests.server.conftest import MODEL, served
from tests.server.corpus import JSON, chat, completion, generate
from tests.server.oracle import OracleEngine

pytestmark = pytest.mark.anyio
MAKERS: dict[str, Callable[[Mapping[str, object]], bytes]] = {
    "/v1/completions": completion,
    "/v1/chat/completions": chat,
    "/generate": generate,
}


async def _asked(codec: TextCodec, path: str, fields: Mapping[str, object]) -> Generation:
    engine = OracleEngine()
    async with served(codec, engine, ServerSettings(MODEL)) as case:
        reply = await case.client.post(path, content=MAKERS[path](fields), headers=JSON)
        assert reply.status_code == 200, reply.text
    return engine.opened[0]


@pytest.mark.parametrize("path", MAKERS)
async def test_extra_key_is_a_salt(codec: TextCodec, path: str) -> None:
    def fields(**salts: str) -> Mapping[str, object]:
        return {"sampling_params": salts} if path == "/generate" else salts

    plain = await _asked(codec, path, {})
    salt = await _asked(codec, path, fields(cache_salt="a"))
    assert (await _asked(codec, path, {"extra_key": "a"})).namespace == salt.namespace != plain.namespace
    assert (await _asked(codec, path, {"extra_key": "b"})).namespace != salt.namespace
    assert (await _asked(codec, path, {"extra_key": ""})).namespace == plain.namespace
    both = await _asked(codec, path, {**fields(cache_salt="a"), "extra_key": "b"})
    swapped = await _asked(codec, path, {**fields(cache_salt="b"), "extra_key": "a"})
    assert len({plain.namespace, salt.namespace, both.namespace, swapped.namespace}) == 4


@pytest.mark.parametrize("path", MAKERS)
async def test_a_bad_extra_key_is_named(codec: TextCodec, path: str) -> None:
    async with served(codec, OracleEngine(), ServerSettings(MODEL)) as case:
        reply = await case.client.post(path, content=MAKERS[path]({"extra_key": "x" * 257}), headers=JSON)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "extra_key"


async def test_sampling_seed_is_a_seed(codec: TextCodec) -> None:
    named = await _asked(codec, "/generate", {"sampling_params": {"sampling_seed": 7}})
    assert (
        named.sampling.seed == (await _asked(codec, "/generate", {"sampling_params": {"seed": 7}})).sampling.seed == 7
    )
    async with served(codec, OracleEngine(), ServerSettings(MODEL)) as case:
        for name in ("seed", "sampling_seed"):
            body = generate({"sampling_params": {name: 1 << 64}})
            reply = await case.client.post("/generate", content=body, headers=JSON)
            assert reply.json()["error"]["param"] == f"sampling_params.{name}"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_thousand_stops_are_taken(codec: TextCodec, path: str) -> None:
    ids = [number % 272 for number in range(1024)]
    stops = [f"<{number}>" for number in range(1024)]
    asked = await _asked(codec, path, {"stop_token_ids": ids, "stop": stops, "max_tokens": 3})
    assert set(ids) <= set(asked.sampling.stop_token_ids)
    assert await _asked(codec, path, {"stop": ["x" * 1024] * 16})


def test_the_work_for_a_piece_of_text_does_not_grow_with_the_number_of_stops() -> None:
    """Counted in looks into sets, not in time: as many as there are lengths, for each character."""
    stops = tuple(f"{number:04d}{'y' * 12}" for number in range(1024))
    text = "0123yyyyyyyyyyy0123yyyyyyyyyyyz" * 3
    few, many = StopFilter(stops[123:124]), StopFilter(stops)
    assert [few.push(char) for char in text] == [many.push(char) for char in text]
    assert many.push("0123" + "y" * 12) == ""
    assert many.matched == stops[123]


@pytest.mark.parametrize("cut", range(1, 8))
def test_the_stop_that_is_complete_first_wins_however_text_is_cut(cut: int) -> None:
    stops, text = ("cde", "bcde", "cdefg", "xyz", "efg"), "aabcdefgxyz"
    found = StopFilter(stops)
    places = [*range(0, len(text), cut), len(text)]
    shown = ""
    for start, end in pairwise(places):
        shown += found.push(text[start:end])
        if found.matched is not None:
            break
    assert (shown, found.matched) == ("aa", "bcde")
