"""Many clients at once, on a model whose every token can be checked."""

import json
import random
from argparse import ArgumentParser
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from deltaserve.commands.bench.command import add_arguments, run
from tests.e2e.server import PLAIN_HTTP, ROOT, Json, Server, serving
from tests.patience import PATIENCE_S

MODEL = ROOT / "models" / "recall-micro"


GUESSING = ["--speculative-algorithm", "NGRAM"]


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    """A server without further flags."""
    with TemporaryDirectory(prefix="e2e-", ignore_cleanup_errors=True) as path, serving(Path(path), MODEL) as server:
        yield server


@pytest.mark.parametrize(
    ("counts", "flags"), [((256, 128), []), pytest.param((256,), GUESSING, marks=pytest.mark.wide)], ids=["", "NGRAM"]
)
def test_every_answer_is_right_and_nothing_is_held(
    request: pytest.FixtureRequest, folder: Path, counts: tuple[int, ...], flags: list[str]
) -> None:
    """All are sent at once; 32 run at a time, the others wait."""
    started = serving(folder, MODEL, *flags) if flags else nullcontext(request.getfixturevalue("plain"))
    with started as server:
        for count in counts:
            parser = ArgumentParser("bench")
            add_arguments(parser)
            load = ["--num-documents", "8", "--conversations-per-document", str(count // 8), "--num-turns", "1"]
            out = folder / "report.json"
            options = ["--workload", "recall", *load, "--max-concurrency", str(count), "--output-file", str(out)]
            assert run(parser.parse_args(["--base-url", server.base_url, *options])) == 0
            summary = json.loads(out.read_text())["summary"]
            assert (summary["num_completed"], summary["num_failed"]) == (count, 0)
            assert summary["peak_concurrency"] == count
            assert summary["tokens_right"] == summary["tokens_expected"] > 0
            server.wait_quiet()
        decode = next(values for name, values in server.metrics().items() if "decode" in name)
        assert (decode.get("deltaserve_drafts_verified_total", 0) > 0) is bool(flags)


def test_chats_of_drawn_lengths_about_a_few_documents(plain: Server) -> None:
    """As load generators for chats send them: text of normally distributed length behind one of 20 prefixes, streamed,
    32 at a time, as many tokens as asked for whatever the model would end with."""
    draw = random.Random(42)
    letters = "abcdefghijklmnopqrstuvwxyz "

    def text(mean: float) -> str:
        return "".join(draw.choices(letters, k=max(1, int(draw.gauss(mean, mean / 9)))))

    prefixes = [text(400) for _ in range(20)]
    asked = [(draw.choice(prefixes), text(60), max(1, int(draw.gauss(24, 7)))) for _ in range(96)]
    with ThreadPoolExecutor(32) as pool:
        usages = list(pool.map(lambda one: streamed_chat(plain, *one), asked))
    plain.wait_quiet()
    assert [usage["completion_tokens"] for usage in usages] == [length for _, _, length in asked]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert sum(num > 0 for num in cached) >= len(asked) - 2 * len(prefixes), (
        "the first 32 may all be cold, later ones only where their prefix is new"
    )


def streamed_chat(server: Server, prefix: str, question: str, length: int) -> Json:
    """The usage of one answer."""
    body = {
        "model": server.model,
        "messages": [{"role": "system", "content": prefix}, {"role": "user", "content": question}],
        "max_tokens": length,
        "min_tokens": length,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    url = f"{server.base_url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=PATIENCE_S, verify=PLAIN_HTTP) as reply:
        assert reply.status_code == 200, reply.read()
        events = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert events[-1] == "[DONE]"
    usage: Json = json.loads(events[-2])["usage"]
    return usage
