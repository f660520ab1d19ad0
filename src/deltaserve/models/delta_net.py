"""A recurrent layer: input map, short convolution, gated delta rule, gated norm, output map (Gated DeltaNet)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as functional
from torch import Tensor

from deltaserve.device.attention import StepStates
from deltaserve.models.delta_rule import DeltaTokens, extend_state, normalised, step_states
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

    @classmethod
    def of(cls, states: Sequence[StepStates], device: torch.device) -> Self:
        conv, recurrent = states
        ones, tokens, extends, token = [], [], [], 0
        for index, query in enumerate(conv.queries):
            if query.q_len == 1:
                ones.append(index)
                tokens.append(token)
            else:
                extends.append(_Extend(index, slice(token, token + query.q_len), query.q_start))
            token += query.q_len
        of_ones, of_tokens = (torch.tensor(some, dtype=torch.int64, device=device) for some in (ones, tokens))
        return cls(conv, recurrent, of_ones, of_tokens, tuple(extends))


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
    key_heads = spec.num_key_heads
    blocks = zip(torch.split(after, list(spec.channels), -1), (key_heads, key_heads, spec.num_value_heads), strict=True)
    step.conv.store(layer, *(block.reshape(*block.shape[:2], heads, -1).transpose(1, 2) for block, heads in blocks))
    return functional.silu(out)


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
    step.recurrent.store(layer, states.view(stored.shape))
    return out
