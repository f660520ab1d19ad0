"""Traffic of agents: sessions of many turns behind a long prefix that others share, with pauses while a tool runs.

The form is that of a public recipe on which P/D lost to one server (dynamo#13899: 57,600 shared tokens, 6,400 new ones,
400 of output, nine tenths of a prompt known already). Sessions fork, as an agent does that tries two ways, and some
branches are left before their end.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

from deltaserve.commands.load.recall import DocumentShape, make_document, make_question
from deltaserve.commands.load.traffic import (
    ChatTurn,
    Conversation,
    Fork,
    Lengths,
    TokenRange,
    random_turn,
    require_positive,
)


class Agent(Protocol):
    """What the sessions of one agent have in common, and what each of their turns says."""

    @property
    def prefix(self) -> tuple[int, ...]:
        """Tokens that each of its sessions begins with."""
        ...

    def turn(self, rng: Random) -> ChatTurn:
        """What a user or a tool says, without the prefix."""
        ...


class AgentMaker(Protocol):
    """Makes agents."""

    def __call__(self, rng: Random) -> Agent: ...


@dataclass(frozen=True, slots=True)
class RandomAgent:
    """Any tokens; nothing is known about answers."""

    prefix: tuple[int, ...]
    lengths: Lengths
    token_range: TokenRange

    @classmethod
    def make(cls, rng: Random, lengths: Lengths, token_range: TokenRange) -> "RandomAgent":
        return cls(token_range.sample(rng, lengths.system_prompt_len), lengths, token_range)

    def turn(self, rng: Random) -> ChatTurn:
        return random_turn(rng, (), self.lengths, self.token_range)


class RecallAgent:
    """Reads a document of the recall task; each turn asks for a chain of names."""

    def __init__(self, rng: Random, shape: DocumentShape, answer_len: int) -> None:
        self._document = make_document(rng, shape)
        self._answer_len = answer_len

    @property
    def prefix(self) -> tuple[int, ...]:
        return self._document.tokens

    def turn(self, rng: Random) -> ChatTurn:
        return make_question(self._document, rng.choice(list(self._document.successor)), self._answer_len)


@dataclass(frozen=True, slots=True)
class Habits:
    """How sessions go on."""

    num_turns: int = 10
    pause_s: float = 0.0
    """Mean seconds that a tool takes, drawn exponentially; its result is the next turn."""
    fork_share: float = 0.2
    """Sessions that try two ways from some turn on."""
    abandoned_share: float = 0.2
    """Sessions and forks that end before their last turn."""

    def __post_init__(self) -> None:
        if self.num_turns < 1 or self.pause_s < 0:
            raise ValueError("an agent has at least one turn, and no pause is negative")
        if not (0 <= self.fork_share <= 1 and 0 <= self.abandoned_share <= 1):
            raise ValueError("shares of sessions are between 0 and 1")


@dataclass(frozen=True, slots=True)
class AgentTraffic:
    """Sessions of several agents, in shuffled order."""

    num_agents: int
    sessions_per_agent: int
    make_agent: AgentMaker
    habits: Habits = Habits()

    def generate(self, seed: int) -> list[Conversation]:
        """`num_agents * sessions_per_agent` conversations; the first one of each agent finds nothing of its prefix."""
        require_positive(num_agents=self.num_agents, sessions_per_agent=self.sessions_per_agent)
        rng = Random(f"agents {seed}")
        agents = [self.make_agent(rng) for _ in range(self.num_agents)]
        order = [number for number in range(self.num_agents) for _ in range(self.sessions_per_agent)]
        rng.shuffle(order)
        known: set[int] = set()
        sessions = []
        for number in order:
            sessions.append(self._session(rng, agents[number], is_known=number in known))
            known.add(number)
        return sessions

    def _session(self, rng: Random, agent: Agent, *, is_known: bool) -> Conversation:
        habits = self.habits
        turns = tuple(self._turns(rng, agent, self._num_kept(rng, habits.num_turns)))
        prefix = agent.prefix
        known_len = len(prefix) if is_known else 0
        first = replace(turns[0], tokens=(*prefix, *turns[0].tokens), pause_s=0.0, known_len=known_len)
        forks = []
        if len(turns) > 1 and rng.random() < habits.fork_share:
            after = rng.randrange(len(turns) - 1)
            rest = self._num_kept(rng, habits.num_turns - after - 1)
            forks.append(Fork(after, tuple(self._turns(rng, agent, rest))))
        return Conversation((first, *turns[1:]), tuple(forks))

    def _num_kept(self, rng: Random, num_turns: int) -> int:
        is_abandoned = rng.random() < self.habits.abandoned_share
        return rng.randint(1, num_turns) if is_abandoned else num_turns

    def _turns(self, rng: Random, agent: Agent, count: int) -> Iterator[ChatTurn]:
        for _ in range(count):
            pause_s = rng.expovariate(1 / self.habits.pause_s) if self.habits.pause_s else 0.0
            yield replace(agent.turn(rng), pause_s=pause_s)
