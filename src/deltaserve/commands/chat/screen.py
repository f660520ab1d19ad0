"""The terminal of a chat, or the pipes of a script: messages come from it, answers and notes go to it."""

import readline
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from io import TextIOWrapper

from rich.console import Console
from rich.text import Text

from deltaserve.commands.chat.dialogue import MessageLines, printable
from deltaserve.commands.chat.typed_keys import TypedKeys
from deltaserve.commands.chat.wrapped_text import WrappedText

_PROMPT, _GOES_ON = "> ", ". "


class Screen:
    """Answers on stdout; the rest on stderr, dimmed on a terminal. Messages from stdin, with a prompt on a terminal."""

    def __init__(self) -> None:
        self._keys = TypedKeys(sys.stdin.fileno()) if sys.stdin.isatty() and sys.stdout.isatty() else None
        self._notes = Console(stderr=True, highlight=False)
        self._answer = _Flow(_write, sys.stdout.isatty())
        self._thoughts = _Flow(self._write_thought, self._notes.is_terminal)
        if isinstance(sys.stdin, TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="replace")
        if self.is_typed:
            readline.set_auto_history(True)

    @property
    def is_typed(self) -> bool:
        """Whether somebody types at a terminal."""
        return self._keys is not None

    def unseen_keys(self) -> AbstractContextManager[None]:
        """A block for all that is not `read`: what is typed meanwhile waits for that, and is not shown before."""
        return nullcontext() if self._keys is None else self._keys.unseen()

    def read(self) -> str | None:
        """The next message; None at the end of the input. Raises KeyboardInterrupt."""
        lines = MessageLines()
        while True:
            try:
                message = lines.add(self._read_line(_GOES_ON if lines.has_part else _PROMPT))
            except EOFError:
                if self.is_typed:
                    print()
                return lines.end() if lines.has_part else None
            if message is not None:
                return message

    def _read_line(self, prompt: str) -> str:
        if self._keys is None:
            return input()
        with self._keys.seen():
            return input(prompt)

    def show(self, text: str, is_thought: bool) -> None:
        """A piece of an answer. Thoughts are no part of it: they are notes."""
        if is_thought:
            if self._answer.is_on_terminal:  # an answer in a pipe stays as it is
                self._answer.end()
            self._thoughts.add(printable(text))
        else:
            self._thoughts.end()
            self._answer.add(printable(text))

    def end_answer(self) -> None:
        """Whatever comes next begins a line."""
        self._thoughts.end()
        self._answer.end()

    def note(self, text: str) -> None:
        self._notes.print(Text(text, style="dim"), soft_wrap=True)

    def warn(self, text: str) -> None:
        self._notes.print(Text(text, style="yellow"), soft_wrap=True)

    @contextmanager
    def progress(self, text: str) -> Iterator[Callable[[str], None]]:
        """One line that moves while something takes its time: (what is being done) -> None changes its end."""
        began_s = time.monotonic()
        if not self._notes.is_terminal:
            self.note(text)
            yield lambda step: None
        else:
            with self.unseen_keys(), self._notes.status(Text(text)) as status:
                yield lambda step: status.update(Text(f"{text}: {step}"[: self._notes.width - 4]))
        self.note(f"{text}: ready after {time.monotonic() - began_s:.0f} s")

    def _write_thought(self, text: str) -> None:
        self._notes.print(Text(text, style="dim italic"), end="", soft_wrap=True)


class _Flow:
    """Text that is written as it comes: on a terminal in lines of whole words."""

    def __init__(self, write: Callable[[str], None], is_on_terminal: bool) -> None:
        self.is_on_terminal = is_on_terminal
        self._write = write
        self._lines: WrappedText | None = None
        self._is_at_start = True
        """Whether the output stands at the start of a line."""

    def add(self, text: str) -> None:
        if not text:
            return
        self._is_at_start = text.endswith("\n")
        if self.is_on_terminal:
            self._lines = self._lines or WrappedText(_terminal_width)
            text = self._lines.add(text)
        if text:
            self._write(text)

    def end(self) -> None:
        """Whatever comes next begins a line, and is a text of its own."""
        rest = "" if self._lines is None else self._lines.end()
        rest += "" if self._is_at_start else "\n"
        if rest:
            self._write(rest)
        self._lines, self._is_at_start = None, True


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _terminal_width() -> int:
    """Columns of the terminal, now."""
    return shutil.get_terminal_size().columns
