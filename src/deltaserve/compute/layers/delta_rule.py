"""The gated delta rule: a state [K, V] of each value head takes in one token after the other.

    S = e^g S;  S = S + k (beta (v - k^T S))^T;  o = q^T S

The native library computes one token after the other (native_ops.py), so that a token's bits follow from those before
it alone. In torch, here, several tokens go in chunks, cut at absolute multiples of 64: what a token gives then has the
same bits however a prompt is cut at such multiples. Within a chunk the values that tokens add to the state solve a
triangular system (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule"); chunks pass the state on.
All of it is in float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as functional
from torch import Tensor

from deltaserve.model.layers.delta_net import CHUNK_LEN, CHUNKS_AT_ONCE


@dataclass(frozen=True, slots=True)
class DeltaTokens:
    """What tokens bring: float32. G value heads share a key head."""

    q: Tensor  # [T, Hk, K]
    k: Tensor  # [T, Hk, K]
    v: Tensor  # [T, Hk, G, V]
    log_decay: Tensor  # [T, Hk, G]
    beta: Tensor  # [T, Hk, G]

    def part(self, tokens: slice | Tensor) -> "DeltaTokens":
        return DeltaTokens(self.q[tokens], self.k[tokens], self.v[tokens], self.log_decay[tokens], self.beta[tokens])


def joined(parts: Sequence[DeltaTokens]) -> DeltaTokens:
    """The parts as one, one behind the other."""
    fields = ([part.q for part in parts], [part.k for part in parts], [part.v for part in parts])
    gates = ([part.log_decay for part in parts], [part.beta for part in parts])
    return DeltaTokens(*map(torch.cat, (*fields, *gates)))


@dataclass(frozen=True, slots=True)
class DeltaRun:
    """Consecutive tokens of one request."""

    state: int
    """Index of its state among the step's."""
    tokens: slice
    """Its tokens among the step's."""
    start: int | None
    """Position of the first one; None: each is computed as a single token is."""

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.stop - self.tokens.start)


@dataclass(frozen=True, slots=True)
class DeltaRuns:
    """Which of a step's tokens move which states: made once, used by every recurrent layer."""

    ones: Tensor  # [B1] int64: states that one token moves, which are computed together
    tokens: Tensor  # [B1] int64: those tokens
    longer: tuple[DeltaRun, ...]
    table: Tensor  # [B1 + runs, 3] int64 on the host, of all: state, first token, number of tokens

    @classmethod
    def one_each(cls, num_states: int, device: torch.device) -> Self:
        """Token i moves state i: on the device nothing comes from the host, so that such a step can be recorded."""
        ones, of_host = torch.arange(num_states, device=device), torch.arange(num_states)
        return cls(ones, ones, (), torch.stack((of_host, of_host, torch.ones_like(of_host)), 1))

    @classmethod
    def of(cls, runs: Sequence[DeltaRun], device: torch.device) -> Self:
        table = torch.tensor([(run.state, run.tokens.start, run.num_tokens) for run in runs], dtype=torch.int64)
        table = table.view(-1, 3)
        ones = table[table[:, 2] == 1].to(device)
        return cls(ones[:, 0], ones[:, 1], tuple(run for run in runs if run.num_tokens > 1), table)

    def are_one_each(self, states: Tensor, tokens: Tensor) -> bool:
        """Whether token i moves state i, for all of these states [B, ..] and tokens [T, ..]."""
        return len(self.ones) == len(states) == len(tokens)


def recurred(tokens: DeltaTokens, states: Tensor, runs: DeltaRuns) -> Tensor:
    """[T, Hk, G, V]: what tokens of runs read, anything for others. `states` [B, Hk, G, K, V] move on."""
    if runs.are_one_each(states, tokens.q):
        return step_states(tokens, states)
    out = torch.empty_like(tokens.v)
    if len(runs.ones):
        some = states[runs.ones]
        out[runs.tokens] = step_states(tokens.part(runs.tokens), some)
        states[runs.ones] = some
    _step_through(tokens, states, [run for run in runs.longer if run.start is None], out)
    for run in runs.longer:
        if run.start is not None:
            out[run.tokens], state = extend_state(tokens.part(run.tokens), states[run.state], run.start)
            states[run.state] = state
    return out


def _step_through(tokens: DeltaTokens, states: Tensor, runs: Sequence[DeltaRun], out: Tensor) -> None:
    """One token of each run after the other; fills `out`."""
    for at in range(max((run.num_tokens for run in runs), default=0)):
        on = [run for run in runs if at < run.num_tokens]
        places, those = [run.tokens.start + at for run in on], [run.state for run in on]
        some = states[those]
        out[places] = step_states(tokens.part(torch.tensor(places, device=states.device)), some)
        states[those] = some


def normalised(x: Tensor) -> Tensor:
    """[.., K] to length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def extend_state(tokens: DeltaTokens, state: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Tokens of one request from position `start` on, `state` [Hk, G, K, V] after those before.

    -> [T, Hk, G, V], and the state after the last one
    """
    outs, first, num_tokens = [], 0, len(tokens.q)
    end = min(num_tokens, CHUNK_LEN - start % CHUNK_LEN)
    while first < num_tokens:
        out, state = _extend_aligned(tokens.part(slice(first, end)), state)
        outs.append(out)
        first, end = end, min(num_tokens, end + CHUNKS_AT_ONCE * CHUNK_LEN)
    return torch.cat(outs), state


def _extend_aligned(tokens: DeltaTokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens that begin at a multiple of CHUNK_LEN, or are less than what is left to one."""
    num_tokens = len(tokens.q)
    q, k = (_chunks(x).transpose(1, 2) for x in (tokens.q, tokens.k))  # [C, Hk, 64, K]
    v = _chunks(tokens.v).permute(0, 2, 3, 1, 4)  # [C, Hk, G, 64, V]
    beta = _chunks(tokens.beta).permute(0, 2, 3, 1)[..., None]  # [C, Hk, G, 64, 1]
    decayed = _chunks(tokens.log_decay).permute(0, 2, 3, 1).cumsum(-1)  # [C, Hk, G, 64]
    later = torch.ones(CHUNK_LEN, CHUNK_LEN, dtype=torch.bool, device=q.device).triu(1)
    between = (decayed[..., :, None] - decayed[..., None, :]).masked_fill_(later, float("-inf")).exp_()
    since_start = decayed.exp()[..., None]  # [C, Hk, G, 64, 1]
    k_heads = k[:, :, None]  # [C, Hk, 1, 64, K]
    system = (k @ k.transpose(-1, -2))[:, :, None] * between * beta  # [C, Hk, G, 64, 64]
    wanted = torch.cat((v * beta, k_heads * (beta * since_start)), -1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    added, read = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    scores = (q @ k.transpose(-1, -2))[:, :, None] * between
    q_heads = q[:, :, None] * since_start
    kept = decayed[..., -1:]
    k_kept = (k_heads * (kept - decayed).exp()[..., None]).transpose(-1, -2)  # [C, Hk, G, K, 64]
    kept = kept.exp()[..., None]
    out = torch.empty_like(added)
    for chunk in range(len(out)):
        new = added[chunk] - read[chunk] @ state
        torch.add(q_heads[chunk] @ state, scores[chunk] @ new, out=out[chunk])
        state = state * kept[chunk] + k_kept[chunk] @ new
    return out.permute(0, 3, 1, 2, 4).flatten(0, 1)[:num_tokens], state


def _chunks(x: Tensor) -> Tensor:
    """[T, ..] -> [C, 64, ..]: what fills up decays nothing and adds nothing."""
    missing = -len(x) % CHUNK_LEN
    if missing:
        x = functional.pad(x, (0, 0) * (x.dim() - 1) + (0, missing))
    x = x.contiguous()
    return x.view(-1, CHUNK_LEN, *x.shape[1:])


def step_states(tokens: DeltaTokens, states: Tensor) -> Tensor:
    """One token of each of B requests, `states` [B, Hk, G, K, V], which change. -> [B, Hk, G, V]"""
    states.mul_(tokens.log_decay.exp()[..., None, None])
    k = tokens.k[:, :, None, :, None]  # [B, Hk, 1, K, 1]
    expected = (k.transpose(-1, -2).expand(*states.shape[:3], 1, -1) @ states)[..., 0, :]
    added = (tokens.v - expected) * tokens.beta[..., None]
    states.addcmul_(k, added[..., None, :])
    q = tokens.q[:, :, None, None].expand(*states.shape[:3], 1, -1)
    out: Tensor = (q @ states)[..., 0, :]
    return out
