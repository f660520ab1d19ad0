"""What README.md and docs/quickstart.md show of a first hour: their snippets, run as printed, print what is printed."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.e2e.server import Server, environment, serving, wait_until
from tests.fixtures.language_model import language_model
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ADDRESS = "127.0.0.1:30000"
_FLAGS = ("--page-size", "16", "--num-pages", "256", "--context-length", "2048")


def blocks(document: str) -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    return _BLOCK.findall((ROOT / document).read_text())


def after(document: str, words: str) -> tuple[str, str]:
    """The block that holds these words, and the next one: what it prints."""
    texts = [text for _, text in blocks(document)]
    at = next(index for index, text in enumerate(texts) if words in text)
    return texts[at], texts[at + 1]


@contextmanager
def server_of(model: Path, *flags: str) -> Iterator[Server]:
    with (
        TemporaryDirectory(prefix="e2e-", ignore_cleanup_errors=True) as path,
        serving(Path(path), model, *_FLAGS, "--conditional-prefill", "auto", *flags) as server,  # as a user has it
    ):
        yield server


def output_of(server: Server, folder: Path, *command: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=environment(folder)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def at_server(server: Server, text: str) -> str:
    assert _ADDRESS in text
    return text.replace(_ADDRESS, server.base_url.removeprefix("http://"))


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    with server_of(language_model(), "--served-model-name", "smol") as server:
        yield server


def test_the_first_requests_of_the_readme(small: Server, tmp_path: Path) -> None:
    """In the order of the page: the second finds the first one's prompt."""
    command, shown = after("README.md", "curl -s")
    printed = output_of(small, tmp_path, "bash", "-c", at_server(small, command))
    answer = re.search(r'"content":"[^"]*"', shown)
    assert answer is not None
    assert answer[0] in printed
    for count in ("prompt_tokens", "completion_tokens", "cached_tokens"):
        assert re.findall(rf'"{count}":\d+', shown) == re.findall(rf'"{count}":\d+', printed)
    program, shown = after("README.md", "from openai import")
    assert output_of(small, tmp_path, sys.executable, "-c", at_server(small, program)) == shown


def test_the_chat_of_the_readme(small: Server, tmp_path: Path) -> None:
    _, shown = after("README.md", "chat .venv/lib")
    small.flush()
    wait_until(lambda: not any(worker["resident_keys"] for worker in small.workers().values()), "the front to know it")
    lines = shown.splitlines()
    questions = "".join(line.removeprefix("> ") + "\n" for line in lines if line.startswith("> "))
    done = subprocess.run(
        [sys.executable, "-m", "deltaserve.cli.main", "chat", small.base_url, "--temperature", "0"],
        input=questions,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env=environment(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [line for line in lines if not line.startswith(("> ", "("))]
    counts = re.compile(r"\(.* moved;")
    assert counts.findall(done.stderr) == counts.findall(shown)


def test_the_program_of_the_quickstart(tmp_path: Path) -> None:
    program, shown = after("docs/quickstart.md", "from openai import")
    with server_of(ROOT / "models" / "recall-micro") as server:
        assert output_of(server, tmp_path, sys.executable, "-c", at_server(server, program)) == shown


def test_every_flag_that_pages_name_exists() -> None:
    """Flags of the commands in the pages' blocks exist; what follows a flag is its value."""
    for document in ("README.md", "docs/quickstart.md"):
        for line in "".join(text for language, text in blocks(document) if not language).splitlines():
            found = re.match(r"\.venv/bin/deltaserve (?:doctor (?=prefill|decode|router))?(\w+)(.*?)(?:#.*)?$", line)
            if found:
                known = output_help(found[1])
                assert [flag for flag in re.findall(r"(?<= )--[a-z-]+", found[2]) if flag not in known] == [], line


@cache
def output_help(command: str) -> str:
    flag = "--help-all" if command in ("serve", "prefill", "decode", "router") else "--help"
    argv = [sys.executable, "-m", "deltaserve.cli.main", command, flag]
    return subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout
