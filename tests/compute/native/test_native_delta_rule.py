"""The gated delta rule of the native library, for each instruction set found here: as torch's, and by tokens alone."""

import pytest
import torch
from torch import Tensor

from deltaserve.compute.layers.delta_rule import DeltaRun, DeltaRuns, DeltaTokens, normalised, recurred
from deltaserve.compute.layers.native_ops import NativeOps
from tests.compute.native.native_build import compiled_library, native_context, sets_with_own

KEY_HEADS, GROUP = 2, 3
CPU = torch.device("cpu")


@pytest.fixture(params=sets_with_own("delta_rule_kernel"))
def ops(request: pytest.FixtureRequest) -> NativeOps:
    return NativeOps(native_context(request.param))


def tokens_of(length: int, key_dim: int, value_dim: int) -> DeltaTokens:
    generator = torch.Generator().manual_seed(length)
    q, k = (torch.randn(length, KEY_HEADS, key_dim, generator=generator) for _ in range(2))
    heads = (length, KEY_HEADS, GROUP)
    v, log_decay = torch.randn(*heads, value_dim, generator=generator), -torch.rand(heads, generator=generator)
    return DeltaTokens(normalised(q), normalised(k), v, log_decay, torch.rand(heads, generator=generator))


def states_of(count: int, key_dim: int, value_dim: int) -> Tensor:
    return torch.randn(count, KEY_HEADS, GROUP, key_dim, value_dim, generator=torch.Generator().manual_seed(count))


def runs_of(*runs: tuple[int, int, int]) -> DeltaRuns:
    """(state, first token, end) of each"""
    return DeltaRuns.of([DeltaRun(state, slice(first, end), 0) for state, first, end in runs], CPU)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 12), (7, 5), (128, 128), (20, 83)])
@torch.inference_mode()
def test_as_torch_and_whatever_is_beside(ops: NativeOps, key_dim: int, value_dim: int) -> None:
    tokens, runs = tokens_of(90, key_dim, value_dim), runs_of((2, 0, 1), (0, 1, 71), (1, 71, 90))
    want_states = states_of(3, key_dim, value_dim)
    states = want_states.clone()
    out, want = ops.recurred(tokens, states, runs), recurred(tokens, want_states, runs)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states, want_states, rtol=1e-4, atol=1e-4)
    alone = states_of(3, key_dim, value_dim)[:1].clone()
    pieces = [
        ops.recurred(tokens.part(slice(a, b)), alone, runs_of((0, 0, b - a))) for a, b in ((1, 2), (2, 66), (66, 71))
    ]
    assert torch.equal(torch.cat(pieces), out[1:71])
    assert torch.equal(alone[0], states[0])


@torch.inference_mode()
def test_threads_change_no_bit() -> None:
    isa = compiled_library().instruction_sets[-1].name
    tokens, runs, found = tokens_of(64, 64, 64), runs_of((0, 0, 60), (1, 60, 64)), []
    for num_threads in (1, 3):
        states = states_of(2, 64, 64)
        found.append((NativeOps(native_context(isa, num_threads)).recurred(tokens, states, runs), states))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@torch.inference_mode()
def test_a_run_outside_of_the_arrays_is_refused(ops: NativeOps) -> None:
    states = states_of(2, 16, 16)
    for run in ((2, 0, 1), (-1, 0, 1), (0, 3, 5), (0, -1, 1)):
        with pytest.raises(ValueError, match="DeltaRule"):
            ops.recurred(tokens_of(4, 16, 16), states, runs_of(run))
    assert torch.equal(states, states_of(2, 16, 16))
