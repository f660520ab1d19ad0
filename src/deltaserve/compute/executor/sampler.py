"""Logits -> tokens, for a batch of rows with different rules.

Order of the rules: tokens that a grammar forbids, repetition penalty, frequency and presence penalty, logit bias, bad
words, min_tokens; then (temperature 0) argmax, or temperature, top-k, top-p, min-p, each on what the one before left,
and one uniform number per token looked up in the cumulative distribution in vocabulary order. A row's token depends on
its own logits, rules, seed and output so far only, never on the rest of the batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deltaserve.compute.executor.allowed_tokens import Mask, forbid, with_least_tokens
from deltaserve.compute.executor.candidates import SamplingLimits, draw_among
from deltaserve.compute.executor.penalties import TokenCounts, penalised_row
from deltaserve.compute.executor.randomness import uniform
from deltaserve.compute.executor.row_rules import is_cold, is_limited
from deltaserve.compute.memory.host_arrays import on_device
from deltaserve.core.sampling import NEVER, SamplingParams, TokenLogprobs

_BLOCK = 512
"""Tokens whose weights are summed before they are looked at one by one."""
WHOLE = 2.0**50
"""Unit in which a probability is counted as a whole number: sums of a vocabulary stay exact in float64."""
_SIZE_BITS = 16
"""Bits of a float32 that are left away: what is left has 128 steps from one power of two to the next."""


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row's part in a draw."""

    params: SamplingParams
    position: int
    """Output position of the token to draw, from 0."""
    history: TokenCounts | None
    """Present where the params need it."""
    allowed: Mask | None = None
    """What the row's grammar allows; None: it has none."""
    behind: tuple[int, ...] = ()
    """The last of its output, as many tokens as its longest bad word has before the last."""

    @property
    def is_greedy(self) -> bool:
        """Whether it takes the largest of its logits, when the rules have changed them."""
        return is_cold(self.params)


@dataclass(frozen=True, slots=True)
class Draw:
    token: int
    logprobs: TokenLogprobs | None


def finite_rows(logits: Tensor) -> list[bool]:
    """[N, V] -> whether each row is free of NaN and Inf."""
    low, high = logits.amin(-1), logits.amax(-1)  # both pass NaN on; together 20 times faster than aminmax
    finite: list[bool] = (torch.isfinite(low) & torch.isfinite(high)).tolist()
    return finite


def sample(logits: Tensor, rows: Sequence[SampleRow], largest: Sequence[int] | None = None) -> list[Draw]:
    """logits [N, V] float32, finite, one line per row. May overwrite `logits`.

    `largest`: of each line the first of its largest values, where that is known.
    """
    logprobs = _wanted_logprobs(logits, rows)  # before the rules change the logits
    masks = {
        index: with_least_tokens(row.allowed, row.params, row.position)
        for index, row in enumerate(rows)
        if row.allowed is not None
    }
    if masks:
        forbid(logits, masks)
    known = {} if largest is None else {i: largest[i] for i, row in enumerate(rows) if takes_largest(row)}
    for index, row in enumerate(rows):
        apply_rules(logits[index], row)
    tokens = _choose(logits, rows, known)
    return [Draw(token, _row_logprobs(logprobs.get(index), token)) for index, token in enumerate(tokens)]


def token_logprobs(logits: Tensor, targets: Tensor, num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities of `targets` [N] under logits [N, V], each with the `num_top` most likely tokens."""
    raw = logits.log_softmax(-1)
    top = raw.topk(min(num_top, raw.shape[-1]), -1)
    chosen = raw.gather(1, targets[:, None])[:, 0].tolist()
    pairs = zip(chosen, top.indices.tolist(), top.values.tolist(), strict=True)
    return [TokenLogprobs(own, tuple(zip(ids, values, strict=True))) for own, ids, values in pairs]


@dataclass(frozen=True, slots=True)
class _RawRow:
    """Raw log-probabilities of one row, on the device, and its most likely tokens."""

    line: Tensor  # [V]
    top: tuple[tuple[int, float], ...]


def _wanted_logprobs(logits: Tensor, rows: Sequence[SampleRow]) -> dict[int, _RawRow]:
    wanted = {index: row.params.logprobs for index, row in enumerate(rows) if row.params.logprobs is not None}
    if not wanted:
        return {}
    raw = logits[list(wanted)].log_softmax(-1)  # [W, V]
    top = raw.topk(min(max(wanted.values()), raw.shape[-1]), -1)
    ids, values = top.indices.tolist(), top.values.tolist()
    return {
        index: _RawRow(raw[place], tuple(zip(ids[place][:count], values[place][:count], strict=True)))
        for place, (index, count) in enumerate(wanted.items())
    }


def _row_logprobs(raw: _RawRow | None, token: int) -> TokenLogprobs | None:
    return None if raw is None else TokenLogprobs(float(raw.line[token]), raw.top)


def takes_largest(row: SampleRow) -> bool:
    """Whether it draws the largest of its logits as they come."""
    params = row.params
    has_rules = params.looks_back or params.logit_bias or row.position < params.min_tokens
    return row.is_greedy and not has_rules and row.allowed is None


def apply_rules(line: Tensor, row: SampleRow) -> None:
    """line [V], in place: all that comes before a draw."""
    params = row.params
    if params.needs_history and row.history is not None:
        line.copy_(penalised_row(line, params, row.history))
    if params.logit_bias:
        ids, values = zip(*params.logit_bias, strict=True)
        line.index_add_(
            0, on_device(np.array(ids, np.int64), line.device), on_device(np.array(values, np.float32), line.device)
        )
    if params.bad_words and (bad := list(ends_of_bad_words(params.bad_words, row.behind))):
        line.index_add_(
            0, on_device(np.array(bad, np.int64), line.device), torch.full((len(bad),), NEVER, device=line.device)
        )
    if params.stop_token_ids and row.position < params.min_tokens and row.allowed is None:
        line.index_fill_(0, on_device(np.array(params.stop_token_ids, np.int64), line.device), float("-inf"))


def ends_of_bad_words(words: Sequence[Sequence[int]], behind: Sequence[int]) -> set[int]:
    """Last tokens of the words whose others an output ends in. `behind`: its end."""
    return {word[-1] for word in words if tuple(behind[len(behind) - len(word) + 1 :]) == tuple(word[:-1])}


def _choose(logits: Tensor, rows: Sequence[SampleRow], known: Mapping[int, int]) -> list[int]:
    """[N, V] -> one token per row, those of `known` rows as they are: the rows of each way to draw together."""
    vocab = logits.shape[1]
    tokens = dict(known)
    greedy = [index for index, row in enumerate(rows) if row.is_greedy and index not in tokens]
    if greedy:
        tokens |= zip(greedy, _lines(logits, greedy).argmax(-1).tolist(), strict=True)
    limited = [index for index in range(len(rows)) if index not in tokens and is_limited(rows[index].params, vocab)]
    if limited:
        limits = SamplingLimits.of([(rows[i].params, point_of(rows[i])) for i in limited], vocab, logits.device)
        found, complete = draw_among(_lines(logits, limited), limits)
        drawn = zip(limited, found.tolist(), complete.tolist(), strict=True)
        tokens |= {index: token for index, token, is_certain in drawn if is_certain}
    rest = [index for index in range(len(rows)) if index not in tokens]
    if rest:
        tokens |= zip(rest, _draw(_lines(logits, rest), [rows[index] for index in rest]), strict=True)
    return [tokens[index] for index in range(len(rows))]


def _lines(logits: Tensor, indexes: Sequence[int]) -> Tensor:
    """The rows of [N, V] at `indexes`, without a copy where they are all."""
    return logits if len(indexes) == len(logits) else logits[list(indexes)]


def point_of(row: SampleRow) -> float:
    return uniform(row.params.seed, row.position)


def _draw(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """[N, V] -> one token per row at temperature > 0, over the whole vocabulary."""
    device = logits.device
    logits = scaled(logits, torch.tensor([[row.params.temperature] for row in rows], device=device))
    _keep_top_k(logits, [row.params.top_k for row in rows])
    probs = logits.softmax(-1)  # [N, V]
    for index, row in enumerate(rows):
        if row.params.top_p < 1.0:
            _keep_top_p(probs[index], row.params.top_p)
        if row.params.min_p > 0.0:
            line = probs[index]
            line[line < row.params.min_p * line.max()] = 0.0
    points = torch.tensor([[point_of(row)] for row in rows], dtype=torch.float64, device=device)
    tokens: list[int] = look_up(probs, points).tolist()
    return tokens


def scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """A copy of [N, V], the largest of each line 0, over `temperature` [N, 1]."""
    logits = logits.clamp(max=torch.finfo(logits.dtype).max)  # what a tiny penalty divisor blew up: inf - inf is NaN
    logits -= logits.amax(-1, keepdim=True)
    logits /= temperature
    return logits


def look_up(probs: Tensor, points: Tensor) -> Tensor:
    """probs [N, V], points [N, 1] in [0, 1) -> [N]: the first token whose cumulative weight exceeds the point's share.

    Never one of weight zero, unless all are: then any one. Cumulative sums go over blocks, then within the one found.
    """
    vocab = probs.shape[1]
    body = vocab // _BLOCK * _BLOCK
    sums = (probs[:, :body].reshape(len(probs), body // _BLOCK, _BLOCK).sum(-1), probs[:, body:].sum(-1, keepdim=True))
    cumulative = torch.cat(sums, -1).cumsum(-1, dtype=torch.float64)  # [N, blocks]
    goal = points * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, goal, right=True).clamp(
        max=cumulative.shape[1] - 1
    )  # right: the first above
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)
    ids = block * _BLOCK + torch.arange(_BLOCK, device=probs.device)  # [N, _BLOCK]
    weights = probs.gather(1, ids.clamp(max=vocab - 1)).masked_fill(ids >= vocab, 0.0)
    found = torch.searchsorted(weights.cumsum(-1, dtype=torch.float64) + before, goal, right=True)
    # A block's weights one after the other may end just below the sum of all.
    last = (weights > 0.0).mul(torch.arange(1, _BLOCK + 1, device=probs.device)).amax(-1, keepdim=True) - 1
    return ids.gather(1, torch.minimum(found, last.clamp(min=0)))[:, 0].clamp(max=vocab - 1)


def _keep_top_k(logits: Tensor, limits: Sequence[int | None]) -> None:
    """Everything below the k-th largest becomes -inf, in place; ties with it stay."""
    vocab = logits.shape[-1]
    limited = {index: min(k, vocab) for index, k in enumerate(limits) if k is not None and k < vocab}
    if not limited:
        return
    lines = list(limited)
    largest = logits[lines].topk(max(limited.values()), -1).values  # [n, k max]
    ks = torch.tensor([[k - 1] for k in limited.values()], device=logits.device)
    floor = torch.full((logits.shape[0], 1), float("-inf"), device=logits.device)
    floor[lines] = largest.gather(1, ks)
    logits.masked_fill_(logits < floor, float("-inf"))


def _keep_top_p(line: Tensor, top_p: float) -> None:
    """line [V] of probabilities: all but the smallest set that reaches `top_p` becomes 0; ties with its last stay.

    Their sums are found by size first, so that only those about as large as the last must be put in order.
    """
    weights = line.to(torch.float64).mul_(WHOLE).round_()  # [V] whole numbers: their sums do not depend on the order
    sizes = line.view(torch.int32) >> _SIZE_BITS  # [V] grow with the probability
    largest = sizes.amax()
    sums = torch.bincount(largest - sizes, weights).cumsum(0)  # [sizes], the largest first
    goal = top_p * WHOLE
    at = torch.searchsorted(sums, goal).clamp(max=len(sums) - 1)
    about = (largest - sizes == at).nonzero()[:, 0]
    values, order = line[about].sort(descending=True)
    above = sums[at] - weights[about].sum()
    last = torch.searchsorted(weights[about[order]].cumsum(0) + above, goal).clamp(max=len(values) - 1)
    line[line < values[last]] = 0.0
