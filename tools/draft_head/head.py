"""An EAGLE-3 head to be trained: the arithmetic of compute/layers/draft_head.py over whole texts, unrolled on its own
output.

In service the head reads what its model made of a text, and behind that its own states, guess after guess. It is
trained so ("training-time test", Li et al. 2025, arXiv 2503.01840): in pass s the entry of position j reads the state
that pass s - 1 left at j - 1, as s guesses in a row do. It attends to the entries of pass 0 up to position j - s,
which are of the text, and to one of each pass behind them, which are of guesses.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class HeadShape:
    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_guessable: int
    num_read: int
    norm_eps: float


class _Rms(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self._eps)


class _Attention(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden, queries, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden, keys, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=False)


class _Mlp(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = _Rms(shape.hidden, shape.norm_eps)
        self.hidden_norm = _Rms(shape.hidden, shape.norm_eps)
        self.post_attention_layernorm = _Rms(shape.hidden, shape.norm_eps)
        self.self_attn = _Attention(shape)
        self.mlp = _Mlp(shape)


class TrainedHead(nn.Module):
    """Parameters have the names that published heads have."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.num_read * shape.hidden, shape.hidden, bias=False)
        self.midlayer = _Layer(shape)
        self.norm = _Rms(shape.hidden, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden, shape.num_guessable, bias=False)

    def states(self, embedded: Tensor, read: Tensor, rope: tuple[Tensor, Tensor], num_passes: int) -> list[Tensor]:
        """embedded [B, L, hidden] of the tokens, read [B, L, 3 hidden] of the same, `rope` [L, D] both ->
        of each pass [B, L, hidden]: the state behind which the next token is guessed.
        """
        embedded = self.midlayer.input_layernorm(embedded)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        states: list[Tensor] = []
        before = self.fc(read)
        for _ in range(num_passes):
            states.append(self._pass(embedded, _later(before), rope, keys, values))
            before = states[-1]
        return states

    def logits(self, states: Tensor) -> Tensor:
        """[.., hidden] -> [.., guessable]"""
        out: Tensor = self.lm_head(self.norm(states))
        return out

    def _pass(
        self, embedded: Tensor, features: Tensor, rope: tuple[Tensor, Tensor], keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        """`keys`, `values` [B, Hkv, L, D] of the passes before; this one's are added."""
        layer, shape = self.midlayer, self.shape
        both = torch.cat((embedded, layer.hidden_norm(features)), -1)
        attention = layer.self_attn
        q = _turned(_by_head(attention.q_proj(both), shape.head_dim), rope)
        keys.append(_turned(_by_head(attention.k_proj(both), shape.head_dim), rope))
        values.append(_by_head(attention.v_proj(both), shape.head_dim))
        mixed = _attend(q, keys, values)
        x = features + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
        return out


def _later(x: Tensor, by: int = 1, dim: int = 1) -> Tensor:
    """What stands at j - by comes to j; zeros come first."""
    if by == 0:
        return x
    zeros = torch.zeros_like(x.narrow(dim, 0, by))
    return torch.cat((zeros, x.narrow(dim, 0, x.shape[dim] - by)), dim)


def _by_head(x: Tensor, head_dim: int) -> Tensor:
    """[B, L, H D] -> [B, H, L, D]"""
    return x.view(*x.shape[:2], -1, head_dim).transpose(1, 2)


def _turned(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """x [B, H, L, D]; cos, signed sin [L, D]: channel i turns with i + D/2"""
    cos, sin = rope
    first, second = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat((second, first), -1) * sin.to(x.dtype)


def _attend(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """q [B, H, L, D] of the last pass -> [B, H, L, D]"""
    number, length = len(keys) - 1, q.shape[2]
    scale = 1 / math.sqrt(q.shape[-1])
    each = q.shape[1] // keys[0].shape[1]
    keys = [key.repeat_interleave(each, 1) for key in keys]
    values = [value.repeat_interleave(each, 1) for value in values]
    unseen = torch.ones(length, length, dtype=torch.bool).triu(1 - number)
    scores = (q @ keys[0].transpose(-1, -2) * scale).float().masked_fill(unseen, -math.inf)  # [B, H, L, L]
    guesses = [_later(keys[s], number - s, 2) for s in range(1, number + 1)]
    own = [(q * key).sum(-1, keepdim=True).float() * scale for key in guesses]
    weights = torch.cat((scores, *own), -1).softmax(-1).to(q.dtype)
    mixed = weights[..., :length] @ values[0]
    for s in range(1, number + 1):
        mixed = mixed + weights[..., length + s - 1 : length + s] * _later(values[s], number - s, 2)
    return mixed
