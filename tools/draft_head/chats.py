"""Chats that a model has with itself: it writes the user's turn, and answers. Or it answers prompts that it is given.

A model with a chat template has learnt users' turns with everything else, so behind the template's header of one it
writes what a user may say ("Magpie", Xu et al. 2024, arXiv 2406.08464): no data is needed. Answers are mostly greedy,
as most answers that a head is asked about are. What a head reads of the model comes from the same pass.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, repeat, takewhile
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from deltaserve.compute.executor.sampler import SampleRow, sample
from deltaserve.core.errors import ConfigError
from deltaserve.core.sampling import SamplingParams
from deltaserve.server.text.text_codec import TextCodec
from tools.draft_head.target import Computed, Piece, Target


@dataclass(frozen=True, slots=True)
class ChatForm:
    """A template's tokens around one turn of a user."""

    header: tuple[int, ...]
    footer: tuple[int, ...]
    """The first of them ends the turn."""
    ends: frozenset[int]
    """Tokens that end an answer."""

    @classmethod
    def of(cls, codec: TextCodec, name: str) -> "ChatForm":
        """`name`: of the model, for errors. Raises ConfigError where it has no template, or turns have no end."""
        if not codec.has_chat_template:
            raise ConfigError(f"{name} has no chat template: it cannot write users' turns")
        chats = [codec.encode_chat([{"role": "user", "content": text}], {}) for text in ("Why", "x1 is new")]
        header = _common(*chats)
        footer = _common(*(chat[::-1] for chat in chats))[::-1]
        if not header or not footer:
            raise ConfigError(f"{name}: its chat template puts nothing before and behind a user's turn")
        return cls(header, footer, frozenset(codec.eos_ids))


def _common(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """What both begin with."""
    return tuple(token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@dataclass(frozen=True, slots=True)
class ChatLimits:
    """In tokens."""

    turn_len: int = 72
    """Longer turns of a user are thrown away."""
    answer_len: int = 160
    """Longer answers are cut."""

    def most(self, form: ChatForm) -> int:
        return len(form.header) + self.turn_len + len(form.footer) + self.answer_len + 1


@dataclass(frozen=True, slots=True)
class Chat:
    """One turn of a user, or a prompt, and its answer. n tokens were computed, and one more was drawn behind them."""

    tokens: tuple[int, ...]  # [n + 1]
    first: int
    """Position of the token behind which the first of the answer was drawn."""
    read: Tensor  # [n, 3 * hidden] bfloat16: what entered the layers that a head reads
    normed: Tensor  # [n - first, hidden] bfloat16: what the output matrix read, from `first` on

    @property
    def num_answer_tokens(self) -> int:
        return len(self.tokens) - self.first - 1


_GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)


@dataclass(slots=True)
class _Row:
    tokens: list[int]
    sampling: SamplingParams = _GREEDY
    num_computed: int = 0
    first: int | None = None
    """None: the user still speaks."""
    read: list[Tensor] = field(default_factory=list)
    normed: list[Tensor] = field(default_factory=list)

    def take(self, read: Tensor, normed: Tensor) -> None:
        """Take what a step computed for all its new tokens."""
        self.num_computed = len(self.tokens)
        self.read.append(read.bfloat16())
        if self.first is not None:
            self.normed.append(normed.bfloat16())

    def chat(self) -> Chat:
        assert self.first is not None
        return Chat(tuple(self.tokens), self.first, torch.cat(self.read), torch.cat(self.normed))


class AnswerWriter:
    """Writes the model's answers to prompts, some at a time."""

    def __init__(self, model: Path, num_rows: int, longest: int, answer_len: int, sampled_share: float) -> None:
        """`longest`: tokens of a prompt with its answer; `sampled_share`: of answers that are drawn at temperature 0.7.

        Raises ConfigError.
        """
        self._codec = TextCodec.load(model)
        self._ends = frozenset(self._codec.eos_ids)
        self._num_rows = num_rows
        self._answer_len = answer_len
        self._sampled_share = sampled_share
        self._target = Target(model, num_rows, longest)

    def answers(self, prompts: Sequence[Sequence[int]], seed: int) -> Iterator[Chat]:
        """One to each prompt, each as soon as it is done."""
        rng = Random(seed)
        return self._written((self._answering(_Row(list(prompt)), rng) for prompt in prompts), self._goes_on)

    def _written(self, opened: Iterator[_Row], goes_on: Callable[[_Row, int], bool]) -> Iterator[Chat]:
        """Chats of rows as they are opened; `goes_on` takes a row's next token and says whether it is not at its
        end."""
        rows = dict(enumerate(islice(opened, self._num_rows)))  # line |-> what it holds
        while rows:
            computed = self._target.compute(
                [Piece(line, row.num_computed, tuple(row.tokens[row.num_computed :])) for line, row in rows.items()]
            )
            for line, token in zip(list(rows), self._drawn(list(rows.values()), computed), strict=True):
                row = rows[line]
                if goes_on(row, token):
                    continue
                if row.first is not None:
                    yield row.chat()
                following = next(opened, None)
                if following is None:
                    del rows[line]
                else:
                    rows[line] = following

    def _answering(self, row: _Row, rng: Random) -> _Row:
        """From now on."""
        row.first = len(row.tokens) - 1
        is_sampled = rng.random() < self._sampled_share
        temperature = 0.7 if is_sampled else 0.0
        row.sampling = SamplingParams(max_tokens=1, seed=rng.getrandbits(31), temperature=temperature)
        return row

    def _goes_on(self, row: _Row, token: int) -> bool:
        """Whether an answer goes on."""
        assert row.first is not None
        row.tokens.append(token)
        return token not in self._ends and len(row.tokens) - row.first <= self._answer_len

    def _drawn(self, rows: Sequence[_Row], computed: Computed) -> list[int]:
        """The next token of each; what was computed is taken down."""
        lens = [len(row.tokens) - row.num_computed for row in rows]
        reads = torch.split(computed.read, lens)
        for line, row in enumerate(rows):
            row.take(reads[line], computed.normed[line : line + 1])
        asked = [SampleRow(row.sampling, len(row.tokens), None) for row in rows]
        draws = sample(computed.logits, asked, computed.logits.argmax(-1).tolist())
        return [draw.token for draw in draws]


class Chatter(AnswerWriter):
    """Writes users' turns as well."""

    def __init__(self, model: Path, num_rows: int, limits: ChatLimits, sampled_share: float) -> None:
        """`sampled_share`: of answers. Raises ConfigError."""
        self._form = ChatForm.of(TextCodec.load(model), model.name)
        self._limits = limits
        super().__init__(model, num_rows, limits.most(self._form), limits.answer_len, sampled_share)

    def chats(self, count: int, seed: int, is_new: Callable[[str], bool]) -> Iterator[Chat]:
        """So many, each as soon as it is done. `is_new`: whether a user's turn is to be answered."""
        rng = Random(seed)
        opened = (self._opened(rng) for _ in repeat(None))
        return islice(self._written(opened, partial(self._chat_goes_on, rng, is_new)), count)

    def turn_text(self, tokens: Sequence[int]) -> str:
        return self._codec.decode(tokens, skip_special_tokens=True).strip()

    def turn_of(self, chat: Chat) -> str:
        """The user's."""
        return self.turn_text(chat.tokens[len(self._form.header) : chat.first + 1 - len(self._form.footer)])

    def _opened(self, rng: Random) -> _Row:
        """At the user's turn."""
        sampling = SamplingParams(max_tokens=1, seed=rng.getrandbits(31), temperature=1.0, top_p=0.95)
        return _Row(list(self._form.header), sampling)

    def _chat_goes_on(self, rng: Random, is_new: Callable[[str], bool], row: _Row, token: int) -> bool:
        if row.first is not None:
            return self._goes_on(row, token)
        form, limits = self._form, self._limits
        if token != form.footer[0]:
            row.tokens.append(token)
            return token not in form.ends and len(row.tokens) - len(form.header) <= limits.turn_len
        text = self.turn_text(row.tokens[len(form.header) :])
        if not text or not is_new(text):
            return False
        row.tokens += form.footer
        self._answering(row, rng)
        return True
