"""A real language model from its GGUF file: right log-probabilities, chat, streams, many at once, the demo's talk.

One server for all: it is loaded once (some seconds), and its caches are part of what is tested.
"""

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from deltaserve.commands.demo.talk import hold, talk_commands
from deltaserve.commands.verify.reference import TransformersReference
from deltaserve.server.text.text_codec import TextCodec
from tests.compute.executor.world import TOLERANCE
from tests.e2e.server import Server
from tests.e2e.typist import CTRL_C, Typist
from tests.fixtures.language_model import language_model
from tests.patience import PATIENCE_S

_FLAGS = (
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--page-size",
    "16",
    "--num-pages",
    "256",
    "--context-length",
    "2048",
)
_NUMBERS = "Numbers in Chinese, one after the other: 一 二 三 四 五 六 七 八 九 十 一 二 三 四 五 六 七"


@pytest.fixture(scope="module")
def model() -> Path:
    return language_model()


@pytest.fixture(scope="module")
def codec(model: Path) -> TextCodec:
    return TextCodec.load(model)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with TemporaryDirectory(prefix="e2e-", ignore_cleanup_errors=True) as folder:
        server = Server(Path(folder), model, *_FLAGS)
        try:
            server.wait_ready()
            yield server
        finally:
            server.http.close()
            server.kill()


def chat(server: Server, *contents: str, **fields: object) -> dict[str, Any]:
    """Greedy; `contents` are said by user and assistant in turn."""
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(contents)]
    body = {"model": server.model, "messages": messages, "temperature": 0, "max_tokens": 16, **fields}
    reply = server.http.post("/v1/chat/completions", json=body)
    found: dict[str, Any] = reply.raise_for_status().json()
    return found


def said(reply: dict[str, Any]) -> str:
    return str(reply["choices"][0]["message"]["content"])


def test_log_probabilities_are_those_of_transformers(server: Server, model: Path, codec: TextCodec) -> None:
    """Cold, from the caches, and of a prompt that forks off."""
    torch.set_num_threads(1)
    reference = TransformersReference(model)
    prompt = list(codec.encode("Grüße! In the year 1887 the harbour of Port Ellis was full of ships from all over the"))
    for tokens in (prompt, prompt, [*prompt[:17], *codec.encode(" sailors sang 你好")]):
        answer = server.complete(tokens, 6, prompt_logprobs=0)
        scores = [score.logprob for score in reference.score([*tokens, *answer.tokens])]
        assert [*answer.prompt_logprobs, *answer.logprobs] == pytest.approx(scores, abs=TOLERANCE)


def test_it_knows_the_capital_of_france(server: Server) -> None:
    question = "What is the capital of France?"
    first = chat(server, question)
    assert said(first) == "The capital of France is Paris."
    assert first["choices"][0]["finish_reason"] == "stop"
    second = chat(server, question, said(first), "And of Italy?")
    assert "Rome" in said(second)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32


def test_streamed_text_is_whole_characters(server: Server) -> None:
    body = server.body(_NUMBERS, max_tokens=24)
    whole = server.http.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["text"]
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: {")]
    pieces = [choice["text"] for line in lines for choice in json.loads(line)["choices"]]
    assert "".join(pieces) == whole
    assert len(pieces) > 6
    assert any("\u4e00" <= char <= "\u9fff" for char in whole)
    assert "\ufffd" not in whole[:-1]  # only the end may cut a character


def test_many_at_once_answer_as_each_alone(server: Server) -> None:
    questions = [f"Say the number {number} and then stop." for number in range(4)]
    alone = [said(chat(server, question)) for question in questions]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda at: said(chat(server, questions[at % 4])), range(12)))
    assert together == [alone[at % 4] for at in range(12)]
    server.wait_quiet()


def test_a_typed_chat_can_be_stopped_and_goes_on(server: Server, tmp_path: Path) -> None:
    with closing(Typist(tmp_path, "chat", server.base_url, "--temperature", "0", "--system", "Be brief.")) as typist:
        typist.wait_for("> ")
        typist.type("Count from one to a thousand, and write each number as a word.\n")
        typist.wait_for("345678")
        typist.type(CTRL_C)
        typist.wait_for("(stopped)")
        typist.wait_for("> ")
        server.wait_quiet()  # nobody computes what nobody reads
        typist.type("What is the capital of France?\n")
        assert "Paris" in typist.wait_for("tokens at ")
        typist.wait_for("> ")
        typist.type(CTRL_C)
        typist.wait_for("Ctrl-C again")
        typist.wait_for("> ")
        typist.type(CTRL_C)
        assert typist.end() == 130


def test_the_demos_talk(server: Server) -> None:
    """The handbook is computed and moved once; what is printed to talk on works."""
    shown: list[str] = []
    turns = hold(server.base_url, server.model, shown.append, shown.append)
    cold, *cached = turns
    assert "144" in "".join(shown)
    assert (cold.cached_on_prefill, cold.cached_on_decode) == (0, 0)
    for turn in cached:
        assert min(turn.cached_on_prefill, turn.cached_on_decode) > 800
        assert turn.bytes_moved < cold.bytes_moved / 10
    command = talk_commands(server.base_url, server.model)[0]
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert "Paris" in json.loads(done.stdout)["choices"][0]["message"]["content"]
    assert '    "usage": {' in done.stdout.splitlines()
