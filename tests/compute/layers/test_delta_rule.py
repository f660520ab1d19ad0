"""The gated delta rule against transformers' functions: cut anywhere, state passed on, one token at a time."""

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from deltaserve.compute.layers.delta_rule import (
    DeltaRun,
    DeltaRuns,
    DeltaTokens,
    extend_state,
    normalised,
    step_states,
)

KEY_HEADS, GROUP, KEY_DIM, VALUE_DIM = 2, 3, 16, 24


def tokens_of(length: int, seed: int = 0, key_dim: int = KEY_DIM, value_dim: int = VALUE_DIM) -> DeltaTokens:
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(length, KEY_HEADS, key_dim, generator=generator) for _ in range(2))
    heads = (length, KEY_HEADS, GROUP)
    return DeltaTokens(
        q=normalised(q) * key_dim**-0.5,
        k=normalised(k),
        v=torch.randn(*heads, value_dim, generator=generator),
        log_decay=-torch.rand(heads, generator=generator) * 0.3,
        beta=torch.rand(heads, generator=generator),
    )


def state_of(seed: int = 1) -> Tensor:
    return torch.randn(KEY_HEADS, GROUP, KEY_DIM, VALUE_DIM, generator=torch.Generator().manual_seed(seed))


def reference(tokens: DeltaTokens, state: Tensor, *, recurrent: bool = False) -> tuple[Tensor, Tensor]:
    """[T, Hk, G, V], [Hk, G, K, V]"""
    function = torch_recurrent_gated_delta_rule if recurrent else torch_chunk_gated_delta_rule
    scale = tokens.q.shape[-1] ** 0.5  # theirs divides
    per_head = [x.flatten(1, 2)[None] for x in (tokens.v, tokens.log_decay, tokens.beta)]
    q, k = (x.repeat_interleave(GROUP, 1)[None] for x in (tokens.q, tokens.k))  # before 5.23 they do not do it
    out, last = function(
        q * scale,
        k,
        per_head[0],
        g=per_head[1],
        beta=per_head[2],
        initial_state=state.flatten(0, 1)[None],
        output_final_state=True,
    )
    return out[0].unflatten(1, (KEY_HEADS, GROUP)), last[0].unflatten(0, (KEY_HEADS, GROUP))


def close(got: Tensor, want: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(got, want, rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 200, 700])
@pytest.mark.parametrize("recurrent", [False, True])
def test_as_transformers(length: int, recurrent: bool) -> None:
    tokens, state = tokens_of(length), state_of()
    out, last = extend_state(tokens, state, 0)
    want_out, want_last = reference(tokens, state, recurrent=recurrent)
    close(out, want_out)
    close(last, want_last)


@pytest.mark.parametrize("start", [1, 17, 63])
def test_from_a_position_within_a_chunk(start: int) -> None:
    tokens, state = tokens_of(150), state_of()
    out, last = extend_state(tokens, state, start)
    want_out, want_last = reference(tokens, state, recurrent=True)
    close(out, want_out)
    close(last, want_last)


def in_pieces(tokens: DeltaTokens, state: Tensor, cuts: list[int]) -> tuple[Tensor, Tensor]:
    outs = []
    for first, end in zip([0, *cuts], [*cuts, len(tokens.q)], strict=True):
        out, state = extend_state(tokens.part(slice(first, end)), state, first)
        outs.append(out)
    return torch.cat(outs), state


@pytest.mark.parametrize("cuts", [[64], [128], [64, 128, 192], [448], [576]])
@pytest.mark.parametrize("length", [200, 640, 700])
def test_cut_at_multiples_of_64_the_bits_are_equal(length: int, cuts: list[int]) -> None:
    tokens, state = tokens_of(length), state_of()
    out, last = in_pieces(tokens, state, [cut for cut in cuts if cut < length])
    whole_out, whole_last = extend_state(tokens, state, 0)
    assert torch.equal(out, whole_out)
    assert torch.equal(last, whole_last)


@pytest.mark.parametrize("cuts", [[1], [37], [63, 64, 65], [100, 101], list(range(1, 200))])
def test_cut_anywhere_else_they_are_nearly(cuts: list[int]) -> None:
    tokens, state = tokens_of(200), state_of()
    out, last = in_pieces(tokens, state, cuts)
    whole_out, whole_last = extend_state(tokens, state, 0)
    close(out, whole_out)
    close(last, whole_last)


def test_one_token_of_many_requests() -> None:
    batch = 5
    tokens, states = tokens_of(batch), torch.stack([state_of(seed) for seed in range(batch)])
    alone = [reference(tokens.part(slice(b, b + 1)), states[b], recurrent=True) for b in range(batch)]
    out = step_states(tokens, states)
    close(out, torch.cat([want for want, _ in alone]))
    close(states, torch.stack([last for _, last in alone]))


def test_one_token_of_each_request_needs_nothing_from_the_host() -> None:
    """What is made on the device for such a step is what its runs say."""
    cpu = torch.device("cpu")
    of_runs = DeltaRuns.of([DeltaRun(row, slice(row, row + 1), 7 * row) for row in range(4)], cpu)
    made = DeltaRuns.one_each(4, cpu)
    for name in ("ones", "tokens", "table"):
        assert getattr(made, name).dtype is torch.int64 and getattr(made, name).is_contiguous()
        assert getattr(made, name).tolist() == getattr(of_runs, name).tolist()
    states, tokens = torch.zeros(4, 2), torch.zeros(5, 3)
    assert made.are_one_each(states, tokens[:4]) and not made.are_one_each(states, tokens)


def test_values_of_real_sizes() -> None:
    """dk = dv = 128, decay from slow to fast; a state of many tokens."""
    tokens = tokens_of(512, key_dim=128, value_dim=128)
    state = torch.zeros(KEY_HEADS, GROUP, 128, 128)
    out, last = extend_state(tokens, state, 0)
    want_out, want_last = reference(tokens, state)
    close(out, want_out, 1e-6)
    close(last, want_last, 1e-6)
    cut_out, cut_last = in_pieces(tokens, state, [100, 356])
    close(cut_out, out, 1e-6)
    close(cut_last, last, 1e-6)
