"""Steps before anybody waits for one: kernels are compiled or loaded, libraries take their memory, and decode steps are
recorded, so that the first requests find a worker as quick as the later ones.

They are ordinary plans on rows and pages that nobody has yet, given to the executor as a control plane gives its own.
All rows stand on the same pages: what they compute is of no use, only that it is computed. Behind the last plan no row
is open, and what stands in the pages is as little to be read as before the first.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from deltaserve.compute.executor.recordable_models import token_buckets
from deltaserve.compute.executor.recordings import bucket_of, most_tokens
from deltaserve.control.sched.plan import (
    ItemOutcome,
    PageUpdate,
    PlanItem,
    RowOpen,
    StepPlan,
    StepResult,
    TokenValues,
    WorkList,
)
from deltaserve.core.ids import PageId, PoolId, RowId, StepIndex
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import pack_u32

_log = logging.getLogger(__name__)
_TOKEN = 1
_SHORTEST, _SHORT = 16, 256
"""Prompts of all powers of two from the first to a whole chunk; the second stands beside decode rows."""
_DECODE_LEN = 1024
"""Context of a row that decodes. A step that was recorded has room for at least as much in all."""
_RULES = (
    SamplingParams(max_tokens=1, seed=0, temperature=0.0),
    SamplingParams(max_tokens=1, seed=0, temperature=0.7),
    SamplingParams(max_tokens=1, seed=0, temperature=0.7, top_p=0.9),
)
"""One for each way in which a recorded step draws (row_rules.py)."""
_ADJUSTED = SamplingParams(max_tokens=1, seed=0, temperature=0.7, top_p=0.9, frequency_penalty=0.5)
"""Its logits are changed before a draw, which is a kernel of its own."""
_OF_HOST = SamplingParams(max_tokens=1, seed=0, temperature=0.0, logprobs=0)
"""The host draws by it. The work lists of such steps are made by kernels of their own, one for each power of two."""
PIECES_BUDGET_S = 4.0
DECODE_BUDGET_S = 8.0
"""No further step of the kind is made to be recorded after that: what is left is recorded when it comes first."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What a worker will be asked for. Lengths in tokens."""

    num_pages: tuple[int, ...]
    """Pages of each pool."""
    page_size: int
    chunk_len: int
    step_len: int
    """Tokens of prompts in a step, at most."""
    split_tokens: int
    max_context_len: int
    max_rows: int
    graph_rows: int | None
    """Rows of the largest decode step that is recorded, and tokens of one that the host draws for, or of a draft head's
    pass; None: none is."""
    piece_tokens: int | None
    """Tokens of the largest other step that is recorded in pieces; None: none is."""
    is_decoding: bool
    """Whether it decodes: a prefill worker does not."""
    num_drafts: int = 0
    """Most guesses at what follows each row."""


def warm_up(compute: Callable[[StepPlan], StepResult], sizes: WarmUp, report: Callable[[str], None]) -> None:
    """Have `compute` execute all kinds of steps once. Blocks for seconds. A step that fails is told, and the next ones
    are made all the same: the worker serves what it can."""
    began = time.monotonic()
    steps = _Steps(compute, sizes)
    report("compiling kernels")
    steps.prompts()
    if sizes.piece_tokens is not None:
        report(f"recording steps of up to {sizes.piece_tokens} tokens in pieces")
        lengths = steps.lengths_in_pieces(sizes.piece_tokens)
        num_made = steps.pieces(lengths, time.monotonic() + PIECES_BUDGET_S)
        steps.beyond_pieces(sizes.piece_tokens)
        _log.info("CUDA graphs: pieces of %d of %d numbers of tokens made first", num_made, len(lengths))
    num_made = 0
    kinds, passes = _decode_kinds(sizes), _pass_lens(sizes)
    if kinds:
        report(f"recording decode steps of up to {kinds[0][0]} tokens")
        end_at = time.monotonic() + DECODE_BUDGET_S
        num_made = steps.decodes(kinds, end_at) + steps.passes(passes, end_at)
    seconds = time.monotonic() - began
    _log.info("warm after %.1f s: %d of %d kinds of decode steps", seconds, num_made, len(kinds) + len(passes))


def _decode_kinds(sizes: WarmUp) -> list[tuple[int, SamplingParams]]:
    """Numbers of tokens, and rules by which rows draw, of decode steps in the order in which they are made: each number
    by each way to draw, behind the first one row whose logits are changed before, and at last a few that the host draws
    for. Where rows guess, the host draws by any rules."""
    buckets = _buckets(sizes)
    if sizes.num_drafts or not buckets:
        return [(num_tokens, _RULES[0]) for num_tokens in buckets]
    kinds = [(num_tokens, rules) for num_tokens in buckets for rules in _RULES]
    of_host = [count for count in buckets if count & (count - 1) == 0 or count == buckets[0]]
    kinds.insert(len(_RULES), (1, _ADJUSTED))
    return [*kinds, *((num_tokens, _OF_HOST) for num_tokens in of_host)]


def _buckets(sizes: WarmUp) -> list[int]:
    """Numbers of tokens: the powers of two, then the others; the largest first, so that smaller ones find the memory of
    larger ones. Where rows guess, half of each, too: behind such a step a head computes two tokens of each row."""
    if not sizes.is_decoding:
        return []
    if sizes.graph_rows is None:
        return [1]
    most = min(sizes.graph_rows, sizes.max_rows * (1 + sizes.num_drafts))
    found = {bucket_of(count, most) for count in range(1, most + 1)}
    if sizes.num_drafts:
        found |= {count // 2 for count in found if count > 1}
    return sorted(found, key=lambda count: (count & (count - 1) > 0 and count != most, -count))


def _pass_lens(sizes: WarmUp) -> list[int]:
    """Numbers of tokens of a head's passes that come where guesses are right: behind decode steps of `_decode_kinds`,
    of which few are, they have two tokens of each row."""
    if sizes.graph_rows is None or not (sizes.num_drafts and sizes.is_decoding):
        return []
    most = most_tokens(sizes.graph_rows, sizes.max_rows, sizes.num_drafts)
    return sorted({bucket_of(count, most) for count in range(2 * sizes.max_rows + 1, most + 1)}, reverse=True)


class _Steps:
    """Plans, one after the other."""

    def __init__(self, compute: Callable[[StepPlan], StepResult], sizes: WarmUp) -> None:
        self._compute = compute
        self._sizes = sizes
        self._longest = min(sizes.chunk_len, sizes.max_context_len)
        self._num_steps = 0

    def prompts(self) -> None:
        """Chunks of all lengths; one behind a prefix, and one beside rows that decode."""
        longest = self._longest
        lengths = [longest]
        while lengths[-1] > _SHORTEST:
            lengths.append(1 << ((lengths[-1] - 1).bit_length() - 1))
        self._open(1, longest, _RULES[0])
        self._step([_prompt(0, 0, longest)])
        if longest > _SHORTEST:
            self._step([_prompt(0, longest - _SHORTEST, _SHORTEST)])
        for length in lengths[1:]:  # what a row draws behind a shorter one takes the place of what it knew there
            self._step([_prompt(0, 0, length)])
        self._close(1)
        num_rows, length = min(2, self._sizes.max_rows), min(_SHORT, longest)
        self._open(num_rows, length, _RULES[1])
        beside = [_decode(row, length - 1, 1) for row in range(1, num_rows)]
        self._step([*beside, _prompt(0, 0, length)])
        self._close(num_rows)

    def lengths_in_pieces(self, most: int) -> list[int]:
        """Numbers of tokens up to `most` that are recorded, of those that one prompt may have."""
        return [length for length in token_buckets(most) if length <= self._longest]

    def pieces(self, lengths: Sequence[int], end_at: float) -> int:
        """A prompt of each length. Returns how many were made in time."""
        self._open(1, self._longest, _RULES[0])
        num_made = 0
        while num_made < len(lengths) and time.monotonic() < end_at:
            self._step([_prompt(0, 0, lengths[num_made])])
            num_made += 1
        self._close(1)
        return num_made

    def beyond_pieces(self, most: int) -> None:
        """A step of one token more than `most`, with short queries and long ones, where there may be such: kernels are
        compiled for the strides of queries, keys and values, which in pieces are others."""
        sizes = self._sizes
        num_of_prompts = min(most, sizes.step_len)
        num_whole, rest = divmod(num_of_prompts, self._longest)
        lens = [*[self._longest] * num_whole, *([rest] if rest else [])]
        num_decode = most + 1 - num_of_prompts
        num_rows = num_decode + len(lens)
        if num_rows > sizes.max_rows or (not sizes.is_decoding and most >= sizes.step_len):
            return
        self._open(num_rows, self._longest, _RULES[0])
        items = [_decode(row, self._longest - 1, 1) for row in range(num_decode)]
        self._step([*items, *(_prompt(row, 0, length) for row, length in enumerate(lens, start=num_decode))])
        self._close(num_rows)

    def decodes(self, kinds: Sequence[tuple[int, SamplingParams]], end_at: float) -> int:
        """A step of each kind: of as many rows as there may be, which verify guesses where those are fewer, and guess.
        Returns how many were made in time."""
        sizes = self._sizes
        for num_made, (num_tokens, rules) in enumerate(kinds):
            if time.monotonic() >= end_at:
                return num_made
            self._decode(_divided(num_tokens, min(num_tokens, sizes.max_rows)), rules, _decode)
        return len(kinds)

    def passes(self, lens: Sequence[int], end_at: float) -> int:
        """A pass of each number of tokens, of all rows: what they compute are no guesses, so all of it is right.
        Returns how many were made in time."""
        num_rows = self._sizes.max_rows
        for num_made, num_tokens in enumerate(lens):
            if time.monotonic() >= end_at:
                return num_made
            self._decode(_divided(num_tokens - num_rows, num_rows), _RULES[0], _prompt)  # and what each draws
        return len(lens)

    def _decode(self, lens: Sequence[int], rules: SamplingParams, item_of: Callable[[int, int, int], PlanItem]) -> None:
        """A step of rows that compute so many tokens, and guess."""
        num_drafts, length = self._sizes.num_drafts, min(_DECODE_LEN, self._sizes.max_context_len)
        start = max(0, length - 1 - 2 * num_drafts)  # behind the guesses that are verified there is room for more
        self._open(len(lens), length, rules)
        items = [item_of(row, start, length_of) for row, length_of in enumerate(lens)]
        self._step([replace(item, wanted_drafts=num_drafts) for item in items])
        self._close(len(lens))

    def _open(self, num_rows: int, length: int, rules: SamplingParams) -> None:
        """Rows of `length` known tokens, all on the same pages; on each more than once where the pool is small."""
        tokens = pack_u32([_TOKEN] * length)
        opens = tuple(RowOpen(RowId(row), rules, tokens, length) for row in range(num_rows))
        places = range(-(-length // self._sizes.page_size))
        updates = [
            PageUpdate(RowId(row), PoolId(pool), 0, tuple(PageId(place % num_pages) for place in places))
            for row in range(num_rows)
            for pool, num_pages in enumerate(self._sizes.num_pages)
        ]
        self._execute(StepPlan(self._next(), (), self._work, opens, tuple(updates)))

    def _close(self, num_rows: int) -> None:
        rows = tuple(RowId(row) for row in range(num_rows))
        self._execute(StepPlan(self._next(), (), self._work, closes=rows))

    def _step(self, items: Sequence[PlanItem]) -> None:
        self._execute(StepPlan(self._next(), tuple(items), self._work))

    @property
    def _work(self) -> WorkList:
        return WorkList(self._sizes.split_tokens)

    def _next(self) -> StepIndex:
        self._num_steps += 1
        return StepIndex(self._num_steps)

    def _execute(self, plan: StepPlan) -> None:
        result = self._compute(plan)
        if any(item.outcome is ItemOutcome.FAILED for item in result.items):
            _log.warning(
                "a first step of %d tokens failed: such steps may fail when they are asked for", plan.num_tokens
            )


def _divided(count: int, num_parts: int) -> list[int]:
    least, num_more = divmod(count, num_parts)
    return [least + (part < num_more) for part in range(num_parts)]


def _prompt(row: int, start: int, length: int) -> PlanItem:
    return PlanItem(RowId(row), start, length, TokenValues(pack_u32([_TOKEN] * length)), samples=True)


def _decode(row: int, position: int, length: int) -> PlanItem:
    """A token, and guesses behind it."""
    tokens = TokenValues(pack_u32([_TOKEN] * length))
    return PlanItem(RowId(row), position, length, tokens, samples=True, num_drafts=length - 1)
