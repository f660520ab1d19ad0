"""The demo as a user runs it: its exit code, its figures, the commands it prints, and nothing left behind."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from tests.patience import PATIENCE_S, killed_if_late

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def demo(folder: Path, *options: str) -> Iterator["subprocess.Popen[str]"]:
    """A running demo without a terminal. All its processes name `folder` in their command lines."""
    process = subprocess.Popen(
        [sys.executable, "-m", "deltaserve.cli.main", "demo", *options],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        with killed_if_late(process):
            yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def read_until(process: "subprocess.Popen[str]", words: str) -> str:
    """All output up to the line with these words."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if words in line:
            return seen
    raise AssertionError(f"the demo ended without {words!r}:\n{seen}")


def assert_nothing_is_left(folder: Path) -> None:
    assert list(folder.iterdir()) == []
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert [line for line in lines if str(folder) in line] == []


def row(table: str, label: str) -> list[list[str]]:
    """The off and on cells of every row with this label."""
    rows = [line for line in table.splitlines() if line.strip().startswith(label)]
    return [re.split(r"\s{2,}", line.strip())[1:3] for line in rows]


def test_it_counts_what_is_saved_and_can_be_talked_to(folder: Path) -> None:
    with demo(folder, "--quick", "--keep", "--no-talk") as process:
        seen = read_until(process, "Ctrl-C ends it")
        commands = [shlex.split(part) for part in re.findall(r"^curl (?:.*\\\n)*.*$", seen, re.MULTILINE)]
        answers = [
            httpx.post(command[2], json=json.loads(command[-5]), timeout=PATIENCE_S).json() for command in commands[:2]
        ]
        metrics = httpx.get(commands[2][2], timeout=PATIENCE_S).text
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0, seen
    assert_nothing_is_left(folder)
    assert row(seen, "answers right") == [["24", "24"]] * 2
    assert re.search(r"Pages move from prefill to decode by (local|nixl|mooncake)\.", seen)
    assert "and 144 of 144 answers of all rounds were right." in " ".join(seen.split())
    for off, on in row(seen, "not moved again"):
        assert off == "0" != on
    for off, on in row(seen, "moved from prefill to decode"):
        assert float(on.removesuffix(" MiB")) < float(off.removesuffix(" MiB"))
    off, on = row(seen, "not read again")[0]
    assert off == "0" != on
    chat = answers[0]["choices"][0]["message"]["content"].split()
    completion = answers[1]["choices"][0]["text"].split()
    assert len(completion) == 4
    assert chat[1:5] == completion
    assert f"assistant  {' '.join(chat)}   (right)" in seen
    assert answers[1]["usage"]["timings"][0]["transferred_bytes"] > 0
    assert "deltaserve_generation_tokens_total" in metrics


def test_an_interrupt_ends_it_at_once_and_cleanly(folder: Path) -> None:
    with demo(folder) as process:
        read_until(process, "Ready")
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
    assert_nothing_is_left(folder)
