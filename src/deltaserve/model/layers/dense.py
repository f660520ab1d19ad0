"""The feed-forward part of a gated linear unit: SwiGLU, or the same with another function on the gate."""

from dataclasses import dataclass, replace
from typing import ClassVar

from deltaserve.core.layout.shard import Shard
from deltaserve.model.layers.layer_spec import Activation, MlpSpec
from deltaserve.model.shard_rules import Divided, Shape
from deltaserve.model.tensor_part import Entry, TensorPart, biases, named_parts, share


@dataclass(frozen=True, slots=True)
class DenseSpec(MlpSpec):
    """Sizes of it."""

    kind: ClassVar[str] = "dense"

    inner: int
    """Channels between the two maps."""
    bias: bool = False
    activation: Activation = Activation.SILU

    def parts(self, hidden: int, prefix: str) -> dict[str, TensorPart]:
        entries: dict[str, Entry] = {**gated_maps(hidden, self.inner)}
        return named_parts(entries | (biases(entries) if self.bias else {}), f"{prefix}.mlp")

    def local(self, shard: Shard) -> "DenseSpec":
        return replace(self, inner=share("intermediate_size", self.inner, shard))

    def scratch_floats(self, hidden: int) -> int:
        return 3 * self.inner


def gated_maps(hidden: int, inner: int) -> dict[str, tuple[Shape, Divided]]:
    """Three linear maps, of gates, of what they open, and back."""
    return {
        "gate_proj.weight": ((inner, hidden), Divided(inner)),
        "up_proj.weight": ((inner, hidden), Divided(inner)),
        "down_proj.weight": ((hidden, inner), Divided(inner, axis=1)),
    }
