"""CacheSpec: what a model keeps per token, produced by the model and read by everybody else.

Pools, admission, the transfer planner, checksums and the handshake read it; nothing else knows families.
"""

from dataclasses import dataclass
from enum import Enum

from deltaserve.base.ids import PoolId
from deltaserve.layout.dtype import DType


class Lifetime(Enum):
    """How long a page of a group must be kept. Groups of one lifetime share page ids."""

    FULL = "full"
    """As long as any token after it may be computed."""
    WINDOW = "window"
    """Only while within the window; an allocator and a table of its own."""


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers of equal kind, heads, head_dim, dtype and lifetime.

    Arena: `[page][kv_head][layer][K|V][token][dim]`: a page is one contiguous block, and so is a head range of it.
    """

    name: str
    num_layers: int
    num_kv_heads: int
    """Of the whole model, not of one rank."""
    head_dim: int
    dtype: DType
    lifetime: Lifetime = Lifetime.FULL
    planes: int = 2
    """Tensors kept per token: 2 for K and V, 1 for a latent that serves as both."""


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The page groups of a model. `page_size` (tokens) is one for all: the tree matches in its units."""

    page_size: int
    groups: tuple[PageGroup, ...]

    @property
    def pools(self) -> tuple[Lifetime, ...]:
        """Distinct lifetimes in order of first use; a PoolId indexes this tuple."""
        return tuple(dict.fromkeys(group.lifetime for group in self.groups))

    @property
    def num_pools(self) -> int:
        return len(self.pools)

    def pool_of(self, group: PageGroup) -> PoolId:
        return PoolId(self.pools.index(group.lifetime))

    def groups_of(self, pool: PoolId) -> tuple[PageGroup, ...]:
        return tuple(group for group in self.groups if self.pool_of(group) == pool)

    def num_pages(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)
