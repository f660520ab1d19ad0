"""Grouped-query attention: keys and values of fewer heads than there are queries."""

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from deltaserve.model.layers.layer_spec import AttentionSpec
from deltaserve.model.shard_rules import REPLICATED, ByHeads, Divided, HeadRows
from deltaserve.model.tensor_part import Entry, TensorPart, biases, named_parts

GATE_BEFORE_QUERY = (1, 0)
"""A file's head has its query, then its gate; here all gates come first, so that queries and keys lie together."""


class QkNorm(Enum):
    """RMSNorm on queries and keys before RoPE."""

    NONE = "none"
    HEAD = "head"
    """Each head is normalised alone; one weight [D] for queries and one for keys."""
    ALL = "all"
    """All heads are normalised together; one weight [Hq * D] for queries and one [Hkv * D] for keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GqaSpec(AttentionSpec):
    """Heads of a layer, and what is done to them."""

    kind: ClassVar[str] = "gqa"

    qk_norm: QkNorm = QkNorm.NONE
    output_gate: bool = False
    """What attention gives is scaled by the sigmoid of a gate that each head's query brings."""
    sinks: bool = False
    """Each head has a learned score of a key that every position sees, and that has no value."""
    num_inputs: int = 1
    """Hidden states side by side that it is computed from."""

    def parts(self, hidden: int, prefix: str) -> dict[str, TensorPart]:
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        num_inputs = self.num_inputs * hidden
        heads, kv_heads = Divided(self.num_heads), Divided(self.num_kv_heads)
        queries: Entry = (q_size, num_inputs), heads
        if self.output_gate:
            rows = HeadRows(self.num_heads, self.head_dim)
            queries = (2 * q_size, num_inputs), ByHeads((rows, rows), self.num_heads, GATE_BEFORE_QUERY)
        entries: dict[str, Entry] = {
            "q_proj.weight": queries,
            "k_proj.weight": ((kv_size, num_inputs), kv_heads),
            "v_proj.weight": ((kv_size, num_inputs), kv_heads),
            "o_proj.weight": ((hidden, q_size), Divided(self.num_heads, axis=1)),
        }
        if self.bias:
            entries |= biases(entries)
        if self.sinks:
            entries["sinks"] = (self.num_heads,), heads
        if self.qk_norm is QkNorm.HEAD:
            entries |= {f"{name}_norm.weight": ((self.head_dim,), REPLICATED) for name in "qk"}
        if self.qk_norm is QkNorm.ALL:
            entries |= {"q_norm.weight": ((q_size,), heads), "k_norm.weight": ((kv_size,), kv_heads)}
        return named_parts(entries, f"{prefix}.self_attn")
