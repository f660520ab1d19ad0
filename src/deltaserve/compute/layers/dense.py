"""The feed-forward part of a gated linear unit."""

from dataclasses import dataclass, replace

from torch import Tensor

from deltaserve.compute.collective.expert_group import ExpertGroup
from deltaserve.compute.layers.step_ops import StepOps
from deltaserve.compute.weights.targets import Linear, TargetTable
from deltaserve.model.code_plan import CodeRules
from deltaserve.model.layers.dense import DenseSpec
from deltaserve.model.layers.layer_spec import Activation


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """Channels of one rank."""

    gate_up: Linear  # [2 I, hidden]
    down: Linear  # [hidden, I]
    activation: Activation = Activation.SILU

    def packed(self, rules: CodeRules) -> "DenseWeights":
        return replace(self, gate_up=self.gate_up.packed(rules), down=self.down.packed(rules))

    def compute(self, x: Tensor, ops: StepOps, group: ExpertGroup | None = None) -> Tensor:
        return self.down.product(ops.gated(self.gate_up.product(x, ops), self.activation), ops)

    def accompany(self, nothing: Tensor, ops: StepOps, group: ExpertGroup) -> None:
        """Nothing: a dense part is no member's alone."""


def allocate(table: TargetTable, spec: DenseSpec, prefix: str) -> DenseWeights:
    return allocate_gated(table, f"{prefix}.mlp", spec.activation)


def allocate_gated(table: TargetTable, prefix: str, activation: Activation = Activation.SILU) -> DenseWeights:
    """Weights of the maps below `prefix`."""
    return DenseWeights(table.fused(prefix, "gate_proj", "up_proj"), table.fused(prefix, "down_proj"), activation)
