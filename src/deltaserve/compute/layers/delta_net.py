"""A recurrent layer: input map, short convolution, gated delta rule, gated norm, output map (Gated DeltaNet).

Of a query whose last tokens are guesses no state is stored: `UndecidedStates` has what its tokens bring, and takes in
those that were right once it is known which (decoder.py, `Hidden`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from deltaserve.compute.attention.attention import StepStates
from deltaserve.compute.layers.activations import sigmoid, silu, softplus
from deltaserve.compute.layers.delta_rule import DeltaRun, DeltaRuns, DeltaTokens, joined, normalised
from deltaserve.compute.layers.layer_kind import LastTokens, LayerStep, Meeting, Place, PreparedTokens
from deltaserve.compute.layers.step_ops import StepOps
from deltaserve.compute.weights.targets import Linear, TargetTable
from deltaserve.model.code_plan import CodeRules
from deltaserve.model.layers.delta_net import DeltaSpec


@dataclass(frozen=True, slots=True)
class StepTokens:
    """How a step's tokens belong to its queries, and their states: made once, used by every recurrent layer."""

    conv: StepStates
    recurrent: StepStates
    runs: DeltaRuns
    """Runs of queries that do not end in guesses."""
    undecided: "UndecidedStates | None"

    @classmethod
    def of(cls, spec: DeltaSpec, states: Sequence[StepStates], device: torch.device) -> Self:
        conv, recurrent = states
        if conv.single_tokens is not None:
            return cls(conv, recurrent, DeltaRuns.one_each(conv.single_tokens, device), None)
        runs, guessed, token = [], [], 0
        for index, query in enumerate(conv.queries):
            tokens = slice(token, token + query.q_len)
            if index in conv.undecided:
                guessed.append(DeltaRun(index, tokens, None))
            else:
                runs.append(DeltaRun(index, tokens, query.q_start))
            token += query.q_len
        undecided = UndecidedStates.of(spec, (conv, recurrent), guessed, device) if guessed else None
        return cls(conv, recurrent, DeltaRuns.of(runs, device), undecided)


@dataclass(frozen=True, slots=True)
class UndecidedStates:
    """States of a step's queries that end in guesses, as they were before it, and what its tokens bring."""

    spec: DeltaSpec
    conv: StepStates
    recurrent: StepStates
    queries: tuple[DeltaRun, ...]
    those: Tensor  # [U] int64 indexes of the queries
    others: Tensor  # [B - U] int64 of all others of the step
    windows: list[tuple[Tensor, ...]]
    """Inputs of the convolution, by layer that has computed and by query: [taps - 1 + T, C]."""
    tokens: list[tuple[DeltaTokens, ...]]
    """Inputs of the delta rule, by layer and by query: [T, ..]."""

    @classmethod
    def of(
        cls, spec: DeltaSpec, states: Sequence[StepStates], queries: Sequence[DeltaRun], device: torch.device
    ) -> "UndecidedStates":
        conv, recurrent = states
        those = {query.state for query in queries}
        others = [index for index in range(len(conv.queries)) if index not in those]
        indexes = [torch.tensor(some, dtype=torch.int64, device=device) for some in (sorted(those), others)]
        return cls(spec, conv, recurrent, tuple(queries), indexes[0], indexes[1], [], [])

    def step_through(self, layer: int, lens: Sequence[int], ops: StepOps) -> tuple[Tensor, Tensor]:
        """Recurrent states after the first `lens` tokens [U, ..], and what those tokens read [sum of lens, ..]."""
        (stored,) = self.recurrent.load(layer, self.those)  # [U, Hv, 1, K * V]
        tokens = joined([part.part(slice(0, length)) for part, length in zip(self.tokens[layer], lens, strict=True)])
        states = states_of(stored, tokens)
        ends = np.cumsum(lens).tolist()
        runs = [DeltaRun(index, slice(ends[index] - length, ends[index]), None) for index, length in enumerate(lens)]
        read = ops.recurred(tokens, states, DeltaRuns.of(runs, stored.device))
        return states.view(stored.shape), read

    def settle(self, lens: Sequence[int], ops: StepOps) -> None:
        """Store the states behind the first `lens` tokens of these queries, one at least: the others were wrong."""
        for layer, windows in enumerate(self.windows):
            num_kept = len(windows[0]) - len(self.tokens[layer][0].k)
            kept = [window[length : length + num_kept] for window, length in zip(windows, lens, strict=True)]
            self.conv.store(layer, *_blocks(torch.stack(kept), self.spec), some=self.those)
            self.recurrent.store(layer, self.step_through(layer, lens, ops)[0], some=self.those)


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """C channels of the convolution: queries, keys, values."""

    spec: DeltaSpec
    inputs: Linear  # [C + Hv * V + 2 Hv, hidden]: channels, gates, beta, decay
    kernel: Tensor  # [C, 1, taps], the newest token last
    decay: Tensor  # [Hv] float32, log of the rate
    decay_bias: Tensor  # [Hv] float32
    norm: Tensor  # [V]
    out: Linear  # [hidden, Hv * V]

    def packed(self, rules: CodeRules) -> "DeltaWeights":
        return replace(self, inputs=self.inputs.packed(rules), out=self.out.packed(rules))

    def begin(self, states: Sequence[StepStates], device: torch.device) -> StepTokens:
        return StepTokens.of(self.spec, states, device)

    def prepare(self, x: Tensor, place: Place, step: LayerStep) -> PreparedTokens:
        rows = self.inputs.product(x, step.ops)
        return PreparedTokens((rows,), (self._split(rows)[1],))

    def meet(
        self, tokens: tuple[Tensor, ...], place: Place, meeting: Meeting, last: LastTokens | None
    ) -> Tensor | None:
        """[N, Hv, V] float32; the states of all the step's requests move on."""
        assert isinstance(meeting.shared, StepTokens)
        channels, _, beta, decay = self._split(tokens[0])
        read = _moved_on(channels, beta, decay, self, meeting.ops, meeting.shared, place.index)
        if last is None:
            return read
        return read.index_select(0, last.tokens) if last.attention else None

    def room(self, num_tokens: int, like: Tensor) -> Tensor:
        return like.new_zeros((num_tokens, self.spec.num_value_heads, self.spec.value_dim), dtype=torch.float32)

    def finish(self, met: Tensor, waiting: tuple[Tensor, ...], step: LayerStep) -> Tensor:
        gate = waiting[0]  # [N, Hv * V]
        normed = functional.rms_norm(met, met.shape[-1:], self.norm.float(), step.norm_eps)
        gated = normed * silu(gate.float().view(normed.shape))
        return self.out.product(gated.flatten(1).to(gate.dtype), step.ops)

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """What the input map gives of each token: channels of the convolution, gates, beta, decay."""
        heads, num_channels = self.spec.num_value_heads, sum(self.spec.channels)
        return torch.split(rows, [num_channels, heads * self.spec.value_dim, heads, heads], -1)


def allocate(table: TargetTable, spec: DeltaSpec, prefix: str) -> DeltaWeights:
    prefix = f"{prefix}.linear_attn"
    inputs = ("in_proj_qkvz", "in_proj_ba") if spec.grouped else ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    return DeltaWeights(
        spec,
        inputs=table.fused(prefix, *inputs),
        kernel=table.whole(f"{prefix}.conv1d.weight"),
        decay=table.exact.whole(f"{prefix}.A_log"),
        decay_bias=table.exact.whole(f"{prefix}.dt_bias"),
        norm=table.whole(f"{prefix}.norm.weight"),
        out=table.fused(prefix, "out_proj"),
    )


def _moved_on(
    channels: Tensor, beta: Tensor, decay: Tensor, weights: DeltaWeights, ops: StepOps, step: StepTokens, layer: int
) -> Tensor:
    """channels [T, C], beta, decay [T, Hv] -> [T, Hv, V] float32: what tokens read of the states, which move on."""
    spec = weights.spec
    q, k, v = torch.split(_convolved(channels, weights.kernel[:, 0].t(), spec, step, layer), list(spec.channels), -1)
    per_key = (-1, spec.num_key_heads, spec.num_value_heads // spec.num_key_heads)
    log_decay = -weights.decay.exp() * softplus(decay.float() + weights.decay_bias)
    tokens = DeltaTokens(
        q=normalised(q.reshape(len(q), spec.num_key_heads, -1)) * spec.key_dim**-0.5,
        k=normalised(k.reshape(len(k), spec.num_key_heads, -1)),
        v=v.reshape(*per_key, spec.value_dim),
        log_decay=log_decay.view(per_key),
        beta=sigmoid(beta.float()).view(per_key),
    )
    return _recurred(tokens, step, layer, ops).view(-1, spec.num_value_heads, spec.value_dim)


def _convolved(channels: Tensor, kernel: Tensor, spec: DeltaSpec, step: StepTokens, layer: int) -> Tensor:
    """channels [T, C], kernel [taps, C] -> [T, C] float32; the inputs of each request's last tokens are kept."""
    before = _side_by_side(step.conv.load(layer)).to(channels.dtype)  # [B, taps - 1, C]
    runs = step.runs
    if runs.are_one_each(before, channels):
        window = torch.cat((before, channels[:, None]), 1)
        step.conv.store(layer, *_blocks(window[:, 1:], spec))
        return silu(_taps(window, kernel)[:, 0])
    out = torch.empty(channels.shape, dtype=torch.float32, device=channels.device)
    after = torch.empty_like(before)
    if len(runs.ones):
        window = torch.cat((before[runs.ones], channels[runs.tokens, None]), 1)
        out[runs.tokens] = _taps(window, kernel)[:, 0]
        after[runs.ones] = window[:, 1:]
    for run in runs.longer:
        window = torch.cat((before[run.state], channels[run.tokens]))
        out[run.tokens] = _taps(window, kernel)
        after[run.state] = window[len(window) - before.shape[1] :]
    guessed = step.undecided
    if guessed is None:
        step.conv.store(layer, *_blocks(after, spec))
        return silu(out)
    windows = tuple(torch.cat((before[query.state], channels[query.tokens])) for query in guessed.queries)
    for query, window in zip(guessed.queries, windows, strict=True):
        out[query.tokens] = _taps(window, kernel)
    guessed.windows.append(windows)
    step.conv.store(layer, *_blocks(after[guessed.others], spec), some=guessed.others)
    return silu(out)


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


def states_of(stored: Tensor, tokens: DeltaTokens) -> Tensor:
    """stored [B, Hv, 1, K * V] -> [B, Hk, G, K, V] float32, a copy or `stored` itself"""
    return stored.float().view(len(stored), *tokens.beta.shape[1:], tokens.k.shape[-1], tokens.v.shape[-1])


def _recurred(tokens: DeltaTokens, step: StepTokens, layer: int, ops: StepOps) -> Tensor:
    """-> [T, Hk, G, V] float32"""
    (stored,) = step.recurrent.load(layer)  # [B, Hv, 1, K * V]
    states = states_of(stored, tokens)
    out = ops.recurred(tokens, states, step.runs)
    guessed = step.undecided
    if guessed is None:
        step.recurrent.store(layer, states.view(stored.shape))
        return out
    guessed.tokens.append(tuple(tokens.part(query.tokens) for query in guessed.queries))
    lens = [query.num_tokens for query in guessed.queries]
    read_by_all = guessed.step_through(layer, lens, ops)[1]
    for query, read in zip(guessed.queries, torch.split(read_by_all, lens), strict=True):
        out[query.tokens] = read
    step.recurrent.store(layer, states.view(stored.shape)[guessed.others], some=guessed.others)
    return out
