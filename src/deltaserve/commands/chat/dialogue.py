"""A conversation as a terminal has it: what a line asks for, the turns so far, and what they cost, in words."""

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from deltaserve.commands.client.chat_stream import ChatAnswer, TwoSides
from deltaserve.core.errors import ConfigError
from deltaserve.core.sizes import size
from deltaserve.settings.flags.options import nearest


class Order(Enum):
    """What a line that begins with a slash asks for."""

    HELP = "help"
    RESET = "reset"
    SYSTEM = "system"
    UNDO = "undo"
    STATS = "stats"
    EXIT = "exit"


HELP = '''\
/system TEXT  set the system prompt, of the turns so far too; without TEXT: show it
/undo         forget the last turn
/reset        forget all turns; the system prompt stays
/stats        what the turns so far cost
/exit         end, as Ctrl-D does; Ctrl-C stops an answer, and twice ends the chat
A line that ends with a backslash goes on in the next; text between two lines of """ is one message.
//TEXT sends /TEXT.'''


@dataclass(frozen=True, slots=True)
class ChatOrder:
    """A command of the user, and the rest of its line."""

    order: Order
    rest: str = ""


def read_message(text: str) -> str | ChatOrder | None:
    """A message, or what its slash asks for; None of blanks alone. Raises ConfigError for an order there is not."""
    text = text.strip()
    if not text:
        return None
    if text.startswith("//"):
        return text[1:]
    if not text.startswith("/"):
        return text
    name, _, rest = text[1:].partition(" ")
    orders = {order.value: order for order in Order}
    if name.lower() not in orders:
        near = nearest(name.lower(), orders) or "; /help lists those there are"
        raise ConfigError(f"/{name[:40]}: unknown command{near} (//TEXT sends /TEXT)")
    return ChatOrder(orders[name.lower()], rest.strip())


@dataclass(slots=True)
class MessageLines:
    """Lines until they are a whole message."""

    _lines: list[str] = field(default_factory=list)
    _in_block: bool = False

    @property
    def has_part(self) -> bool:
        return self._in_block or bool(self._lines)

    def add(self, line: str) -> str | None:
        """The message that this line ends; None when more belongs to it."""
        if line.strip() == '"""':
            self._in_block = not self._in_block
            return None if self._in_block else self.end()
        if not self._in_block and line.endswith("\\"):
            self._lines.append(line[:-1])
            return None
        self._lines.append(line)
        return None if self._in_block else self.end()

    def end(self) -> str:
        """What is there, as a message."""
        text = "\n".join(self._lines)
        self._lines, self._in_block = [], False
        return text


@dataclass(slots=True)
class ChatHistory:
    """What the model is sent before the next message."""

    system: str | None = None
    _turns: list[tuple[str, str]] = field(default_factory=list)

    def messages(self, text: str) -> list[dict[str, str]]:
        """All of it, and the user's next message."""
        said = [] if self.system is None else [{"role": "system", "content": self.system}]
        for question, answer in self._turns:
            said += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return [*said, {"role": "user", "content": text}]

    def add(self, question: str, answer: str) -> None:
        self._turns.append((question, answer))

    def undo(self) -> bool:
        """Whether there was a turn to forget."""
        if not self._turns:
            return False
        self._turns.pop()
        return True

    def reset(self) -> None:
        self._turns.clear()

    def __len__(self) -> int:
        return len(self._turns)


# ---------------------------------------------------------------- costs


def cost_line(answer: ChatAnswer) -> str:
    """What one answer cost, as far as the server told it: `31 prompt tokens: 16 cached on prefill, ...`."""
    return "; ".join([_prompt_words(answer.prompt_len, answer.cached_len, answer.two_sides), *_time_words(answer)])


def totals_line(answers: Sequence[ChatAnswer]) -> str:
    """Figures of all turns in one line."""
    if not answers:
        return "no turns so far"
    sides = [answer.two_sides for answer in answers]
    known = [side for side in sides if side is not None]
    total = TwoSides(*map(sum, zip(*map(_side_counts, known), strict=True))) if len(known) == len(sides) else None
    prompt = _prompt_words(_sum(a.prompt_len for a in answers), _sum(a.cached_len for a in answers), total)
    output_len = _sum(answer.output_len for answer in answers)
    return (
        f"{counted(len(answers), 'turn')}: {prompt}; {'?' if output_len is None else f'{output_len:,}'} tokens answered"
    )


def _side_counts(side: TwoSides) -> tuple[int, int, int]:
    return side.cached_on_prefill, side.cached_on_decode, side.bytes_moved


def _sum(counts: Iterable[int | None]) -> int | None:
    """The sum; None where one of the counts is unknown."""
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


def _prompt_words(prompt_len: int | None, cached_len: int | None, sides: TwoSides | None) -> str:
    if prompt_len is None:
        return "the server tells no token counts"
    prompt = counted(prompt_len, "prompt token")
    if sides is not None:
        return (
            f"{prompt}: {sides.cached_on_prefill:,} cached on prefill, {sides.cached_on_decode:,} on decode; "
            f"{size(sides.bytes_moved)} moved"
        )
    return prompt if cached_len is None else f"{prompt}: {cached_len:,} cached"


def _time_words(answer: ChatAnswer) -> list[str]:
    words = []
    if answer.first_token_s is not None:
        words.append(f"first token {answer.first_token_s:.2f} s")
    if answer.output_len is not None:
        speed = "" if answer.tokens_per_s is None else f" at {answer.tokens_per_s:.1f}/s"
        words.append(f"{counted(answer.output_len, 'token')}{speed}")
    return words


def counted(count: int, name: str) -> str:
    return f"{count:,} {name}" if count == 1 else f"{count:,} {name}s"


def printable(text: str) -> str:
    """The text without characters that would command the terminal: a model's text may hold any."""
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) != "Cc")
