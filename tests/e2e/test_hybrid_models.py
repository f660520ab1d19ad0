"""Models with recurrent layers as processes over NIXL: the delta of KV and one whole state move, counted in bytes."""

from pathlib import Path

import pytest

from deltaserve.cli.main import main
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.kv import pool_page_bytes
from deltaserve.model.checkpoint_config import load_spec
from tests.e2e.reference import MAX_PAYLOAD_BYTES, assert_true, random_prompt
from tests.e2e.server import serving
from tests.e2e.test_pressure import at_once
from tests.fixtures.mooncake_engines import need_mooncake

PAGE = 16
FLAGS = (
    "--page-size",
    "16",
    "--chunked-prefill-size",
    "64",
    "--attention-split-tokens",
    "32",
    "--context-length",
    "640",
)


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_5",
        pytest.param("qwen3_5_moe", marks=pytest.mark.slow),
        pytest.param("qwen3_next", marks=pytest.mark.slow),
    ],
)
def test_the_delta_of_kv_and_one_whole_state_move(
    tiny_models: Path, folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Decode has none, half and all of the prompt's KV; the state comes whole each time. Then the next turn."""
    model = tiny_models / name
    page, state = pool_page_bytes(load_spec(model).cache_spec(PAGE, DType.FLOAT32))
    with serving(folder, model, *FLAGS, "--num-pages", "160", "--max-running-requests", "4") as server:
        assert "160 pages (" in server.log()
        assert "16 recurrent states (" in server.log()
        whole = random_prompt(256, seed=1)
        half = [*whole[:128], *random_prompt(128, seed=2)]
        for prompt, hit in ((whole, 0), (half, 128), ([*whole[:255], 7], 240)):
            answer = server.complete(prompt, 20)
            assert_true(model, prompt, answer)
            assert answer.timings["decode_cached_tokens"] == hit
            assert answer.timings["transferred_state_bytes"] == state
            moved = answer.timings["transferred_bytes"] - (256 - hit) // PAGE * page - state
            assert 0 < moved < MAX_PAYLOAD_BYTES
        turn = [*whole, *server.complete(whole, 20).tokens, 1, 2, 3]
        assert_true(model, turn, server.complete(turn, 20))
        argv = ["verify", "--base-url", server.base_url, "--model-path", str(model), "--output-len", "8"]
        assert main(argv) == 0
        assert "DIFFERS" not in capsys.readouterr().out


def test_few_states_for_many_requests(tiny_models: Path, folder: Path) -> None:
    """8 requests, 3 slots on each side: they wait for each other, and none fails."""
    model = tiny_models / "qwen3_5"
    with serving(folder, model, *FLAGS, "--num-pages", "160", "--max-mamba-cache-size", "3") as server:
        prompts = [random_prompt(40 + 9 * i, seed=i) for i in range(8)]
        for prompt, answer in zip(prompts, at_once(server, prompts, 30), strict=True):
            assert_true(model, prompt, answer)


NIXL = ("--disaggregation-transfer-backend", "nixl")
MOONCAKE = ("--disaggregation-transfer-backend", "mooncake")
STAGED = ("--staging", "on")


@pytest.mark.parametrize(
    ("ranks", "path"),
    [
        pytest.param((2, 1), (*MOONCAKE, *STAGED), id="P2-D1-mooncake-staged"),
        pytest.param((2, 1), (*NIXL, *STAGED), id="P2-D1-staged", marks=pytest.mark.wide),
        pytest.param((1, 2), NIXL, id="P1-D2-direct", marks=pytest.mark.slow),
        pytest.param((2, 1), MOONCAKE, id="P2-D1-mooncake", marks=pytest.mark.slow),
    ],
)
def test_everything_at_once(tiny_models: Path, folder: Path, ranks: tuple[int, int], path: tuple[str, ...]) -> None:
    """States, experts, unequal ranks, pages of 64 tokens, both caches on; over NIXL and Mooncake, staged and direct."""
    if MOONCAKE[1] in path:
        need_mooncake()
    model, (prefill, decode) = tiny_models / "qwen3_5_moe", map(str, ranks)
    sizes = ("--page-size", "64", "--chunked-prefill-size", "64", "--context-length", "640", "--num-pages", "40")
    flags = (*sizes, "--prefill-tp-size", prefill, "--decode-tp-size", decode, *path)
    with serving(folder, model, *flags) as server:
        whole = random_prompt(300, seed=1)
        cold = server.complete(whole, 20)
        turn = [*whole, *cold.tokens, 1, 2, 3]
        fork, other = [*whole[:150], 7], random_prompt(77, seed=2)
        answers = [
            cold,
            *(server.complete(prompt, 20) for prompt in (whole, turn)),
            *at_once(server, [fork, other], 20),
        ]
        for prompt, answer in zip((whole, whole, turn, fork, other), answers, strict=True):
            assert_true(model, prompt, answer)
            assert answer.timings["transferred_state_bytes"] > 0
        assert [answer.timings["decode_cached_tokens"] for answer in answers] == [0, 256, 256, 128, 0]
        server.wait_quiet()
        staged = server.metrics()["prefill-0"].get("deltaserve_staged_writes_total", 0)
        assert (staged > 0) is (STAGED[0] in path)


def test_one_process_alone(tiny_models: Path, folder: Path) -> None:
    model = tiny_models / "qwen3_5_moe"
    with serving(folder, model, *FLAGS, "--num-pages", "160", "--disaggregation-mode", "null") as server:
        whole = random_prompt(200, seed=1)
        for prompt in (whole, whole, [*whole[:190], 5], random_prompt(3, seed=4)):
            assert_true(model, prompt, server.complete(prompt, 30))
