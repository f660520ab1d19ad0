"""Clients of every temper, who know the right answer.

Questions about documents: every token of an answer is a lookup in the document's KV, and the answer is known. What the
model itself reads wrongly is found out in the calm before the storm and not asked again.
"""

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from random import Random

import httpx

from deltaserve.commands.load.recall import ASK, DocumentShape, expected_chain, make_document
from deltaserve.server.read import DEADLINE_HEADER

NUM_DOCUMENTS = 24
QUESTIONS_PER_DOCUMENT = 3
SHAPES = (DocumentShape(120, 240), DocumentShape(96, 48), DocumentShape(64), DocumentShape(32))
ANSWER_LEN = 64
LATE_S = 10.0
"""How long after its deadline an answer may come, where every process that has work has a core. Any process, the front,
too, may stand still for seconds on a machine that others use."""
OWN_MACHINE_LATE_S = 1.0
"""The same where nobody else uses the machine."""
REFUSALS = {
    429: {"overloaded", "rate_limited"},
    502: {"transfer_failed"},
    503: {"not_ready"},
    504: {"deadline_exceeded"},
}
"""What a client may be told when processes die and links break, status |-> codes. Never 500, never a wrong answer."""
_PATH = "/v1/completions"
_HINTS: tuple[dict[str, object], ...] = ({"done": True}, {"retain_s": 5}, {}, {"done": True}, {}, {}, {}, {})
"""What questions say of those to come, by their last token. That nobody asks about their document again is not always
so."""
_OF_PREFETCH, _WHICH_PREFETCH = 8, 2
"""One question in so many, by its last token, has its prompt made ready before it is asked."""


def _slowness() -> float:
    """On a busy machine all turns come later, the front's more than ours: it computes more."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and its greedy answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def make_questions(seed: int) -> list[Question]:
    """Several about each document; a document's questions share all but two tokens of their prompts."""
    draw = Random(f"questions {seed}")
    questions = []
    for index in range(NUM_DOCUMENTS):
        document = make_document(draw, SHAPES[index % len(SHAPES)])
        for start in draw.sample(sorted(document.successor), QUESTIONS_PER_DOCUMENT):
            answer = expected_chain(document, start, ANSWER_LEN)
            questions.append(Question((*document.tokens, ASK, start), answer))
    return questions


class Broken(AssertionError):
    """A promise was broken: the run has failed."""


class WrongToken(Broken):
    """A token that is not the right answer's."""


@dataclass(slots=True)
class Tally:
    """What became of all requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """`KIND: what became of it`."""
    num_right: int = 0
    """Whole answers, all equal to the expected one."""
    num_errors: int = 0
    """Answered with an error that is allowed in a storm."""
    num_left: int = 0
    """The client left."""
    num_near: int = 0
    """Prompts that decode chose to compute itself, of whole answers."""
    num_moved: int = 0
    """Prompts of which pages came from prefill, of whole answers."""
    hints: Counter[str] = field(default_factory=Counter)
    """`HINT: what became of it`, of whole answers that did not come as a stream."""
    worst_late_s: float = float("-inf")
    """By how much the latest answer missed its deadline."""

    @property
    def num_requests(self) -> int:
        return self.outcomes.total()


@dataclass(slots=True)
class Reply:
    """An answer as far as it has come."""

    tokens: list[int] = field(default_factory=list)
    error: str | None = None
    is_complete: bool = False


class Clients:
    """Sends requests of one kind each; raises Broken for a wrong token, a late answer or an answer not allowed."""

    def __init__(
        self, http: httpx.AsyncClient, model: str, lag_s: Callable[[float], float], late_s: float = LATE_S
    ) -> None:
        """`lag_s`: by how much this process itself was late since a time.monotonic(). `late_s`: as LATE_S."""
        self.tally = Tally()
        self._http = http
        self._model = model
        self._lag_s = lag_s
        self._late_s = late_s

    async def ask(self, question: Question, num_tokens: int, deadline_s: float) -> bool:
        """All at once, not streamed. Whether the answer came."""
        await self._make_ready(question, deadline_s)
        began = time.monotonic()
        reply = Reply()
        asked = {**self._body(question, num_tokens), "timings": True}
        answer = await self._http.post(_PATH, json=asked, headers=_deadline(deadline_s))
        if answer.status_code == 200:
            body = answer.json()
            reply.tokens, reply.is_complete = body["choices"][0]["token_ids"], True
            self._note_place(body["usage"]["timings"][0])
            self._note_hints(_hints_of(question), body["usage"])
        else:
            reply.error = self._allowed(answer, question.prompt)
        self._on_time(began, deadline_s)
        return self._judge("plain", question, num_tokens, reply)

    async def stream(self, question: Question, num_tokens: int, deadline_s: float, pause_s: float = 0.0) -> bool:
        """Event by event, pausing after each. Whether the whole answer came."""
        kind = "slow stream" if pause_s else "stream"
        await self._make_ready(question, deadline_s)
        reply = Reply()
        began = time.monotonic()
        async for _ in self._events(question, num_tokens, deadline_s, reply):
            if pause_s:
                await asyncio.sleep(pause_s)
            else:
                self._on_time(began, deadline_s)
        if not pause_s:
            self._on_time(began, deadline_s)
        return self._judge(kind, question, num_tokens, reply)

    async def leave(self, question: Question, num_tokens: int, after_s: float, after_events: int) -> None:
        """Hang up after so many seconds or events, whichever comes first."""
        reply = Reply()
        try:
            async with asyncio.timeout(after_s):
                async for number in self._events(question, num_tokens, 10.0, reply):
                    if number >= after_events:
                        break
        except TimeoutError:
            pass
        _assert_prefix(question, reply)
        if reply.error or reply.is_complete:
            self._judge("leaver", question, num_tokens, reply)
        else:
            self.tally.num_left += 1
            self.tally.outcomes["leaver: left"] += 1

    async def misbehave(self, draw: Random) -> None:
        """One bad request: refused for what it is, or for the state the server is in."""
        name, status, content, headers = draw.choice(BAD_REQUESTS)
        body = json.dumps(content).encode() if isinstance(content, dict) else content
        answer = await self._http.post(_PATH, content=body, headers={"Content-Type": "application/json", **headers})
        if answer.status_code != status:
            self._allowed(answer, name)
        self.tally.outcomes[f"bad request: {answer.status_code}"] += 1

    # ------------------------------------------------------------ one request

    async def _make_ready(self, question: Question, deadline_s: float) -> None:
        """Have a prompt made ready that is asked next, where the question is one of those: nobody sees an answer."""
        if question.prompt[-1] % _OF_PREFETCH != _WHICH_PREFETCH:
            return
        began, hints = time.monotonic(), {"prefetch": True, "retain_s": 5}
        body = {**self._body(question, 1), "kv_hints": hints}
        answer = await self._http.post(_PATH, json=body, headers=_deadline(deadline_s))
        self._on_time(began, deadline_s)
        if answer.status_code != 200:
            self.tally.num_errors += 1
            self.tally.outcomes[f"prefetch: {self._allowed(answer, question.prompt)}"] += 1
            return
        told = answer.json()
        if told["choices"][0]["token_ids"]:
            raise Broken(f"a prefetch was answered with {told['choices'][0]['token_ids']}")
        self._note_hints(hints, told["usage"])
        self.tally.outcomes["prefetch: ready"] += 1

    def _body(self, question: Question, num_tokens: int) -> dict[str, object]:
        return {
            "model": self._model,
            "prompt": list(question.prompt),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **({"kv_hints": hints} if (hints := _hints_of(question)) else {}),
        }

    def _note_place(self, timings: dict[str, float]) -> None:
        """Who computed a prompt."""
        self.tally.num_moved += timings["transferred_bytes"] > 0
        self.tally.num_near += timings["local_wait_tokens"] > 0 and timings["prefill_s"] == 0

    def _note_hints(self, given: Mapping[str, object], usage: dict[str, dict[str, str]]) -> None:
        """Each hint is answered, whatever became of the workers."""
        told = {hint: outcome for hint, outcome in usage.get("kv_hints", {}).items() if hint != "reason"}
        if told.keys() != given.keys():
            raise Broken(f"hints {given}, of which was told {told}")
        self.tally.hints.update(f"{hint}: {outcome}" for hint, outcome in told.items())

    async def _events(self, question: Question, num_tokens: int, deadline_s: float, reply: Reply) -> AsyncIterator[int]:
        """Fills `reply`; yields the number of events so far."""
        body = {**self._body(question, num_tokens), "stream": True}
        async with self._http.stream("POST", _PATH, json=body, headers=_deadline(deadline_s)) as answer:
            if answer.status_code != 200:
                await answer.aread()
                reply.error = self._allowed(answer, question.prompt)
                return
            number = 0
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    reply.is_complete = True
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    reply.error = _allowed_code(event["error"]["code"])
                for choice in event.get("choices", ()):
                    reply.tokens += choice.get("token_ids") or []
                number += 1
                yield number

    def _allowed(self, answer: httpx.Response, what: object) -> str:
        """The code of a refusal that a storm explains."""
        try:
            code = str(answer.json()["error"]["code"])
        except (ValueError, KeyError):
            code = answer.text[:200]
        if code not in REFUSALS.get(answer.status_code, ()):
            raise Broken(f"HTTP {answer.status_code} {code} for {str(what)[:80]}")
        if answer.status_code in (429, 503) and "retry-after" not in answer.headers:
            raise Broken(f"HTTP {answer.status_code} without Retry-After")
        return f"{answer.status_code} {code}"

    def _on_time(self, began: float, deadline_s: float) -> None:
        late_s = time.monotonic() - began - deadline_s
        self.tally.worst_late_s = max(self.tally.worst_late_s, late_s)
        if late_s > self._late_s * _slowness() + self._lag_s(began):
            raise Broken(f"answered {late_s:.2f} s after its deadline of {deadline_s:.1f} s")

    def _judge(self, kind: str, question: Question, num_tokens: int, reply: Reply) -> bool:
        _assert_prefix(question, reply)
        if reply.error is not None:
            self.tally.num_errors += 1
            self.tally.outcomes[f"{kind}: {reply.error}"] += 1
            return False
        if not reply.is_complete or len(reply.tokens) != num_tokens:
            raise Broken(
                f"{kind}: {len(reply.tokens)} of {num_tokens} tokens, no error and complete={reply.is_complete}"
            )
        self.tally.num_right += 1
        self.tally.outcomes[f"{kind}: right"] += 1
        return True


def _hints_of(question: Question) -> dict[str, object]:
    return _HINTS[question.prompt[-1] % len(_HINTS)]


def _assert_prefix(question: Question, reply: Reply) -> None:
    expected = list(question.answer[: len(reply.tokens)])
    if reply.tokens != expected:
        where = next(i for i, (a, b) in enumerate(zip(reply.tokens, [*expected, None], strict=False)) if a != b)
        raise WrongToken(
            f"wrong token {where} of {len(reply.tokens)}: {reply.tokens[where:][:4]}, not {expected[where:][:4]}"
        )


def _allowed_code(code: str) -> str:
    if not any(code in codes for codes in REFUSALS.values()):
        raise Broken(f"error event {code}")
    return f"event {code}"


def _deadline(deadline_s: float) -> dict[str, str]:
    return {DEADLINE_HEADER: f"{deadline_s:g}"}


_GOOD = {"model": "recall-micro", "prompt": [1, 2, 3], "max_tokens": 2}
BAD_REQUESTS: tuple[tuple[str, int, dict[str, object] | bytes, dict[str, str]], ...] = (
    ("not JSON", 400, b'{"model": ', {}),
    ("wrong model", 404, {**_GOOD, "model": "another"}, {}),
    ("no prompt", 400, {"model": "recall-micro"}, {}),
    ("a token id beyond the vocabulary", 400, {**_GOOD, "prompt": [1, 2**31]}, {}),
    ("a negative token id", 400, {**_GOOD, "prompt": [-1]}, {}),
    ("no tokens to make", 400, {**_GOOD, "max_tokens": 0}, {}),
    ("more tokens than there is room for", 400, {**_GOOD, "max_tokens": 2**40}, {}),
    ("hot", 400, {**_GOOD, "temperature": 9}, {}),
    ("a thousand samples", 400, {**_GOOD, "n": 1000}, {}),
    ("an internal name", 400, {**_GOOD, "bootstrap_room": 7}, {}),
    ("a deadline in words", 400, _GOOD, {DEADLINE_HEADER: "soon"}),
    ("XML", 415, b"<prompt/>", {"Content-Type": "text/xml"}),
)
