"""`deltaserve chat` at a terminal: keys typed while an answer comes, its lines, signals."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.commands.chat.told_server import END, ToldServer, told_server
from tests.e2e.typist import CTRL_C, CTRL_D, Typist
from tests.patience import PATIENCE_S

BACKSPACE = "\x7f"


@pytest.fixture
def server() -> Iterator[ToldServer]:
    with told_server() as found:
        yield found


@pytest.fixture
def typist(server: ToldServer, tmp_path: Path) -> Iterator[Typist]:
    """Who has asked, and was answered the first two words."""
    with closing(Typist(tmp_path, "chat", server.url, columns=40)) as found:
        found.wait_for("> ")
        found.type("hello\n")
        assert server.next_message() == "hello"
        server.say("first words ")
        found.wait_for("first words")
        yield found


def test_keys_of_the_next_message_do_not_tear_the_answer(server: ToldServer, typist: Typist) -> None:
    typist.type(f"nexx{BACKSPACE}t")
    server.say("and the rest", END)
    assert typist.wait_for("and the rest") == " "
    typist.wait_for("> nexx")
    typist.type(" one\n")
    assert server.next_message() == "next one"
    server.say("yes", END)
    typist.wait_for("yes")
    typist.wait_for("> ")
    typist.type(CTRL_D)
    assert typist.end() == 0
    assert typist.shows_keys()


def test_whole_messages_typed_before_their_turn_are_sent_in_order(server: ToldServer, typist: Typist) -> None:
    typist.type(f"two\nthree\n{CTRL_D}")
    server.say(END)
    for message in ("two", "three"):
        assert server.next_message() == message
        server.say(f"answer to {message}", END)
        typist.wait_for(f"answer to {message}")
    assert typist.end() == 0
    assert typist.shows_keys()


def test_an_answer_that_is_stopped_leaves_the_keys_typed_before(server: ToldServer, typist: Typist) -> None:
    typist.type("other")
    typist.type(CTRL_C)  # which throws away what was typed before it, as the terminal has it
    typist.wait_for("(stopped)")
    typist.wait_for("> ")
    typist.type("then\n")
    assert server.next_message() == "then"
    typist.popen.send_signal(signal.SIGTERM)
    assert typist.end() == 128 + signal.SIGTERM
    assert typist.shows_keys()
    server.say(END)


def test_an_answer_and_thoughts_are_wrapped_at_words(server: ToldServer, typist: Typist) -> None:
    server.say("come in li", "nes as wide", " as the terminal is.", "\n", "你好" * 25, END)
    shown = typist.wait_for("(1 prompt token")
    assert shown == " come in lines as wide as the\r\nterminal is.\r\n" + "你好" * 10 + "\r\n" + "你好" * 10 + (
        "\r\n" + "你好" * 5 + "\r\n\x1b[2m"
    )
    typist.wait_for("> ")
    typist.type("and thoughts\n")
    server.next_message()
    server.say("this is a thought that is longer than a line", name="reasoning_content")
    server.say("An answer.", END)
    thought = re.sub("\x1b.*?m", "", typist.wait_for("An answer."))
    assert thought.endswith("this is a thought that is longer than a\r\nline\r\n")


def test_a_pipe_gets_the_answer_as_it_is(server: ToldServer) -> None:
    text = "a line of more than eighty cells, which no terminal is there to be too narrow for, 你好 \n\n and more"
    server.say(text, END)
    done = subprocess.run(
        [sys.executable, "-m", "deltaserve.cli.main", "chat", server.url],
        input="hello\n",
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert done.stdout == f"{text}\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_between_the_prompt_and_the_wait_for_keys_is_heard(number: signal.Signals, tmp_path: Path) -> None:
    with closing(Typist(tmp_path, str(int(number)), module="tests.commands.chat.signalled_prompt")) as typist:
        assert typist.end() == 128 + number
        assert typist.shows_keys()
