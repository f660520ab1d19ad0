"""A mixture of experts: each token goes to its best ones, and perhaps to one that all tokens go to."""

from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar

from deltaserve.core.errors import ConfigError
from deltaserve.core.layout.shard import Shard
from deltaserve.model.layers.dense import gated_maps
from deltaserve.model.layers.layer_spec import MlpSpec
from deltaserve.model.shard_rules import REPLICATED, ByExperts, Divided, ExpertPlacement, FirstRank, OneOf
from deltaserve.model.tensor_part import Entry, TensorPart, named_parts, share

FUSED_EXPERTS = ("gate_up_proj", "down_proj")
"""What files call the experts' matrices where each is one tensor of all experts."""
CORRECTION = "gate.e_score_correction_bias"
"""Name of the router's correction in a layer of experts."""


class RouterKind(Enum):
    """How expert scores become weights."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    """Each score alone. A learned correction takes part in the choice of experts, not in their weights."""


@dataclass(frozen=True, slots=True)
class ClampedGlu:
    """The product of gate and up projection, which stand side by side row by row: (up + 1) * gate *
    sigmoid(alpha * gate), both clamped."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class MoeSpec(MlpSpec):
    """Experts of a layer, and how they are chosen."""

    kind: ClassVar[str] = "moe"

    router: RouterKind
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    renormalise: bool
    num_groups: int = 1
    """Experts stand in groups of equal size, one after the other."""
    kept_groups: int = 1
    """Groups whose experts may be chosen: those with the best two."""
    scale: float = 1.0
    """Factor on the experts' sum."""
    shared_size: int = 0
    """Intermediate size of what every token goes through beside its experts; 0: there is none."""
    clamped: ClampedGlu | None = None
    """Product used in place of SwiGLU: then all linear maps, the router's too, have biases, and files hold matrices
    transposed."""
    shared_gate: bool = False
    """What that gives is scaled by the sigmoid of a learned score of the token."""
    placement: ExpertPlacement = ExpertPlacement()

    @property
    def expert_count(self) -> int:
        return self.num_experts

    @property
    def unrecordable(self) -> str | None:
        spread = self.placement.member.size > 1
        return "its experts are spread over a group of workers, whose rows travel by the host" if spread else None

    def local(self, shard: Shard) -> "MoeSpec":
        """A rank's part of its experts: it still chooses among all."""
        ep_size = self.placement.ep_size
        if ep_size is not None and shard.size > 1:
            if shard.size % ep_size:
                raise ConfigError(f"--ep-size {ep_size}: must divide the {shard.size} ranks of a worker")
            if self.num_experts % ep_size:
                raise ConfigError(f"--ep-size {ep_size}: {self.num_experts} experts do not divide over so many groups")
        inner, shared = self.placement.cut(self.num_experts, shard).inner, self.shared_size
        name = (
            "moe_intermediate_size" if ep_size is not None else "num_experts does not divide, and moe_intermediate_size"
        )
        return replace(
            self,
            intermediate_size=share(name, self.intermediate_size, inner),
            shared_size=share("shared experts", shared, shard),
        )

    def placed(self, placement: ExpertPlacement) -> "MoeSpec":
        return replace(self, placement=placement)

    def scratch_floats(self, hidden: int) -> int:
        """In an expert group all members' tokens may come to the experts of one."""
        routed = self.experts_per_token * (3 * hidden + 3 * self.intermediate_size) * self.placement.member.size
        return routed + 3 * self.shared_size

    def parts(self, hidden: int, prefix: str) -> dict[str, TensorPart]:
        """Files hold experts one by one, or fused as `experts.gate_up_proj` and `experts.down_proj`: both are taken."""
        count, inner, prefix = self.num_experts, self.intermediate_size, f"{prefix}.mlp"
        entries: dict[str, Entry] = {"gate.weight": ((count, hidden), REPLICATED)}
        if self.router is RouterKind.SIGMOID:
            entries[CORRECTION] = (count,), REPLICATED
        if self.clamped is not None:
            return named_parts(entries | self._transposed(hidden), prefix)
        if self.shared_size:
            entries |= {f"shared_experts.{name}": entry for name, entry in gated_maps(hidden, self.shared_size).items()}
        if self.shared_gate:
            entries["shared_expert_gate.weight"] = (1, hidden), REPLICATED
        parts = named_parts(entries, prefix)
        names: dict[str, list[str]] = {name: [] for name in FUSED_EXPERTS}
        for expert in range(count):
            for name, (shape, rule) in gated_maps(hidden, inner).items():
                full = f"{prefix}.experts.{expert}.{name}"
                parts[full] = TensorPart(shape, (full,), self._by(OneOf(expert, count), rule))
                names["down_proj" if name.startswith("down") else "gate_up_proj"].append(full)
        fused = {
            "gate_up_proj": ((count, 2 * inner, hidden), Divided(inner, axis=1, num_blocks=2)),
            "down_proj": ((count, hidden, inner), Divided(inner, axis=2)),
        }
        for name, (shape, rule) in fused.items():
            parts[f"{prefix}.experts.{name}"] = TensorPart(shape, tuple(names[name]), self._by(Divided(count), rule))
        return parts

    def _transposed(self, hidden: int) -> dict[str, Entry]:
        """Fused, [in, out] of each expert; gate and up projection of a channel side by side."""
        count, inner = self.num_experts, self.intermediate_size
        experts = Divided(count)
        return {
            "gate.bias": ((count,), REPLICATED),
            "experts.gate_up_proj": ((count, hidden, 2 * inner), self._by(experts, Divided(inner, axis=2))),
            "experts.gate_up_proj_bias": ((count, 2 * inner), self._by(experts, Divided(inner, axis=1))),
            "experts.down_proj": ((count, inner, hidden), self._by(experts, Divided(inner, axis=1))),
            "experts.down_proj_bias": ((count, hidden), self._by(experts, FirstRank())),
        }

    def _by(self, experts: OneOf | Divided, inner: Divided | FirstRank) -> ByExperts:
        return ByExperts(self.num_experts, self.placement, experts, inner)
