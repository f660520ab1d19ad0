"""A gated delta rule behind a short convolution: a recurrent state in place of keys and values."""

from dataclasses import dataclass, replace
from typing import ClassVar

from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.shard import Shard
from deltaserve.core.layout.spec import HeadBlock, StateGroup
from deltaserve.model.layers.layer_spec import MixerSpec, StepLens
from deltaserve.model.shard_rules import REPLICATED, ByHeads, Divided, HeadRows
from deltaserve.model.tensor_part import Entry, TensorPart, cannot_divide, named_parts, share

CHUNK_LEN = 64
"""Tokens of a recurrent layer that are computed together."""
CHUNKS_AT_ONCE = 8
"""Chunks of one request whose triangular systems are solved together. More need memory and gain nothing."""


@dataclass(frozen=True, slots=True)
class DeltaSpec(MixerSpec):
    """Sizes of a layer; its mathematics: compute/layers/delta_rule.py."""

    kind: ClassVar[str] = "delta_net"

    num_key_heads: int
    num_value_heads: int
    """Value heads, a multiple of the key heads; those of one key head stand one after the other."""
    key_dim: int
    value_dim: int
    kernel_len: int
    """Tokens that the convolution sees, the token itself included."""
    grouped: bool
    """Whether rows of the input map stand by key head in the checkpoint: query, key, values, gates of each."""

    @property
    def channels(self) -> tuple[int, int, int]:
        """Channels of the convolution: those of queries, of keys, of values."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_value_heads * self.value_dim

    def local(self, shard: Shard) -> "DeltaSpec":
        if not shard.fits(self.num_key_heads):
            raise cannot_divide("linear_num_key_heads", self.num_key_heads, shard)
        first, end = shard.heads(self.num_key_heads)
        num_values = share("linear_num_value_heads", self.num_value_heads, shard)
        return replace(self, num_key_heads=end - first, num_value_heads=num_values)

    def parts(self, hidden: int, prefix: str) -> dict[str, TensorPart]:
        """Files have the inputs grouped by key head in two tensors, or in four that are not grouped."""
        keys, values = HeadRows(self.num_key_heads, self.key_dim), HeadRows(self.num_value_heads, self.value_dim)
        one = HeadRows(self.num_value_heads, 1)
        kinds = {"in_proj_qkv": (keys, keys, values), "in_proj_z": (values,), "in_proj_b": (one,), "in_proj_a": (one,)}
        if self.grouped:
            kinds = {"in_proj_qkvz": (keys, keys, values, values), "in_proj_ba": (one, one)}
        num_groups = self.num_key_heads if self.grouped else 1
        entries: dict[str, Entry] = {
            f"{name}.weight": (
                (sum(kind.num_heads * kind.rows for kind in of_map), hidden),
                ByHeads(of_map, num_groups),
            )
            for name, of_map in kinds.items()
        }
        heads, size = Divided(self.num_value_heads), self.num_value_heads * self.value_dim
        entries |= {
            "conv1d.weight": ((sum(self.channels), 1, self.kernel_len), ByHeads((keys, keys, values))),
            "A_log": ((self.num_value_heads,), heads),
            "dt_bias": ((self.num_value_heads,), heads),
            "norm.weight": ((self.value_dim,), REPLICATED),
            "out_proj.weight": ((hidden, size), Divided(self.num_value_heads, axis=1)),
        }
        return named_parts(entries, f"{prefix}.linear_attn")

    def state_groups(self, num_layers: int, conv_dtype: DType, state_dtype: DType) -> tuple[StateGroup, ...]:
        """The last inputs of the convolution, and the state [K, V] of each value head."""
        rows = num_layers * (self.kernel_len - 1)
        keys = HeadBlock(self.num_key_heads, rows, self.key_dim)
        values = HeadBlock(self.num_value_heads, rows, self.value_dim)
        states = HeadBlock(self.num_value_heads, num_layers, self.key_dim * self.value_dim)
        return (
            StateGroup("conv", num_layers, (keys, keys, values), conv_dtype),
            StateGroup("ssm", num_layers, (states,), state_dtype),
        )

    def scratch_floats(self, step: StepLens) -> int:
        """What its tokens bring, all rows' states read and written, a request's chunks."""
        per_token = 4 * sum(self.channels) + 4 * self.num_value_heads * self.value_dim
        states = 3 * step.rows * self.num_value_heads * self.key_dim * self.value_dim
        squares = 4 * CHUNK_LEN * CHUNK_LEN + 4 * CHUNK_LEN * (self.key_dim + self.value_dim)
        return step.tokens * per_token + states + CHUNKS_AT_ONCE * self.num_value_heads * squares
