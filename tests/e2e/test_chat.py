"""`deltaserve chat` as people and scripts use it: with a server that runs, and with one of its own.

The recall model answers a chat with the chain of names that the facts in it spell.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from tests.e2e.server import Server, environment, serving, wait_until
from tests.e2e.typist import CTRL_C, CTRL_D, Typist
from tests.patience import PATIENCE_S, killed_if_late

MODEL = Path(__file__).resolve().parents[2] / "models" / "recall-micro"
FACTS = "Facts: rada ruga; ruga buse; buse zube; zube rada;? rada"
ANSWER = " rada ruga buse zube rada ruga buse zube rada"
NEXT = " buse zube rada ruga buse zube rada ruga buse"
GREEDY = ("--temperature", "0")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with (
        TemporaryDirectory(prefix="e2e-", ignore_cleanup_errors=True) as path,
        serving(Path(path), MODEL, "--page-size", "16", "--num-pages", "256") as found,
    ):
        yield found


def chat(folder: Path, messages: str, *argv: str, code: int = 0) -> tuple[str, str]:
    """stdout and stderr of a chat whose messages come from a pipe."""
    return finish(piped(folder, *argv), messages, code)


def piped(folder: Path, *argv: str) -> subprocess.Popen[str]:
    """A chat that waits for its first message."""
    return subprocess.Popen(
        [sys.executable, "-m", "deltaserve.cli.main", "chat", *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(folder),
    )


def finish(process: subprocess.Popen[str], messages: str, code: int = 0) -> tuple[str, str]:
    """What more it says to these messages, which are its last."""
    with process:
        try:
            out, told = process.communicate(messages, timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == code, told
    return out, told


def assert_nothing_is_left(folder: Path) -> None:
    """No process, since each has the folder in its environment, and no file."""
    mine = os.fsencode(folder)

    def environ(process: psutil.Process) -> bytes:
        try:
            return Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            return b""

    wait_until(lambda: not any(mine in environ(process) for process in psutil.process_iter()), "all processes to end")
    assert list(folder.iterdir()) == []


def test_each_line_is_a_turn_and_its_costs_are_told(server: Server, folder: Path) -> None:
    server.flush()
    process = piped(folder, server.base_url, *GREEDY)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{FACTS}\n")
    process.stdin.flush()
    with killed_if_late(process):
        assert process.stdout.readline() == f"{ANSWER}\n"
    server.wait_quiet()  # what decode generated goes back to prefill behind the answer
    out, told = finish(process, "? buse\n/stats\n")
    assert out == f"{NEXT}\n"
    first, second = re.findall(r"\((\d+) prompt tokens: (\d+) cached on prefill, (\d+) on decode; (.+) moved;", told)
    assert first[:3] == ("28", "0", "0")
    assert second[:3] == ("49", "32", "32")
    assert (first[3], second[3]) == ("64 KiB", "64 KiB")
    assert "2 turns: 77 prompt tokens: 32 cached on prefill, 32 on decode; 128 KiB moved; 20 tokens answered" in told


def test_turns_can_be_forgotten_and_lines_joined(server: Server, folder: Path) -> None:
    messages = f'{FACTS}\n/undo\n/undo\n"""\n{FACTS}\n"""\n/reset\n/system\n/nonsense\n'
    out, told = chat(folder, messages, server.base_url, *GREEDY, "--max-tokens", "3", code=1)
    assert out.splitlines() == [" rada ruga buse"] * 2
    assert told.count("28 prompt tokens") == 2
    for words in ("0 turns left", "there is no turn to forget", "all turns are forgotten", "no system prompt"):
        assert words in told
    assert "chat: /nonsense: unknown command" in told


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["no-such-model"], 2, "neither a URL nor a folder or GGUF file"),
        (["http://127.0.0.1:9"], 1, "no server is there (Connection refused); start one (`deltaserve serve MODEL`)"),
        (["127.0.0.1:9"], 1, "http://127.0.0.1:9: "),
        (["http://["], 2, "http://[: "),
        (["tests"], 2, "config.json"),
        (["--api-key-file", "no-such-file"], 2, "--api-key-file no-such-file: "),
        (["--temperature", "nan"], 2, "--temperature"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_one_line(folder: Path, argv: list[str], code: int, words: str) -> None:
    out, told = chat(folder, "hello\n", *argv, code=code)
    assert out == ""
    assert words in told.splitlines()[-1]
    assert len(told.splitlines()) <= 2  # before it, perhaps, that a server is being started


def test_a_refused_message_is_told_and_the_next_one_answered(server: Server, folder: Path) -> None:
    out, told = chat(folder, f"{'x ' * 4000}\n{FACTS}\n", server.base_url, *GREEDY, code=1)
    assert out.splitlines() == [ANSWER]
    assert "chat: HTTP 400: " in told
    assert "; this message is not kept (/reset begins anew)" in told


def test_a_key_is_sent(folder: Path) -> None:
    keys = folder / "keys"
    keys.touch(mode=0o600)
    keys.write_text(f"{'k' * 40} tenant admin\n")
    inside = folder / "inside"
    inside.mkdir()
    out, _ = chat(inside, f"{FACTS}\n", str(MODEL), "--api-key-file", str(keys), *GREEDY)
    assert out.splitlines() == [ANSWER]
    assert_nothing_is_left(inside)


def test_typing_with_a_server_of_its_own(folder: Path) -> None:
    with closing(Typist(folder, "chat", str(MODEL), *GREEDY)) as typist:
        typist.wait_for("ready after")
        typist.wait_for("> ")
        typist.type(f"{FACTS}\n")
        typist.wait_for(ANSWER)
        typist.wait_for("64 KiB moved")
        typist.wait_for("> ")
        typist.type(CTRL_C)
        typist.wait_for("Ctrl-C again")
        typist.wait_for("> ")
        typist.type("? buse\\\n")
        typist.wait_for(". ")
        typist.type("\n")
        typist.wait_for(NEXT)
        typist.wait_for("> ")
        typist.type(CTRL_D)
        assert typist.end() == 0
    assert_nothing_is_left(folder)


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.wide), signal.SIGHUP, signal.SIGKILL]
)
def test_its_server_ends_with_it_however_it_ends(folder: Path, number: signal.Signals) -> None:
    with closing(Typist(folder, "chat", str(MODEL))) as typist:
        typist.wait_for("> ")
        typist.popen.send_signal(number)
        assert typist.end() == (-number if number is signal.SIGKILL else 128 + number)
    assert_nothing_is_left(folder)


def test_an_interrupted_start_leaves_nothing(folder: Path) -> None:
    with closing(Typist(folder, "chat", str(MODEL))) as typist:
        typist.wait_for("front: starting")
        typist.type(CTRL_C)
        assert typist.end() == 130
    assert_nothing_is_left(folder)
