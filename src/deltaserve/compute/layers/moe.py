"""Mixture of experts: each token goes to its best experts; tokens of one expert are computed together, all experts at
once where the operators can (grouped_experts.py)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltaserve.compute.collective.expert_group import ExpertGroup
from deltaserve.compute.layers.activations import sigmoid
from deltaserve.compute.layers.dense import DenseWeights, allocate_gated
from deltaserve.compute.layers.grouped_experts import StackedExperts, clamped_gated
from deltaserve.compute.layers.step_ops import StepOps
from deltaserve.compute.weights.block_matrix import Matrix
from deltaserve.compute.weights.packing import pack, pack_values
from deltaserve.compute.weights.targets import TargetTable
from deltaserve.model.code_plan import CodeRules
from deltaserve.model.layers.layer_spec import Activation
from deltaserve.model.layers.moe import CORRECTION, FUSED_EXPERTS, MoeSpec, RouterKind


@dataclass(frozen=True, slots=True)
class MoeBiases:
    router: Tensor  # [E]
    gate_up: tuple[Tensor, ...]  # of each expert held: [2 I]
    down: tuple[Tensor, ...] | None  # of each expert held: [hidden]; of parts of experts: on the first rank


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Experts of one rank, or its part of each."""

    spec: MoeSpec
    router: Tensor  # [E, hidden], plain or packed; float32 where each score counts alone
    correction: Tensor | None  # [E] float32, added to the scores of the choice
    gate_up: tuple[Matrix, ...]  # of each expert held, plain or packed: [2 I, hidden]
    down: tuple[Matrix, ...]  # of each expert held: [hidden, I]
    shared: DenseWeights | None = None  # for every token
    shared_gate: Tensor | None = None  # [1, hidden]
    first_expert: int = 0  # of those held
    biases: MoeBiases | None = None
    stacked: StackedExperts | None = None
    """The same experts as they lie in memory; None: their matrices are packed, each by itself."""

    def packed(self, rules: CodeRules) -> "MoeWeights":
        gate_up, down = (tuple(pack(weight, rules) for weight in weights) for weights in (self.gate_up, self.down))
        shared = self.shared and self.shared.packed(rules)
        before = (*self.gate_up, *self.down)
        is_plain = all(new is old for new, old in zip((*gate_up, *down), before, strict=True))
        packed = replace(self, router=pack_values(self.router), gate_up=gate_up, down=down, shared=shared)
        return packed if is_plain else replace(packed, stacked=None)  # or its matrices would stay beside those packed

    def compute(self, x: Tensor, ops: StepOps, group: ExpertGroup | None = None) -> Tensor:
        """x [T, hidden] -> [T, hidden], a sum over the experts held, or over the part of each that is; of a group, over
        those of all members"""
        experts, gains = route(x, self, ops)
        if group is not None:
            total = _weighted_sum(_of_group(x, experts, self, ops, group), gains)
        elif ops.grouped is not None and self.stacked is not None:
            total = ops.grouped(x, experts, gains, self.stacked)
        else:
            total = _weighted_sum(_outputs(x, experts, self, ops), gains)
        return total if self.shared is None else total + _shared(x, self.shared, self.shared_gate, ops)

    def accompany(self, nothing: Tensor, ops: StepOps, group: ExpertGroup) -> None:
        experts = torch.empty((0, self.spec.experts_per_token), dtype=torch.int64, device=nothing.device)
        _of_group(nothing, experts, self, ops, group)


def allocate(table: TargetTable, spec: MoeSpec, prefix: str) -> MoeWeights:
    """Files hold experts one by one, or fused: both are taken."""
    prefix, first = f"{prefix}.mlp", spec.placement.held(spec.num_experts, table.shard).start
    if spec.clamped is not None:
        return _allocate_transposed(table, spec, prefix, first)
    gate_up, down = (table.whole(f"{prefix}.experts.{name}") for name in FUSED_EXPERTS)
    size = down.shape[2]
    for index in range(len(down)):
        name = f"{prefix}.experts.{first + index}"
        table.targets[f"{name}.gate_proj.weight"] = gate_up[index, :size]
        table.targets[f"{name}.up_proj.weight"] = gate_up[index, size:]
        table.targets[f"{name}.down_proj.weight"] = down[index]
    shared = allocate_gated(table, f"{prefix}.shared_experts") if spec.shared_size else None
    gate = table.whole(f"{prefix}.shared_expert_gate.weight") if spec.shared_gate else None
    correction = None
    if spec.router is RouterKind.SIGMOID:
        table = table.exact  # scores near each other decide which experts are chosen: not in 16 bits
        correction = table.whole(f"{prefix}.{CORRECTION}")
    router, stacked = table.whole(f"{prefix}.gate.weight"), StackedExperts(gate_up, down, first_expert=first)
    experts = gate_up.unbind(), down.unbind()
    return MoeWeights(spec, router, correction, *experts, shared, gate, first, stacked=stacked)


def _allocate_transposed(table: TargetTable, spec: MoeSpec, prefix: str, first: int) -> MoeWeights:
    gate_up, down = (table.transposed(f"{prefix}.experts.{name}") for name in FUSED_EXPERTS)
    gate_up_bias, down_bias = (table.whole(f"{prefix}.experts.{name}_bias") for name in FUSED_EXPERTS)
    biases = MoeBiases(
        router=table.whole(f"{prefix}.gate.bias"),
        gate_up=gate_up_bias.unbind(),
        down=down_bias.unbind() if len(down_bias) else None,
    )
    router = table.whole(f"{prefix}.gate.weight")
    stacked = StackedExperts(gate_up, down, gate_up_bias, down_bias if len(down_bias) else None, first, spec.clamped)
    experts = gate_up.unbind(), down.unbind()
    return MoeWeights(spec, router, None, *experts, first_expert=first, biases=biases, stacked=stacked)


def route(x: Tensor, layer: MoeWeights, ops: StepOps) -> tuple[Tensor, Tensor]:
    """x [T, hidden] -> expert ids [T, k] and their weights [T, k] float32."""
    spec = layer.spec
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
    grouped = scores.view(len(scores), spec.num_groups, spec.num_experts // spec.num_groups)  # also of no rows
    best = grouped.topk(2, -1).values.sum(-1)  # [T, G]
    kept = best.topk(spec.kept_groups, -1).indices
    is_lost = torch.ones_like(best, dtype=torch.bool).scatter_(-1, kept, False)
    return grouped.masked_fill(is_lost[..., None], float("-inf")).view(scores.shape)


def _of_group(x: Tensor, experts: Tensor, weights: MoeWeights, ops: StepOps, group: ExpertGroup) -> Tensor:
    """x [T, hidden], experts [T, k] -> [T, k, hidden]: each member computes its own experts, of all members' tokens."""
    holders = experts // (weights.spec.num_experts // group.member.size)  # [T, k]
    tokens = [(holders == member).any(-1).nonzero()[:, 0] for member in range(group.member.size)]
    # [T, bytes of a row and of its experts]
    lines = torch.cat((x.contiguous().view(torch.uint8), experts.int().view(torch.uint8)), -1)
    found = group.all_to_all([lines.index_select(0, those) for those in tokens])
    together, num_bytes = torch.cat(found), x.shape[1] * x.itemsize
    rows = together[:, :num_bytes].contiguous().view(x.dtype)  # [N, hidden]
    ids = together[:, num_bytes:].contiguous().view(torch.int32).long()  # [N, k]
    outputs = _outputs(rows, ids, weights, ops)
    is_held = (ids >= weights.first_expert) & (ids < weights.first_expert + len(weights.gate_up))
    counts = [len(part) for part in found]
    told = [part[mine] for part, mine in zip(torch.split(outputs, counts), torch.split(is_held, counts), strict=True)]
    chosen = x.new_empty((*experts.shape, x.shape[1]))
    for member, part in enumerate(group.all_to_all(told)):
        chosen[holders == member] = part
    return chosen


def _outputs(x: Tensor, experts: Tensor, weights: MoeWeights, ops: StepOps) -> Tensor:
    """x [T, hidden], experts [T, k] -> [T, k, hidden] of the experts held; zeros of the others"""
    spec = weights.spec
    order = experts.flatten().argsort(stable=True)  # [T * k] (token, choice) pairs, those of one expert together
    tokens = order // spec.experts_per_token
    counts = torch.bincount(experts.flatten(), minlength=spec.num_experts).tolist()
    num_held, start = len(weights.gate_up), sum(counts[: weights.first_expert])
    inputs = x.index_select(0, tokens)  # [T * k, hidden]
    outputs = torch.empty_like(inputs) if num_held == spec.num_experts else torch.zeros_like(inputs)
    for index, count in enumerate(counts[weights.first_expert : weights.first_expert + num_held]):
        if count == 0:
            continue
        outputs[start : start + count] = _expert(inputs[start : start + count], index, weights, ops)
        start += count
    return outputs.index_select(0, order.argsort()).view(*experts.shape, x.shape[1])


def _shared(x: Tensor, weights: DenseWeights, gate: Tensor | None, ops: StepOps) -> Tensor:
    """What every token goes through: [T, hidden] -> [T, hidden]"""
    out = weights.compute(x, ops)
    if gate is None:
        return out
    opened = (x.float() * gate.float()).sum(-1, keepdim=True).to(x.dtype)  # [T, 1]
    return out * sigmoid(opened)


def _expert(x: Tensor, index: int, weights: MoeWeights, ops: StepOps) -> Tensor:
    """x [n, hidden] -> [n, hidden] of one of the experts held"""
    biases, clamped = weights.biases, weights.spec.clamped
    if clamped is None or biases is None:
        return ops.product(ops.gated(ops.product(x, weights.gate_up[index]), Activation.SILU), weights.down[index])
    hidden = clamped_gated(ops.product(x, weights.gate_up[index], biases.gate_up[index]), clamped)
    return ops.product(hidden, weights.down[index], None if biases.down is None else biases.down[index])


def _weighted_sum(chosen: Tensor, gains: Tensor) -> Tensor:
    """[T, k, hidden], [T, k] -> [T, hidden]: in float32 and in order of rank, so that equal inputs give equal bits."""
    total = chosen[:, 0].float() * gains[:, :1]
    for rank in range(1, chosen.shape[1]):
        total.addcmul_(chosen[:, rank].float(), gains[:, rank : rank + 1])
    return total.to(chosen.dtype)
