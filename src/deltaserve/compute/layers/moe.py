"""Mixture of experts: each token goes to its best experts; tokens of one expert are computed together."""

import torch
from torch import Tensor

from deltaserve.compute.collective.expert_group import ExpertGroup
from deltaserve.compute.layers.activations import sigmoid
from deltaserve.compute.layers.layers import clamped_gated, dense_mlp
from deltaserve.compute.layers.step_ops import StepOps
from deltaserve.compute.weights.weights import DenseWeights, MoeWeights
from deltaserve.model.model_spec import Activation, MoeSpec, RouterKind


def route(x: Tensor, layer: MoeWeights, spec: MoeSpec, ops: StepOps) -> tuple[Tensor, Tensor]:
    """x [T, hidden] -> expert ids [T, k] and their weights [T, k] float32."""
    bias = None if layer.biases is None else layer.biases.router
    logits = ops.product(x.to(layer.router.dtype), layer.router, bias).float()  # [T, E]
    if spec.router is RouterKind.SOFTMAX:
        weights, experts = logits.softmax(-1).topk(spec.experts_per_token, -1)
    else:
        assert layer.correction is not None
        scores = sigmoid(logits)
        experts = _in_best_groups(scores + layer.correction, spec).topk(spec.experts_per_token, -1).indices
        weights = scores.gather(-1, experts)
    if spec.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    if spec.scale != 1.0:
        weights = weights * spec.scale
    return experts, weights


def _in_best_groups(scores: Tensor, spec: MoeSpec) -> Tensor:
    """scores [T, E], with those of experts in other groups than the best set to minus infinity."""
    if spec.kept_groups == spec.num_groups:
        return scores
    grouped = scores.view(len(scores), spec.num_groups, -1)
    best = grouped.topk(2, -1).values.sum(-1)  # [T, G]
    kept = best.topk(spec.kept_groups, -1).indices
    is_lost = torch.ones_like(best, dtype=torch.bool).scatter_(-1, kept, False)
    return grouped.masked_fill(is_lost[..., None], float("-inf")).view(scores.shape)


def moe_mlp(x: Tensor, weights: MoeWeights, spec: MoeSpec, ops: StepOps, group: ExpertGroup | None = None) -> Tensor:
    """x [T, hidden] -> [T, hidden], a sum over the experts held, or over the part of each that is; of a group, over
    those of all members"""
    experts, gains = route(x, weights, spec, ops)
    chosen = (
        _outputs(x, experts, weights, spec, ops) if group is None else _of_group(x, experts, weights, spec, ops, group)
    )
    total = _weighted_sum(chosen, gains)
    return total if weights.shared is None else total + _shared(x, weights.shared, weights.shared_gate, ops)


def compute_for_others(nothing: Tensor, weights: MoeWeights, spec: MoeSpec, ops: StepOps, group: ExpertGroup) -> None:
    """What `moe_mlp` does of a member that has no tokens. nothing [0, hidden]"""
    experts = torch.empty((0, spec.experts_per_token), dtype=torch.int64, device=nothing.device)
    _of_group(nothing, experts, weights, spec, ops, group)


def _of_group(
    x: Tensor, experts: Tensor, weights: MoeWeights, spec: MoeSpec, ops: StepOps, group: ExpertGroup
) -> Tensor:
    """x [T, hidden], experts [T, k] -> [T, k, hidden]: each member computes its own experts, of all members' tokens."""
    holders = experts // (spec.num_experts // group.member.size)  # [T, k]
    tokens = [(holders == member).any(-1).nonzero()[:, 0] for member in range(group.member.size)]
    # [T, bytes of a row and of its experts]
    lines = torch.cat((x.contiguous().view(torch.uint8), experts.int().view(torch.uint8)), -1)
    found = group.all_to_all([lines.index_select(0, those) for those in tokens])
    together, num_bytes = torch.cat(found), x.shape[1] * x.itemsize
    rows = together[:, :num_bytes].contiguous().view(x.dtype)  # [N, hidden]
    ids = together[:, num_bytes:].contiguous().view(torch.int32).long()  # [N, k]
    outputs = _outputs(rows, ids, weights, spec, ops)
    is_held = (ids >= weights.first_expert) & (ids < weights.first_expert + len(weights.gate_up))
    counts = [len(part) for part in found]
    told = [part[mine] for part, mine in zip(torch.split(outputs, counts), torch.split(is_held, counts), strict=True)]
    chosen = x.new_empty((*experts.shape, x.shape[1]))
    for member, part in enumerate(group.all_to_all(told)):
        chosen[holders == member] = part
    return chosen


def _outputs(x: Tensor, experts: Tensor, weights: MoeWeights, spec: MoeSpec, ops: StepOps) -> Tensor:
    """x [T, hidden], experts [T, k] -> [T, k, hidden] of the experts held; zeros of the others"""
    order = experts.flatten().argsort(stable=True)  # [T * k] (token, choice) pairs, those of one expert together
    tokens = order // spec.experts_per_token
    counts = torch.bincount(experts.flatten(), minlength=spec.num_experts).tolist()
    num_held, start = len(weights.gate_up), sum(counts[: weights.first_expert])
    inputs = x.index_select(0, tokens)  # [T * k, hidden]
    outputs = torch.empty_like(inputs) if num_held == spec.num_experts else torch.zeros_like(inputs)
    for index, count in enumerate(counts[weights.first_expert : weights.first_expert + num_held]):
        if count == 0:
            continue
        outputs[start : start + count] = _expert(inputs[start : start + count], index, weights, spec, ops)
        start += count
    return outputs.index_select(0, order.argsort()).view(*experts.shape, x.shape[1])


def _shared(x: Tensor, weights: DenseWeights, gate: Tensor | None, ops: StepOps) -> Tensor:
    """What every token goes through: [T, hidden] -> [T, hidden]"""
    out = dense_mlp(x, weights, ops)
    if gate is None:
        return out
    opened = (x.float() * gate.float()).sum(-1, keepdim=True).to(x.dtype)  # [T, 1]
    return out * sigmoid(opened)


def _expert(x: Tensor, index: int, weights: MoeWeights, spec: MoeSpec, ops: StepOps) -> Tensor:
    """x [n, hidden] -> [n, hidden] of one of the experts held"""
    biases = weights.biases
    if spec.clamped is None or biases is None:
        return ops.product(ops.gated(ops.product(x, weights.gate_up[index]), Activation.SILU), weights.down[index])
    hidden = clamped_gated(ops.product(x, weights.gate_up[index], biases.gate_up[index]), spec.clamped)
    return ops.product(hidden, weights.down[index], None if biases.down is None else biases.down[index])


def _weighted_sum(chosen: Tensor, gains: Tensor) -> Tensor:
    """[T, k, hidden], [T, k] -> [T, hidden]: in float32 and in order of rank, so that equal inputs give equal bits."""
    total = chosen[:, 0].float() * gains[:, :1]
    for rank in range(1, chosen.shape[1]):
        total.addcmul_(chosen[:, rank].float(), gains[:, rank : rank + 1])
    return total.to(chosen.dtype)
