"""Traffic as data: conversations of token-id prompts, made from a seed before anything is sent.

Prompts are token ids, not text, so lengths are exact and prefixes are shared to the token on every tokenizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from deltaserve.core.hints import NO_HINTS, KvHints


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One request of a conversation. Its prompt is all earlier turns with their answers, then `tokens`."""

    tokens: tuple[int, ...]
    output_len: int
    stand_in: tuple[int, ...]
    """`output_len` ids that take the answer's place in the next prompt if the server does not tell its answer's ids."""
    expected: tuple[int, ...] | None = None
    """The right answer, where one can be computed."""
    pause_s: float = 0.0
    """Seconds before it is sent, counted from the answer before it: a tool runs, or a user reads."""
    known_len: int = 0
    """How many of `tokens`, from the first on, an earlier conversation begins with."""
    hints: KvHints = NO_HINTS
    """What its client says of the turns to come."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns to be sent one after the other; turn n + 1 starts `pause_s` after the answer of turn n is complete."""

    turns: tuple[ChatTurn, ...]
    forks: tuple["Fork", ...] = ()
    arrives_s: float | None = None
    """Seconds after the start at which it begins, where the traffic itself says so."""

    @property
    def num_requests(self) -> int:
        return len(self.turns) + sum(len(fork.turns) for fork in self.forks)


@dataclass(frozen=True, slots=True)
class Fork:
    """A branch of a conversation: it goes on behind an answer of it, beside it."""

    after: int
    """Index of the turn whose answer it goes on behind."""
    turns: tuple[ChatTurn, ...]


@dataclass(frozen=True, slots=True)
class TokenRange:
    """The ids to draw random text from: `first <= id < end`."""

    first: int = 32
    end: int = 256

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.end:
            raise ValueError(f"token range {self.first}:{self.end} is empty or negative")

    def sample(self, rng: Random, length: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(self.first, self.end), k=length))


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths in tokens. With range_ratio r < 1 each is drawn uniformly from `[max(1, int(r * length)), length]`."""

    system_prompt_len: int
    question_len: int
    output_len: int
    range_ratio: float = 1.0

    def __post_init__(self) -> None:
        if self.system_prompt_len < 0 or self.question_len < 1 or self.output_len < 1:
            raise ValueError("question_len and output_len must be at least 1, system_prompt_len at least 0")
        if not 0.0 <= self.range_ratio <= 1.0:
            raise ValueError(f"range_ratio is {self.range_ratio}; it must be between 0 and 1")

    def draw(self, rng: Random, length: int) -> int:
        return rng.randint(max(1, int(self.range_ratio * length)), length) if length else 0


@dataclass(frozen=True, slots=True)
class SharedPrefixTraffic:
    """Generated shared prefix: all prompts of a group start with that group's system prompt."""

    num_groups: int
    prompts_per_group: int
    lengths: Lengths
    token_range: TokenRange = TokenRange()

    def generate(self, seed: int) -> list[Conversation]:
        """num_groups * prompts_per_group conversations of one turn, in shuffled order."""
        require_positive(num_groups=self.num_groups, prompts_per_group=self.prompts_per_group)
        rng = Random(f"shared-prefix {seed}")
        conversations = []
        for _ in range(self.num_groups):
            system = _system_prompt(rng, self.lengths, self.token_range)
            conversations += [
                Conversation((random_turn(rng, system, self.lengths, self.token_range),))
                for _ in range(self.prompts_per_group)
            ]
        rng.shuffle(conversations)
        return conversations


@dataclass(frozen=True, slots=True)
class MultiTurnTraffic:
    """Conversations whose turns each append the answer so far and a new question."""

    num_conversations: int
    num_turns: int
    lengths: Lengths
    token_range: TokenRange = TokenRange()

    def generate(self, seed: int) -> list[Conversation]:
        """All conversations start with one common system prompt (none if system_prompt_len is 0)."""
        require_positive(num_conversations=self.num_conversations, num_turns=self.num_turns)
        rng = Random(f"multi-turn {seed}")
        system = _system_prompt(rng, self.lengths, self.token_range)
        return [
            Conversation(
                tuple(
                    random_turn(rng, system if turn == 0 else (), self.lengths, self.token_range)
                    for turn in range(self.num_turns)
                )
            )
            for _ in range(self.num_conversations)
        ]


def random_turn(rng: Random, prefix: Sequence[int], lengths: Lengths, token_range: TokenRange) -> ChatTurn:
    """`prefix`, then a random question; nothing is known about its answer."""
    output_len = lengths.draw(rng, lengths.output_len)
    question = token_range.sample(rng, lengths.draw(rng, lengths.question_len))
    return ChatTurn((*prefix, *question), output_len, token_range.sample(rng, output_len))


def arrival_times(num_conversations: int, rate: float | None, seed: int) -> list[float]:
    """Seconds after the start at which conversations arrive: a Poisson process of `rate` per second, or all at once."""
    if rate is None:
        return [0.0] * num_conversations
    if rate <= 0:
        raise ValueError(f"request rate is {rate}; it must be positive")
    rng = Random(f"arrivals {seed}")
    now_s, times = 0.0, []
    for _ in range(num_conversations):
        times.append(now_s)
        now_s += rng.expovariate(rate)
    return times


def _system_prompt(rng: Random, lengths: Lengths, token_range: TokenRange) -> tuple[int, ...]:
    return token_range.sample(rng, lengths.draw(rng, lengths.system_prompt_len))


def require_positive(**counts: int) -> None:
    """Raises ValueError for a count below 1, with its name."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} is {count}; it must be at least 1")
