"""Loads of `deltaserve bench` that several benchmarks ask for, by their lengths in tokens."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial

from deltaserve.commands.load.agents import AgentTraffic, Habits, RandomAgent
from deltaserve.commands.load.traffic import Lengths, TokenRange

_NUM_AGENTS, _NUM_TURNS = 2, 10


@dataclass(frozen=True, slots=True)
class LoadShape:
    """Groups of prompts that share a prefix."""

    num_groups: int
    prompts_per_group: int
    system_prompt_len: int
    question_len: int
    output_len: int
    max_concurrency: int

    @property
    def options(self) -> list[str]:
        return _flags(asdict(self))

    def __str__(self) -> str:
        shape = (
            f"{self.num_groups} groups x {self.prompts_per_group}, {self.system_prompt_len} + {self.question_len} in"
        )
        return f"{shape}, {self.output_len} out, {self.max_concurrency} at a time"


@dataclass(frozen=True, slots=True)
class AgentsShape:
    """Two agents with sessions of ten turns, two each or as many as are under way at a time."""

    system_prompt_len: int
    question_len: int
    output_len: int
    max_concurrency: int

    @property
    def options(self) -> list[str]:
        counts = {"num_agents": _NUM_AGENTS, "num_turns": _NUM_TURNS, "sessions_per_agent": self.sessions_per_agent}
        return ["--workload=agents", *_flags(asdict(self) | counts)]

    @property
    def sessions_per_agent(self) -> int:
        return max(2, -(-self.max_concurrency // 2))

    def traffic(self, token_range: TokenRange) -> AgentTraffic:
        """What `deltaserve bench` sends for `options`, of these tokens."""
        lengths = Lengths(self.system_prompt_len, self.question_len, self.output_len)
        make_agent = partial(RandomAgent.make, lengths=lengths, token_range=token_range)
        return AgentTraffic(_NUM_AGENTS, self.sessions_per_agent, make_agent, Habits(_NUM_TURNS))

    def __str__(self) -> str:
        shape = f"agents, turns of {self.system_prompt_len} shared + {self.question_len} in"
        return f"{shape}, {self.output_len} out, {self.max_concurrency} at a time"


Load = LoadShape | AgentsShape


def _flags(sizes: Mapping[str, object]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
