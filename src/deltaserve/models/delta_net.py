"""A recurrent layer: input map, short convolution, gated delta rule, gated norm, output map (Gated DeltaNet).

Of a query whose last tokens are guesses no state is stored: `UndecidedStates` has what its tokens bring, and takes in
those that were right once it is known which (models/decoder.py, `Hidden`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as functional
from torch import Tensor

from deltaserve.device.attention import StepStates
from deltaserve.models.delta_rule import DeltaTokens, extend_state, joined, normalised, step_states
from deltaserve.models.layers import linear
from deltaserve.models.model_spec import DeltaSpec
from deltaserve.models.step_ops import StepOps
from deltaserve.models.weights import DeltaWeights


@dataclass(frozen=True, slots=True)
class _Extend:
    """A query of several tokens."""

    index: int
    """Of the query."""
    tokens: slice
    """Of the step."""
    start: int
    """Position of the first one."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """How a step's tokens belong to its queries, and their states: made once, used by every recurrent layer."""

    conv: StepStates
    recurrent: StepStates
    ones: Tensor  # [B1] int64: queries of one token, which are computed together
    tokens: Tensor  # [B1] int64: those tokens
    extends: tuple[_Extend, ...]
    undecided: "UndecidedStates | None"

    @classmethod
    def of(cls, states: Sequence[StepStates], device: torch.device) -> Self:
        conv, recurrent = states
        ones, tokens, extends, token = [], [], [], 0
        guessed: list[_Extend] = []
        for index, query in enumerate(conv.queries):
            if index in conv.undecided:
                guessed.append(_Extend(index, slice(token, token + query.q_len), query.q_start))
            elif query.q_len == 1:
                ones.append(index)
                tokens.append(token)
            else:
                extends.append(_Extend(index, slice(token, token + query.q_len), query.q_start))
            token += query.q_len
        of_ones, of_tokens = (torch.tensor(some, dtype=torch.int64, device=device) for some in (ones, tokens))
        undecided = UndecidedStates.of(conv, recurrent, guessed, device) if guessed else None
        return cls(conv, recurrent, of_ones, of_tokens, tuple(extends), undecided)


@dataclass(frozen=True, slots=True)
class UndecidedStates:
    """States of a step's queries that end in guesses, as they were before it, and what its tokens bring."""

    conv: StepStates
    recurrent: StepStates
    queries: tuple[_Extend, ...]
    those: Tensor  # [U] int64 indexes of the queries
    others: Tensor  # [B - U] int64 of all others of the step
    windows: list[tuple[Tensor, ...]]
    """Of each layer that has computed, of each of these queries: [taps - 1 + T, C], the inputs of the convolution."""
    tokens: list[tuple[DeltaTokens, ...]]
    """The same: [T, ..]"""

    @classmethod
    def of(
        cls, conv: StepStates, recurrent: StepStates, queries: Sequence[_Extend], device: torch.device
    ) -> "UndecidedStates":
        those = {query.index for query in queries}
        others = [index for index in range(len(conv.queries)) if index not in those]
        indexes = [torch.tensor(some, dtype=torch.int64, device=device) for some in (sorted(those), others)]
        return cls(conv, recurrent, tuple(queries), indexes[0], indexes[1], [], [])

    def step_through(self, layer: int, lens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Recurrent states after the first `lens` tokens [U, ..], and what those tokens read [sum of lens, ..]."""
        (stored,) = self.recurrent.load(layer, self.those)  # [U, Hv, 1, K * V]
        tokens = self.tokens[layer]
        heads, dims = tokens[0].beta.shape[1:], (tokens[0].k.shape[-1], tokens[0].v.shape[-1])
        states = stored.float().view(len(stored), *heads, *dims)
        outs: list[list[Tensor]] = [[] for _ in tokens]
        for at in range(max(lens)):
            on = [index for index, length in enumerate(lens) if at < length]
            some = states[on]
            read = step_states(joined([tokens[index].part(slice(at, at + 1)) for index in on]), some)
            states[on] = some
            for index, of_query in zip(on, torch.split(read, 1), strict=True):
                outs[index].append(of_query)
        return states.view(stored.shape), torch.cat([out for of_query in outs for out in of_query])

    def settle(self, lens: Sequence[int], spec: DeltaSpec) -> None:
        """Only the first `lens` tokens of these queries were right, one at least: their states are stored."""
        for layer, windows in enumerate(self.windows):
            num_kept = len(windows[0]) - len(self.tokens[layer][0].k)
            kept = [window[length : length + num_kept] for window, length in zip(windows, lens, strict=True)]
            self.conv.store(layer, *_blocks(torch.stack(kept), spec), some=self.those)
            self.recurrent.store(layer, self.step_through(layer, lens)[0], some=self.those)


def mix_tokens(
    x: Tensor, weights: DeltaWeights, spec: DeltaSpec, norm_eps: float, ops: StepOps, step: StepTokens, layer: int
) -> Tensor:
    """x [T, hidden] -> [T, hidden], a sum over the heads of `spec`; the states of the step's requests move on."""
    heads, num_channels = spec.num_value_heads, sum(spec.channels)
    rows = linear(x, weights.inputs, ops)
    channels, gate, beta, decay = torch.split(rows, [num_channels, heads * spec.value_dim, heads, heads], -1)
    q, k, v = torch.split(_convolved(channels, weights.kernel[:, 0].t(), spec, step, layer), list(spec.channels), -1)
    per_key = (-1, spec.num_key_heads, heads // spec.num_key_heads)
    log_decay = -weights.decay.exp() * functional.softplus(decay.float() + weights.decay_bias)
    tokens = DeltaTokens(
        q=normalised(q.reshape(len(q), spec.num_key_heads, -1)) * spec.key_dim**-0.5,
        k=normalised(k.reshape(len(k), spec.num_key_heads, -1)),
        v=v.reshape(*per_key, spec.value_dim),
        log_decay=log_decay.view(per_key),
        beta=beta.float().sigmoid().view(per_key),
    )
    out = _recurred(tokens, step, layer).view(-1, heads, spec.value_dim)
    normed = functional.rms_norm(out, out.shape[-1:], weights.norm.float(), norm_eps)
    gated = normed * functional.silu(gate.float().view(normed.shape))
    return linear(gated.flatten(1).to(x.dtype), weights.out, ops)


def _convolved(channels: Tensor, kernel: Tensor, spec: DeltaSpec, step: StepTokens, layer: int) -> Tensor:
    """channels [T, C], kernel [taps, C] -> [T, C] float32; the inputs of each request's last tokens are kept."""
    before = _side_by_side(step.conv.load(layer)).to(channels.dtype)  # [B, taps - 1, C]
    out = torch.empty(channels.shape, dtype=torch.float32, device=channels.device)
    after = torch.empty_like(before)
    if len(step.ones):
        window = torch.cat((before[step.ones], channels[step.tokens, None]), 1)
        out[step.tokens] = _taps(window, kernel)[:, 0]
        after[step.ones] = window[:, 1:]
    for extend in step.extends:
        window = torch.cat((before[extend.index], channels[extend.tokens]))
        out[extend.tokens] = _taps(window, kernel)
        after[extend.index] = window[len(window) - before.shape[1] :]
    guessed = step.undecided
    if guessed is None:
        step.conv.store(layer, *_blocks(after, spec))
        return functional.silu(out)
    windows = tuple(torch.cat((before[query.index], channels[query.tokens])) for query in guessed.queries)
    for query, window in zip(guessed.queries, windows, strict=True):
        out[query.tokens] = _taps(window, kernel)
    guessed.windows.append(windows)
    step.conv.store(layer, *_blocks(after[guessed.others], spec), some=guessed.others)
    return functional.silu(out)


def _blocks(inputs: Tensor, spec: DeltaSpec) -> Iterator[Tensor]:
    """[B, rows, C] -> of each block [B, heads, rows, width]"""
    heads = (spec.num_key_heads, spec.num_key_heads, spec.num_value_heads)
    for block, count in zip(torch.split(inputs, list(spec.channels), -1), heads, strict=True):
        yield block.reshape(*block.shape[:2], count, block.shape[2] // count).transpose(1, 2)


def _side_by_side(blocks: Sequence[Tensor]) -> Tensor:
    """[B, heads, rows, width] each -> [B, rows, channels of all]"""
    return torch.cat([block.transpose(1, 2).flatten(2) for block in blocks], -1)


def _taps(window: Tensor, kernel: Tensor) -> Tensor:
    """[.., taps - 1 + T, C] -> [.., T, C] float32, in one order of summation for any T."""
    taps = len(kernel)
    length = window.shape[-2] - taps + 1
    wide, weights = window.float(), kernel.float()
    total = wide[..., :length, :] * weights[0]
    for tap in range(1, taps):
        total.addcmul_(wide[..., tap : tap + length, :], weights[tap])
    return total


def _recurred(tokens: DeltaTokens, step: StepTokens, layer: int) -> Tensor:
    """-> [T, Hk, G, V] float32"""
    (stored,) = step.recurrent.load(layer)  # [B, Hv, 1, K * V]
    heads, dims = tokens.beta.shape[1:], (tokens.k.shape[-1], tokens.v.shape[-1])
    states = stored.float().view(len(stored), *heads, *dims)
    out = torch.empty_like(tokens.v)
    if len(step.ones) == len(states):
        out = step_states(tokens, states)
    elif len(step.ones):
        some = states[step.ones]
        out[step.tokens] = step_states(tokens.part(step.tokens), some)
        states[step.ones] = some
    for extend in step.extends:
        some_tokens = tokens.part(extend.tokens)
        out[extend.tokens], states[extend.index] = extend_state(some_tokens, states[extend.index], extend.start)
    guessed = step.undecided
    if guessed is None:
        step.recurrent.store(layer, states.view(stored.shape))
        return out
    guessed.tokens.append(tuple(tokens.part(query.tokens) for query in guessed.queries))
    lens = [query.tokens.stop - query.tokens.start for query in guessed.queries]
    read_by_all = guessed.step_through(layer, lens)[1]
    for query, read in zip(guessed.queries, torch.split(read_by_all, lens), strict=True):
        out[query.tokens] = read
    step.recurrent.store(layer, states.view(stored.shape)[guessed.others], some=guessed.others)
    return out
