"""Multi-head latent attention: keys and values of all heads are made from one latent per token.

Only the latent and the rotated part of a key, which all heads share, are kept. Queries are brought into the latent's
space instead of keys out of it, so attention sees one KV head whose values are its first channels.
"""

from dataclasses import dataclass
from typing import ClassVar

from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.spec import PageGroup
from deltaserve.model.layers.layer_spec import AttentionSpec
from deltaserve.model.shard_rules import REPLICATED, Divided
from deltaserve.model.tensor_part import Entry, TensorPart, biases, named_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSpec(AttentionSpec):
    """Sizes of the latents, and of the heads that are made from them."""

    kind: ClassVar[str] = "mla"

    q_rank: int | None
    """Channels that the queries are made from; None: they are made from the hidden state."""
    kv_rank: int
    """Channels of the latent."""
    still_dim: int
    """Channels of a head's query and key that are not rotated."""
    value_dim: int
    """Channels of a head's value."""
    interleaved: bool
    """Whether channels 2i and 2i + 1 of the checkpoint are rotated together, not i and i + R/2."""

    @property
    def turning_dim(self) -> int:
        """Channels of a head's query and key that are rotated."""
        return self.rope.dim

    def parts(self, hidden: int, prefix: str) -> dict[str, TensorPart]:
        """What makes latents and compressed queries is on every rank; what goes from there to heads is divided."""
        heads, q_size = Divided(self.num_heads), self.num_heads * (self.still_dim + self.turning_dim)
        kv_size, out_size = self.num_heads * (self.still_dim + self.value_dim), self.num_heads * self.value_dim
        biased: dict[str, Entry] = {
            "kv_a_proj_with_mqa.weight": ((self.kv_rank + self.turning_dim, hidden), REPLICATED),
            "o_proj.weight": ((hidden, out_size), Divided(self.num_heads, axis=1)),
        }
        plain: dict[str, Entry] = {
            "kv_b_proj.weight": ((kv_size, self.kv_rank), heads),
            "kv_a_layernorm.weight": ((self.kv_rank,), REPLICATED),
        }
        if self.q_rank is None:
            plain["q_proj.weight"] = (q_size, hidden), heads
        else:
            biased["q_a_proj.weight"] = (self.q_rank, hidden), REPLICATED
            plain["q_b_proj.weight"] = (q_size, self.q_rank), heads
            plain["q_a_layernorm.weight"] = (self.q_rank,), REPLICATED
        return named_parts(biased | plain | (biases(biased) if self.bias else {}), f"{prefix}.self_attn")

    def page_group(self, num_layers: int, dtype: DType) -> PageGroup:
        return PageGroup("latent", num_layers, 1, self.head_dim, dtype, planes=1, latent_dim=self.kv_rank)
