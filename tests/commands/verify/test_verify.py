"""What `verify` concludes from differences, and what it says about them."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest

from deltaserve.cli.main import main
from deltaserve.commands.verify import verify
from deltaserve.commands.verify.client import Score, ServerClient, TokenCompletion
from deltaserve.commands.verify.reference import TransformersReference
from deltaserve.core.errors import ConfigError
from deltaserve.settings.urls import DEFAULT_URL
from tests.fixtures.tiny_gguf import GEMMA3, Kind, write_gguf
from tests.fixtures.tiny_models import VARIANTS, Variant
from tests.fixtures.tiny_quantised import write_fp8_blocks
from tests.patience import PATIENCE_S


class Server:
    """Says -1 of each of its two tokens, and scores what it is asked with a difference of its own."""

    def __init__(self, difference: float) -> None:
        self.max_len = 300
        self._difference = difference

    def connect(self) -> None:
        return

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def complete(self, prompt: Sequence[int], max_tokens: int, **fields: object) -> TokenCompletion:
        return TokenCompletion((1, 2), (-1.0, -1.0), (), 0, 0)

    def score(self, tokens: Sequence[int]) -> list[Score]:
        logprob = -1.0 - self._difference
        return [Score(logprob, logprob)] * (len(tokens) - 1)


def verified(difference: float, tolerance: float | None = None) -> int:
    arguments = argparse.Namespace(model_path=None, reference="http://other", tolerance=tolerance, output_len=2)
    return verify._verify(arguments, Server(0.0), Server(difference))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("difference", "tolerance", "code", "is_hinted"),
    [
        (0.1, None, 0, False),
        (0.4, None, 1, True),
        (0.4, 0.5, 0, False),
        (0.4, 0.3, 1, False),
        (3.0, None, 1, False),
        (0.1, 0.0, 1, False),
    ],
)
def test_differences_of_fp8_size_are_explained_where_no_tolerance_was_given(
    difference: float, tolerance: float | None, code: int, is_hinted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verified(difference, tolerance) == code
    out = capsys.readouterr().out
    assert ("DIFFERS" in out) == (code == 1)
    assert ("fp8_e4m3" in out and "--tolerance 1" in out) == is_hinted


def test_help_shows_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert f"(default {DEFAULT_URL})" in out
    assert "(default 0.002 where" in out


def test_the_checkpoint_may_be_named_as_everywhere_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "models/none", "--base-url", "http://127.0.0.1:9"]) == 1, "the server is asked first"
    assert (
        "http://127.0.0.1:9/model_info: no server is there (Connection refused); start one" in capsys.readouterr().err
    )
    assert main(["verify", "models/none", "--model-path", "models/none"]) == 2
    assert main(["verify"]) == 2
    assert "name a reference: MODEL" in capsys.readouterr().err


def test_the_server_is_asked_before_anything_heavy_is_imported() -> None:
    code = (
        "import sys; from deltaserve.cli.main import main; main(['verify', 'models/none', '--base-url', 'http://[::1]:9']);"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert ended.stdout == "[]\n"
    assert "no server is there" in ended.stderr


def test_without_transformers_the_way_to_it_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where it is not installed: its import fails, in the file that needs it."""
    monkeypatch.delitem(sys.modules, "deltaserve.commands.verify.reference", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    Busy.refusals[:] = []
    with busy_server() as url:
        assert main(["verify", "models/none", "--base-url", url]) == 2
    assert "pip install 'deltaserve[verify]'" in capsys.readouterr().err


class Busy(BaseHTTPRequestHandler):
    """Answers the first two requests with 429 and 503."""

    refusals: ClassVar[list[int]] = []

    def do_GET(self) -> None:
        status = self.refusals.pop(0) if self.refusals else 200
        content = json.dumps({"model": "m", "max_context_len": 300}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if status != 200:
            self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *words: object) -> None:
        pass


@contextmanager
def busy_server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Busy) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_server_at_its_limit_is_asked_again_when_it_says() -> None:
    Busy.refusals[:] = [429, 503]
    with busy_server() as url:
        client = ServerClient(url, None)
        client.connect()
        client.close()
    assert (client.model, client.max_len, Busy.refusals) == ("m", 300, [])


@pytest.mark.parametrize("variant", [VARIANTS["llama_llama3_rope"], VARIANTS["qwen3"], GEMMA3])
def test_a_gguf_file_is_scored_as_its_folder(tmp_path: Path, variant: Variant) -> None:
    file, folder = write_gguf(variant, tmp_path, Kind.Q8_0)
    tokens = list(range(3, 253))
    ours, theirs = (TransformersReference(path).score(tokens) for path in (file, folder))
    assert [score.logprob for score in ours] == pytest.approx([score.logprob for score in theirs], abs=1e-3)


def test_a_quantised_folder_is_not_scored(tmp_path: Path) -> None:
    """transformers would compute in its own reduced form, where it has one for this machine at all."""
    folder, _ = write_fp8_blocks(VARIANTS["llama"], tmp_path, (128, 128))
    with pytest.raises(ConfigError, match="is quantised; use --reference"):
        TransformersReference(folder)


def test_without_a_terminal_progress_is_told_in_lines_with_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(verify.told_steps(iter("abc"), 3, "asking the server")) == ["a", "b", "c"]
    begun, *_, ended = capsys.readouterr().err.splitlines()
    assert begun == "verify: asking the server, 3 cases"
    assert ended == "verify: asking the server, 3 of 3 done"
