"""What bench_gpu.py asks of a server: the same requests for an engine in this process and over HTTP."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from benchmarks.load_shapes import AgentsShape
from deltaserve.commands.load.traffic import ChatTurn, Conversation, TokenRange

MAX_G1_ID = 10_000
_AGENTS = AgentsShape(1800, 200, 12, 64)
"""Lengths as in bench_agents.py."""
_NUM_CONTROL = 16
"""Tokens at the end of a vocabulary that are none of a text, at most."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. Its answer has `output_len` tokens, whatever they are."""

    prompt: tuple[int, ...]
    output_len: int


@dataclass(frozen=True, slots=True)
class Between:
    """Lengths from `least` to `most`."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class LoadSizes:
    """How much is asked. The numbers of `FULL` are those of docs/performance.md."""

    num_g1: int = 256
    g1_len: Between = Between(100, 1024)
    num_many: int = 64
    """Requests at once where decoding is looked at."""
    short_prompt: int = 96
    one_output: int = 512
    many_output: int = 512
    lone_prompt: int = 1056
    """Prompt of which the time to the first token is looked at, alone."""
    num_groups: int = 8
    per_group: int = 32
    shared_len: int = 2048
    own_len: int = 128
    shared_output: int = 128
    shared_at_once: int = 64
    agents: AgentsShape = _AGENTS
    pages_bytes: int = 1 << 30
    """Written at once between two workers."""
    context_len: int = 8192


FULL = LoadSizes()
SMALL = LoadSizes(
    num_g1=12,
    g1_len=Between(10, 40),
    num_many=4,
    short_prompt=24,
    one_output=24,
    many_output=16,
    lone_prompt=100,
    num_groups=2,
    per_group=3,
    shared_len=128,
    own_len=16,
    shared_output=8,
    shared_at_once=4,
    agents=AgentsShape(64, 16, 4, 4),
    pages_bytes=16 << 20,
    context_len=1024,
)
"""For a tiny model on a CPU: every part is run, and no figure means anything."""


def g1(sizes: LoadSizes, vocab_size: int, shift: int = 0) -> list[Ask]:
    """The load of nano-vLLM's benchmark: its lengths, and its ids but for `shift`, which makes others of them that no
    cache knows. Of the full size 142,827 tokens in and 133,966 out."""
    rng, lens = Random(0), sizes.g1_len
    prompts = [_g1_ids(rng, rng.randint(lens.least, lens.most)) for _ in range(sizes.num_g1)]
    outputs = [rng.randint(lens.least, lens.most) for _ in range(sizes.num_g1)]
    return [
        Ask(tuple((token + shift) % vocab_size for token in prompt), output_len)
        for prompt, output_len in zip(prompts, outputs, strict=True)
    ]


def _g1_ids(rng: Random, length: int) -> list[int]:
    return [rng.randint(0, MAX_G1_ID) for _ in range(length)]


def alike(count: int, prompt_len: int, output_len: int, vocab_size: int, seed: int) -> list[Ask]:
    """Requests of one size with nothing in common."""
    rng = Random(f"alike {seed}")
    return [Ask(_ids(rng, prompt_len, vocab_size), output_len) for _ in range(count)]


def shared_prefixes(sizes: LoadSizes, vocab_size: int, seed: int) -> list[Ask]:
    """Groups of prompts that begin alike, in shuffled order."""
    rng, asks = Random(f"shared {seed}"), []
    for _ in range(sizes.num_groups):
        prefix = _ids(rng, sizes.shared_len, vocab_size)
        asks += [
            Ask(prefix + _ids(rng, sizes.own_len, vocab_size), sizes.shared_output) for _ in range(sizes.per_group)
        ]
    rng.shuffle(asks)
    return asks


def agents_sessions(sizes: LoadSizes, vocab_size: int, seed: int) -> list[Conversation]:
    """Sessions of agents: turns behind each other, and forks."""
    return sizes.agents.traffic(TokenRange(0, vocab_size - _NUM_CONTROL)).generate(seed)


def _ids(rng: Random, count: int, vocab_size: int) -> tuple[int, ...]:
    """Ordinary tokens: the last ones of a vocabulary are control tokens."""
    return tuple(rng.choices(range(vocab_size - _NUM_CONTROL), k=count))


def conversations(asks: Sequence[Ask]) -> list[Conversation]:
    """As the HTTP client of `deltaserve bench` takes them."""
    return [Conversation((ChatTurn(ask.prompt, ask.output_len, ()),)) for ask in asks]
