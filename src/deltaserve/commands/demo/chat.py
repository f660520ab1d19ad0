"""One question to the recall model in plain text, and the commands that ask it."""

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from deltaserve.commands.client.http_client import http_client
from deltaserve.commands.load.recall import DocumentShape, expected_chain, make_document

_NUM_FACTS = 12
_ANSWER_LEN = 9
"""The model was trained to answer a chat with the name asked for and the eight names it leads to."""
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class ChatExample:
    """A question whose answer follows from its text alone."""

    facts: str
    """` a b; b c; ...`: with the space before each name, which belongs to the name's token."""
    question: str
    answer: tuple[str, ...]
    """The names a right answer consists of."""

    @property
    def content(self) -> str:
        return f"Facts:{self.facts}{self.question}"

    def is_answered_by(self, text: str) -> bool:
        return tuple(text.split()) == self.answer


def make_example(model: Path) -> ChatExample:
    """A question with its facts and answer, in the words of the model's own tokenizer."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    document = make_document(Random("chat"), DocumentShape(_NUM_FACTS))
    start = document.tokens[0]
    names = (start, *expected_chain(document, start, _ANSWER_LEN - 1))
    return ChatExample(
        facts=tokenizer.decode(document.tokens),
        question=f"?{tokenizer.decode([start])}",
        answer=tuple(tokenizer.decode([name]).strip() for name in names),
    )


def ask(base_url: str, model: str, example: ChatExample) -> str:
    """The answer of /v1/chat/completions. Raises httpx.HTTPError."""
    with http_client(base_url, _TIMEOUT_S) as http:
        reply = http.post("/v1/chat/completions", json=_chat_body(model, example)).raise_for_status().json()
    return str(reply["choices"][0]["message"]["content"])


def commands(base_url: str, model: str, example: ChatExample) -> list[str]:
    """Commands for a shell: a chat, a completion with its timings, what the server counts."""
    completion = {
        "model": model,
        "prompt": f"{example.facts}{example.question}",
        "max_tokens": 4,
        "temperature": 0,
        "timings": True,
    }
    return [
        curl(f"{base_url}/v1/chat/completions", _chat_body(model, example)),
        curl(f"{base_url}/v1/completions", completion),
        f"curl -s {base_url}/metrics",
    ]


def _chat_body(model: str, example: ChatExample) -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": example.content}], "temperature": 0}


def curl(url: str, body: dict[str, object]) -> str:
    """One request for a shell, its answer in lines."""
    return f"curl -s {url} -H 'Content-Type: application/json' \\\n  -d '{json.dumps(body)}' | python3 -m json.tool"
