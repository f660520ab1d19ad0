"""Experts: what each token gets is the weighted sum of its own, rounded once."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from deltaserve.compute.layers.moe import MoeWeights, route
from deltaserve.compute.layers.step_ops import TorchOps
from deltaserve.compute.weights.packing import pack
from deltaserve.model.layers.layer_spec import Activation
from deltaserve.model.layers.moe import MoeSpec, RouterKind

SPEC = MoeSpec(RouterKind.SOFTMAX, 16, 8, 24, renormalise=True)
OPS = TorchOps()


def random_weights(hidden: int, dtype: torch.dtype = torch.bfloat16) -> MoeWeights:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / 4).to(dtype)

    size, count = SPEC.intermediate_size, SPEC.num_experts
    gate_up, down = draw(count, 2 * size, hidden), draw(count, hidden, size)
    return MoeWeights(SPEC, draw(count, hidden), None, gate_up.unbind(), down.unbind())


@torch.inference_mode()
def test_the_sum_over_experts_is_rounded_once() -> None:
    hidden = 48
    weights = random_weights(hidden)
    x = torch.randn(5, hidden, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    experts, gains = route(x, weights, OPS)
    got = weights.compute(x, OPS)
    for token in range(5):
        total = torch.zeros(hidden, dtype=torch.float64)
        for expert, gain in zip(experts[token].tolist(), gains[token].tolist(), strict=True):
            inner = OPS.gated(functional.linear(x[token : token + 1], weights.gate_up[expert]), Activation.SILU)
            total += gain * functional.linear(inner, weights.down[expert])[0].double()
        torch.testing.assert_close(got[token].double(), total, rtol=2**-8, atol=2**-9)


@torch.inference_mode()
def test_equal_tokens_get_equal_bits() -> None:
    x = torch.randn(1, 48, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16).repeat(16, 1)
    got = random_weights(48).compute(x, OPS)
    assert torch.equal(got, got[:1].repeat(16, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 5, 64])
@torch.inference_mode()
def test_packed_experts_compute_the_same(num_tokens: int, dtype: torch.dtype) -> None:
    """Whatever number of tokens comes to each: with 64, some experts get 17 and more."""
    plain = random_weights(48, dtype)
    packed = replace(plain, gate_up=tuple(map(pack, plain.gate_up)), down=tuple(map(pack, plain.down)))
    x = torch.randn(num_tokens, 48, generator=torch.Generator().manual_seed(3)).to(dtype)
    torch.testing.assert_close(packed.compute(x, OPS), plain.compute(x, OPS))


@torch.inference_mode()
def test_experts_are_chosen_in_the_groups_with_the_best_two() -> None:
    """The best expert of all stands alone in its group."""
    spec = replace(SPEC, router=RouterKind.SIGMOID, num_experts=6, experts_per_token=2, renormalise=False)
    spec = replace(spec, num_groups=3, kept_groups=1, scale=2.5)
    scores = torch.tensor([0.9, 0.1, 0.7, 0.6, 0.5, 0.55])
    weights = MoeWeights(spec, scores.logit()[:, None], torch.zeros(6), (), ())
    experts, gains = route(torch.ones(1, 1), weights, OPS)
    assert experts.tolist() == [[2, 3]]
    torch.testing.assert_close(gains, torch.tensor([[0.7, 0.6]]) * 2.5)
    assert route(torch.ones(1, 1), replace(weights, spec=replace(spec, kept_groups=3)), OPS)[0].tolist() == [[0, 2]]


@torch.inference_mode()
def test_a_correction_takes_part_in_the_choice_but_not_in_the_weights() -> None:
    spec = replace(SPEC, router=RouterKind.SIGMOID, num_experts=4, experts_per_token=2)
    scores = torch.tensor([0.9, 0.5, 0.4, 0.1])
    correction = torch.tensor([-1.0, 0.0, 0.0, 0.5])
    experts, gains = route(torch.ones(1, 1), MoeWeights(spec, scores.logit()[:, None], correction, (), ()), OPS)
    assert experts.tolist() == [[3, 1]]
    torch.testing.assert_close(gains, torch.tensor([[0.1, 0.5]]) / 0.6)
