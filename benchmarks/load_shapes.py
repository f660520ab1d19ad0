"""Loads of `deltaserve bench` that several benchmarks ask for, by their lengths in tokens."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass


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
        sessions = max(2, -(-self.max_concurrency // 2))
        sizes = asdict(self) | {"num_agents": 2, "num_turns": 10, "sessions_per_agent": sessions}
        return ["--workload=agents", *_flags(sizes)]

    def __str__(self) -> str:
        shape = f"agents, turns of {self.system_prompt_len} shared + {self.question_len} in"
        return f"{shape}, {self.output_len} out, {self.max_concurrency} at a time"


Load = LoadShape | AgentsShape


def _flags(sizes: Mapping[str, object]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
