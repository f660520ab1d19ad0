"""Traffic of a recorded trace, in the format of Mooncake's public ones: who asked when, and which prompts began alike.

A line is a JSON object for each request (kvcache-ai/Mooncake, FAST25-release: conversation, toolagent and synthetic
traces): `timestamp` in ms, `input_length` and `output_length` in tokens, `hash_ids`, one for each block of 512 tokens
of the prompt. Two prompts that have the same ids up to a block are the same up to its end. The text is not told: here
each id stands for random tokens of its own.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from deltaserve.commands.load.traffic import ChatTurn, Conversation, TokenRange

BLOCK_LEN = 512
"""Tokens of a block of these traces."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A line of a trace. Lengths in tokens."""

    at_s: float
    """After the first one."""
    input_len: int
    output_len: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TraceScale:
    """How large and how fast a trace is sent."""

    block_len: int = BLOCK_LEN
    """Tokens sent for a block of the trace: all lengths shrink or grow with it."""
    speed: float = 1.0
    """How many times as fast its requests come."""

    def __post_init__(self) -> None:
        if self.block_len < 1 or not 0 < self.speed < float("inf"):
            raise ValueError("a block of a trace is at least one token, and its speed is positive")

    def length(self, traced_len: int) -> int:
        """Tokens sent for so many of the trace; at least one."""
        return max(1, round(traced_len * self.block_len / BLOCK_LEN))


def read_trace(path: Path, most: int | None = None) -> list[TracedRequest]:
    """The requests of a file by time, at most the first `most` of its lines. Raises ValueError with the line where one
    is no request, and where there is none."""
    try:
        with path.open(encoding="utf-8") as lines:
            told = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
            requests = [_request(path, number, line) for number, line in islice(told, most)]
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: no UTF-8") from None
    if not requests:
        raise ValueError(f"{path}: no request is in it")
    began_s = min(request.at_s for request in requests)
    shifted = [replace(request, at_s=request.at_s - began_s) for request in requests]
    return sorted(shifted, key=lambda request: request.at_s)


def _request(path: Path, number: int, line: str) -> TracedRequest:
    try:
        told = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}: line {number} is no JSON ({error})") from None
    if not isinstance(told, dict):
        raise ValueError(f"{path}: line {number} is no JSON object")
    blocks = told.get("hash_ids")
    if not isinstance(blocks, list) or not blocks or not all(_is_count(block) for block in blocks):
        raise ValueError(f"{path}: line {number} has no hash_ids (a list of whole numbers)")
    most_len = BLOCK_LEN * len(blocks)
    input_len = _count(path, number, told, "input_length", most_len)
    if not most_len - BLOCK_LEN < input_len <= most_len:
        wanted = -(-input_len // BLOCK_LEN)
        raise ValueError(f"{path}: line {number} has {len(blocks)} hash_ids, input_length {input_len} takes {wanted}")
    output_len = _count(path, number, told, "output_length", 1)
    return TracedRequest(_count(path, number, told, "timestamp", 0) / 1000, input_len, output_len, tuple(blocks))


def _count(path: Path, number: int, told: dict[str, Any], name: str, silent: int) -> int:
    """`silent`: what a line means that does not say."""
    value = told.get(name, silent)
    if not _is_count(value):
        raise ValueError(f"{path}: line {number} has a {name} that is no whole number")
    return int(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True, slots=True)
class TraceTraffic:
    """A conversation of one turn for each request, which starts when the trace says so.

    The trace does not say which requests are turns of one conversation, and has no answers: a later turn's prompt holds
    the earlier answer as blocks of its own, as in the trace.
    """

    requests: Sequence[TracedRequest]
    token_range: TokenRange
    scale: TraceScale = TraceScale()

    def generate(self, seed: int) -> list[Conversation]:
        blocks = _TraceBlocks(seed, self.scale.block_len, self.token_range)
        return [self._conversation(request, blocks, seed) for request in self.requests]

    def _conversation(self, request: TracedRequest, blocks: "_TraceBlocks", seed: int) -> Conversation:
        input_len, output_len = self.scale.length(request.input_len), self.scale.length(request.output_len)
        known_len = min(input_len, blocks.known_len(request.blocks))
        tokens = tuple(islice(blocks.tokens(request.blocks), input_len))
        stand_in = self.token_range.sample(Random(f"answer {seed}"), output_len)
        turn = ChatTurn(tokens, output_len, stand_in, known_len=known_len)
        return Conversation((turn,), arrives_s=request.at_s / self.scale.speed)


class _TraceBlocks:
    """Tokens of each block, and which ones earlier prompts had."""

    def __init__(self, seed: int, block_len: int, token_range: TokenRange) -> None:
        self._seed = seed
        self._block_len = block_len
        self._token_range = token_range
        self._tokens: dict[int, tuple[int, ...]] = {}

    def known_len(self, blocks: Iterable[int]) -> int:
        """Tokens of the leading blocks that an earlier prompt had. To be asked before `tokens`."""
        known = 0
        for block in blocks:
            if block not in self._tokens:
                break
            known += self._block_len
        return known

    def tokens(self, blocks: Iterable[int]) -> Iterator[int]:
        for block in blocks:
            if block not in self._tokens:
                rng = Random(f"trace {self._seed} {block}")
                self._tokens[block] = self._token_range.sample(rng, self._block_len)
            yield from self._tokens[block]
