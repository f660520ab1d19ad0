"""Checks of a layer's experts by Triton's kernels, on a device that runs them: see triton_ops_checks.py."""

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltaserve.compute.layers.dense import DenseWeights
from deltaserve.compute.layers.grouped_experts import GroupedExperts, StackedExperts, experts_one_by_one
from deltaserve.compute.layers.moe import MoeBiases, MoeWeights
from deltaserve.compute.layers.ops_choice import check_grouped_experts
from deltaserve.compute.layers.step_ops import StepOps, TorchOps
from deltaserve.compute.weights.targets import Linear
from deltaserve.model.layers.moe import ClampedGlu, MoeSpec, RouterKind
from tests.compute.layers.triton_ops_checks import DeviceDraw, opened

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}
"""Five roundings; the interpreter cuts to bfloat16 where devices round."""
_CHANGES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, not renormalised, scaled": {"renormalise": False, "scale": 2.5},
    "sigmoid": {"router": RouterKind.SIGMOID},
    "groups": {"router": RouterKind.SIGMOID, "num_groups": 3, "kept_groups": 2, "scale": 2.5},
    "shared": {"shared_size": 24},
    "shared behind a gate": {"shared_size": 24, "shared_gate": True},
    "clamped": {"clamped": ClampedGlu(1.702, 1.5)},
}
VARIANTS = tuple(_CHANGES)


class LayerSize(NamedTuple):
    experts: int
    chosen: int
    hidden: int
    inner: int


SMALL = LayerSize(6, 2, 86, 44)


def layer(variant: str, dtype: torch.dtype, device: str, size: LayerSize = SMALL) -> MoeWeights:
    """Random weights, such that values keep their size."""
    draw = DeviceDraw(5, device)
    spec = MoeSpec(RouterKind.SOFTMAX, size.experts, size.chosen, size.inner, renormalise=True)
    spec = replace(spec, **_CHANGES[variant])

    def matrix(*shape: int) -> Tensor:
        return draw(dtype, *shape, scale=shape[-1] ** -0.5)

    gate_up, down = matrix(size.experts, 2 * size.inner, size.hidden), matrix(size.experts, size.hidden, size.inner)
    stacked, biases, shared, correction = StackedExperts(gate_up, down), None, None, None
    router = matrix(size.experts, size.hidden)
    if spec.clamped is not None:
        up_bias, down_bias = draw(dtype, size.experts, 2 * size.inner), draw(dtype, size.experts, size.hidden)
        biases = MoeBiases(draw(dtype, size.experts), up_bias.unbind(), down_bias.unbind())
        stacked = StackedExperts(gate_up, down, up_bias, down_bias, clamped=spec.clamped)
    if spec.router is RouterKind.SIGMOID:
        router, correction = router.float(), draw(torch.float32, size.experts, scale=0.1)
    if spec.shared_size:
        up, down_again = matrix(2 * spec.shared_size, size.hidden), matrix(size.hidden, spec.shared_size)
        shared = DenseWeights(Linear(up, None), Linear(down_again, None))
    gate = matrix(1, size.hidden) if spec.shared_gate else None
    experts = gate_up.unbind(), down.unbind()
    return MoeWeights(spec, router, correction, *experts, shared, gate, biases=biases, stacked=stacked)


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.float(), want.float(), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@torch.inference_mode()
def check_layer(device: str, variant: str, dtype: torch.dtype, size: LayerSize, counts: Sequence[int]) -> None:
    """Against the same operators with one expert after the other; of so many tokens."""
    weights, ops = layer(variant, dtype, device, size), opened(device)
    for count in counts:
        x = DeviceDraw(count, device)(dtype, count, size.hidden)
        got, want = weights.compute(x, ops), replace(weights, stacked=None).compute(x, ops)
        assert (got.dtype, got.shape) == (dtype, x.shape)
        assert_near(got, want, dtype)
    assert weights.compute(x[:0], ops).shape == (0, size.hidden)


def _grouped(ops: StepOps) -> GroupedExperts:
    assert ops.grouped is not None
    return ops.grouped


def kernels() -> Any:
    """The module, which needs triton."""
    return importlib.import_module("deltaserve.compute.layers.triton_experts")


@torch.inference_mode()
def check_choices(device: str) -> None:
    """Experts that nobody chose, one that all chose, one row; some experts held of many, and ids of nobody's."""
    grouped, plain = _grouped(opened(device)), layer("softmax", torch.float32, device).stacked
    assert plain is not None
    part = replace(plain, gate_up=plain.gate_up[2:5], down=plain.down[2:5], first_expert=2)
    for chosen in (
        [[3, 4]],
        [[5, 5]] * 37,
        [[0, 1], [1, 0], [0, 1]],
        [[index % 6, (index * index + 1) % 6] for index in range(110)],  # more than 32 pairs of an expert
        [[-1, 2], [9, 4], [0, 5], [3, -7]],
    ):
        ids = torch.tensor(chosen, device=device)
        x, gains = (DeviceDraw(len(chosen), device)(torch.float32, len(chosen), count) for count in (86, 2))
        for experts in (plain, part):
            want = experts_one_by_one(x, ids, gains, experts)
            assert_near(grouped(x, ids, gains, experts), want, torch.float32)


@torch.inference_mode()
def check_rows_are_apart(device: str, dtype: torch.dtype, size: LayerSize = SMALL) -> None:
    """A row has equal bits whatever rows are beside it, as long as blocks are as tall; what is not finite stays in its
    own row."""
    experts, grouped = layer("clamped", dtype, device, size).stacked, _grouped(opened(device))
    assert experts is not None
    draw, count = DeviceDraw(2, device), 33
    x, scores = draw(dtype, count, size.hidden), draw(torch.float32, count, size.experts)
    gains, chosen = scores.topk(size.chosen, -1)
    whole = grouped(x, chosen, gains, experts)
    for rows in (slice(0, 1), slice(7, 8), slice(3, 21), slice(31, 33)):
        assert kernels().block_tile(size.chosen * count, size.experts, 4).rows == 16
        assert torch.equal(grouped(x[rows], chosen[rows], gains[rows], experts), whole[rows])
    backwards = torch.arange(count - 1, -1, -1, device=device)
    assert torch.equal(grouped(x[backwards], chosen[backwards], gains[backwards], experts), whole[backwards])
    spoilt = x.clone()
    spoilt[5, 7] = float("nan")
    got, others = grouped(spoilt, chosen, gains, experts), [row for row in range(count) if row != 5]
    assert torch.equal(got[others], whole[others])
    assert got[5].isnan().all()


@torch.inference_mode()
def check_places(device: str) -> None:
    """Pairs stand in the order of their experts, each once, in blocks of one expert; the others are nobody's."""
    grouped, draw = kernels().TritonExperts(), torch.Generator().manual_seed(3)
    for num_tokens, num_chosen, num_held, first in ((1, 8, 16, 0), (40, 3, 5, 2), (700, 2, 3, 1), (9, 1, 40, 0)):
        chosen = torch.randint(0, num_held + first + 1, (num_tokens, num_chosen), generator=draw)
        held = torch.empty(num_held, 1, 1, device=device)
        experts = StackedExperts(held, held, first_expert=first)
        for rows in (16, 64):
            order, blocks = (found.tolist() for found in grouped._placed(chosen.to(device), experts, rows))
            flat = chosen.flatten().tolist()
            want = [pair for expert in range(first, first + num_held) for pair in _pairs(flat, expert)]
            assert order[: len(want)] == want
            own = [block for block in blocks if block[0] >= 0]
            assert all(block[0] == -1 for block in blocks[len(own) :])
            assert [place for _, start, end in own for place in range(start, end)] == list(range(len(want)))
            assert all(0 < end - start <= rows for _, start, end in own)
            assert all({flat[pair] - first for pair in order[start:end]} == {expert} for expert, start, end in own)


def _pairs(flat: Sequence[int], expert: int) -> list[int]:
    return [pair for pair, found in enumerate(flat) if found == expert]


def check_most_blocks() -> None:
    """No way to choose needs more blocks, and one needs as many."""
    most_blocks = kernels().most_blocks
    for num_pairs in range(1, 40):
        for num_held in range(1, 6):
            for rows in (1, 4, 16):
                found = max(sum(-(-size // rows) for size in sizes) for sizes in _sizes(num_pairs, num_held))
                assert found == most_blocks(num_pairs, num_held, rows)


def _sizes(num_pairs: int, num_held: int) -> list[list[int]]:
    """Ways to spread pairs: all over the first so many experts but for one pair of each other."""
    met = range(1, min(num_pairs, num_held) + 1)
    return [[num_pairs - count + 1, *[1] * (count - 1)] for count in met]


@torch.inference_mode()
def check_self_test(device: str, *dtypes: torch.dtype) -> None:
    for dtype in dtypes:
        check_grouped_experts(_grouped(opened(device)), dtype, torch.device(device))


@torch.inference_mode()
def check_recorded(device: str, recorder: Any, variant: str, dtype: torch.dtype) -> None:
    """A layer of a step that is recorded: nothing waits for the device, and replays compute what the rows of then
    choose. The last rows are none of the step's: whatever stands in them changes no bit of the others."""
    weights, ops, draw = layer(variant, dtype, device), opened(device), DeviceDraw(9, device)
    x, out = draw(dtype, 8, SMALL.hidden), torch.zeros(8, SMALL.hidden, dtype=dtype, device=device)
    replay = recorder.record(lambda: out.copy_(weights.compute(x, ops)))
    for seed, spoilt in enumerate((0.0, float("nan"))):
        x.copy_(DeviceDraw(20 + seed, device)(dtype, 8, SMALL.hidden))
        x[6:] += spoilt
        replay()
        want = weights.compute(x, ops)
        assert torch.equal(out[:6], want[:6])
        assert_near(out[:6], replace(weights, stacked=None).compute(x[:6], TorchOps()), dtype)
