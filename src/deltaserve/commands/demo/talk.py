"""The demo's conversation with a language model: a long system prompt, computed once, then found in the caches."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from deltaserve.commands.chat.wrapped_text import WrappedText
from deltaserve.commands.client.chat_stream import ChatAnswer, ServedModel, chat
from deltaserve.commands.client.completion_stream import ServerError
from deltaserve.commands.client.http_client import async_http_client
from deltaserve.commands.demo.chat import curl
from deltaserve.core.sizes import size

_TIMEOUT_S = 300.0
_MAX_TOKENS = 96
_INDENT = " " * 14
_WIDTH = 96

GUIDE = """\
You are the friendly guide of the Museum of Harbour Life in the town of Port Ellis. You answer visitors in one or
two short sentences, and you use the facts of this handbook.

Opening hours. The museum opens at nine in the morning and closes at six in the evening. On Fridays it stays open
until nine in the evening. It is closed on Mondays. The last visitors are let in half an hour before it closes. On
the first Sunday of every month the museum is free for everybody, and the halls are full by noon, so come early.

Tickets. A ticket for grown-ups costs twelve dollars. Children under ten years of age pay nothing. Students and
people over sixty-five pay seven dollars. A family ticket for two grown-ups and up to four children costs twenty-
five dollars. Tickets are sold at the desk in the entrance hall; cards and cash are both taken. A ticket is good for
the whole day: you may leave for lunch and come back.

The building. The museum stands in an old warehouse of red brick that was built in 1887 for a company that traded in
tea, rope and tar. It has three floors. The ground floor shows how ships were loaded and unloaded, with a steam
crane from 1902 that still works; it is switched on every day at eleven and at three. The second floor is about the
sailors: their songs, their tattoos, their letters home, and the food they ate, which was mostly hard bread, salted
meat and dried peas. The third floor keeps the maps, the globes and the instruments of navigation, among them a
sextant that went twice around the world.

The lighthouse. Behind the museum stands the lighthouse of Port Ellis. It is thirty-one metres high and has 144
steps. Its lamp was lit for the first time in 1854 by a keeper named Agnes Miller, who lived in it for forty years
with her two daughters and a grey parrot called Captain. The lighthouse can be climbed from April to October when
the wind is not too strong. Children must be with a grown-up on the stairs. From the top one sees the whole harbour,
the island of Saint Brendan and, on clear days, the mountains.

The ships. Three ships lie at the quay. The Marigold is a fishing boat of 1931, painted green. The Northern Star is
a tug of 1948 with a steam engine of 600 horsepower. The Patience is a sailing ship with two masts that carried
salt; she is the oldest of the three and was launched in 1869. Visitors may go aboard the Marigold and the Northern
Star every day. The Patience is being repaired and can be seen from the quay only.

Food. The Tar Barrel is the museum's restaurant. It is on the ground floor and serves fish soup, sandwiches, apple
pie and coffee from ten until five. Visitors who bring their own food may eat it in the garden, where there are
tables. Please do not feed the gulls: they are bold and steal sandwiches.

Children. Every Saturday at two there is a workshop in which children learn to tie knots. It is free and takes one
hour. A game with ten questions about the museum can be had at the desk; whoever answers all of them gets a small
wooden whistle.

Getting here. The tram number four stops in front of the museum. There is no parking at the quay, but there is a
large car park at the railway station, ten minutes away on foot. The whole museum can be visited with a wheelchair,
and there is a lift to every floor. The lighthouse and the ships have stairs only. Dogs are welcome in the garden,
but not in the halls.
"""


@dataclass(frozen=True, slots=True)
class Visitor:
    """One conversation; all begin with the same handbook."""

    name: str
    questions: tuple[str, ...]


VISITORS = (
    Visitor(
        "visitor 1",
        (
            "What is the name of the restaurant?",
            "What is the capital of France?",
        ),
    ),
    Visitor("visitor 2", ("How many steps does the lighthouse have?",)),
)
"""Questions that a model of this size answers well."""
SAMPLING: Mapping[str, object] = {"temperature": 0.2, "top_p": 0.9}
"""Sampling of a chat with the model, as its authors recommend. The file does not say."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one answer cost. Times in seconds, as the client saw them."""

    title: str
    prompt_len: int
    cached_on_prefill: int
    cached_on_decode: int
    bytes_moved: int
    first_token_s: float
    output_len: int
    wall_s: float


def hold(base_url: str, model: str, say: Callable[[str], None], write: Callable[[str], None]) -> list[Turn]:
    """All conversations, one after the other, shown while they come. Raises ServerError, httpx.HTTPError."""
    turns = []
    for visitor in VISITORS:
        messages = [{"role": "system", "content": GUIDE}]
        for number, question in enumerate(visitor.questions, 1):
            messages.append({"role": "user", "content": question})
            say(f"  {visitor.name:<12}{question}")
            write(f"  {'the model':<12}")
            answer = asyncio.run(_ask(base_url, model, messages, write))
            say("")
            messages.append({"role": "assistant", "content": answer.text})
            turns.append(_turn(f"{visitor.name} ({number})", answer))
    return turns


async def _ask(
    base_url: str, model: str, messages: Sequence[dict[str, str]], write: Callable[[str], None]
) -> ChatAnswer:
    body = ServedModel(model, is_ours=True).body(messages, {"max_tokens": _MAX_TOKENS, "temperature": 0})
    answer, lines = ChatAnswer(), WrappedText(lambda: _WIDTH, _INDENT)
    async with async_http_client(base_url, _TIMEOUT_S) as http:
        await chat(http, body, answer, lambda text, is_thought: write(lines.add(text)))
    write(lines.end())
    return answer


def _turn(title: str, answer: ChatAnswer) -> Turn:
    """Raises ServerError for a stream that ended without its usage."""
    sides = answer.two_sides
    if sides is None or answer.prompt_len is None or answer.output_len is None:
        raise ServerError("the stream ended without its usage")
    return Turn(
        title=title,
        prompt_len=answer.prompt_len,
        cached_on_prefill=sides.cached_on_prefill,
        cached_on_decode=sides.cached_on_decode,
        bytes_moved=sides.bytes_moved,
        first_token_s=answer.wall_s if answer.first_token_s is None else answer.first_token_s,
        output_len=answer.output_len,
        wall_s=answer.wall_s,
    )


def make_talk_table(turns: Sequence[Turn]) -> Table:
    """The table of the talk, one line per answer."""
    title = (
        "each answer: tokens of its prompt, cached ones of these on each side; time to its first token, and per other"
    )
    table = Table(box=SIMPLE, title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in ("prompt", "prefill", "decode", "moved", "first", "answer", "other"):
        table.add_column(heading, justify="right", no_wrap=True)
    for turn in turns:
        table.add_row(*cells_of_turn(turn))
    return table


def cells_of_turn(turn: Turn) -> tuple[str, ...]:
    """Tokens, MiB, seconds and milliseconds as the table has them."""
    rest = turn.output_len - 1
    per_token = f"{(turn.wall_s - turn.first_token_s) / rest * 1e3:.0f} ms" if rest > 0 else "-"
    lengths = (turn.prompt_len, turn.cached_on_prefill, turn.cached_on_decode)
    moved, first = size(turn.bytes_moved), f"{turn.first_token_s:.2f} s"
    return (turn.title, *(f"{length:,}" for length in lengths), moved, first, str(turn.output_len), per_token)


def talk_in_words(turns: Sequence[Turn]) -> str:
    """What the caches saved, in one paragraph of measured figures."""
    cold, cached = turns[0], turns[1:]
    slowest_s = max(turn.first_token_s for turn in cached)
    most_bytes = max(turn.bytes_moved for turn in cached)
    if cold.bytes_moved:
        how = f"computed by prefill and moved to decode once: {cold.prompt_len:,} tokens, {size(cold.bytes_moved)}"
    else:
        how = f"computed once, by decode, since a hand-over takes longer on these cores: {cold.prompt_len:,} tokens"
    sent = f", and at most {size(most_bytes)} of it moved" if most_bytes else ""
    return (
        f"The handbook was {how}, {cold.first_token_s:.1f} s to the first token. After that only what was new was "
        f"computed{sent}; the first token came within {slowest_s:.2f} s, for the second visitor too, who never spoke "
        f"before."
    )


def talk_commands(base_url: str, model: str) -> list[str]:
    """Commands for a shell: a chat with its costs, what the server counts."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body: dict[str, Any] = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 64}
    return [curl(f"{base_url}/v1/chat/completions", body | {"timings": True}), f"curl -s {base_url}/metrics"]
