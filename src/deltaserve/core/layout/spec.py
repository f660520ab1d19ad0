"""CacheSpec: what a model keeps per token, produced by the model and read by everybody else.

Pools, admission, the transfer planner, checksums and the handshake read it; nothing else knows families.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

from deltaserve.core.ids import PoolId
from deltaserve.core.layout.dtype import DType
from deltaserve.core.lifetime import KEEP_ALL, KEEP_LAST, Retention


class HeadBlock(NamedTuple):
    """Heads of equal kind, of the whole model. One head of a page is [num_rows, tokens of a page, row_width]."""

    num_heads: int
    num_rows: int
    row_width: int


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers of equal kind, heads, head_dim, dtype and retention.

    Arena: `[page][kv_head][layer][K|V][token][dim]`: a page is one contiguous block, and so is a head range of it.
    """

    name: str
    num_layers: int
    num_kv_heads: int
    """KV heads of the whole model, not of one rank."""
    head_dim: int
    dtype: DType
    retention: Retention = KEEP_ALL
    """Groups of equal retention share page ids; each retention has an allocator and a page table of its own."""
    planes: int = 2
    """Tensors kept per token: 2 for K and V, 1 for a latent that serves as both."""
    latent_dim: int | None = None
    """Channels of a key that are its value, too, the first ones; None: all of the last plane are."""
    is_for_guesses: bool = False
    """No answer depends on what its pages hold: another worker of the model may keep no such group."""

    @property
    def value_dim(self) -> int:
        return self.latent_dim or self.head_dim

    @property
    def blocks(self) -> tuple[HeadBlock, ...]:
        return (HeadBlock(self.num_kv_heads, self.num_layers * self.planes, self.head_dim),)

    def page_len(self, page_size: int) -> int:
        """Tokens that lie in a page, each with rows of its own."""
        return page_size


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Recurrent states of all layers of a kind. A page of its pool is a *slot*: the states after one token.

    Of each block a rank has its heads, one after the other, and the blocks follow each other.
    """

    name: str
    num_layers: int
    blocks: tuple[HeadBlock, ...]
    """A head's rows are those of layer 0, of layer 1, ..."""
    dtype: DType

    retention: ClassVar[Retention] = KEEP_LAST
    is_for_guesses: ClassVar[bool] = False

    def page_len(self, page_size: int) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class PageTerms:
    """What two workers of one model may have different of their groups."""

    page_size: int
    dtypes: tuple[DType | None, ...]
    """Each group's dtype, in order of the groups; None: this worker keeps no such group, since no answer depends on
    it."""


CacheGroup = PageGroup | StateGroup
"""A group of either kind. Only memory and attention ask which: all others read name, dtype, retention, blocks and
page_len."""


@dataclass(frozen=True)
class CacheSpec:
    """The groups of a model. `page_size` (tokens) is one for all: the tree matches in its units."""

    page_size: int
    groups: tuple[CacheGroup, ...]

    @cached_property
    def pools(self) -> tuple[Retention, ...]:
        """Distinct retentions, FULL first, else in order of first use; a PoolId indexes this tuple."""
        distinct = dict.fromkeys(group.retention for group in self.groups)
        return tuple(sorted(distinct, key=lambda retention: retention != KEEP_ALL))

    @property
    def keeps_all(self) -> bool:
        """Whether every group keeps all tokens: pages of any two sizes can be copied into each other then."""
        return all(group.retention == KEEP_ALL for group in self.groups)

    @property
    def draft_group(self) -> str | None:
        """Name of the group that a draft head keeps; None: there is no head."""
        return next((group.name for group in self.groups if group.is_for_guesses), None)

    @property
    def num_pools(self) -> int:
        return len(self.pools)

    def under(self, terms: PageTerms) -> "CacheSpec":
        """The groups as another worker keeps them. Raises ValueError when these are not so many."""
        groups = zip(self.groups, terms.dtypes, strict=True)
        kept = tuple(replace(group, dtype=dtype) for group, dtype in groups if dtype is not None)
        return CacheSpec(terms.page_size, kept)

    def pool_of(self, group: CacheGroup) -> PoolId:
        return PoolId(self.pools.index(group.retention))

    def groups_of(self, pool: PoolId) -> tuple[CacheGroup, ...]:
        return tuple(group for group in self.groups if self.pool_of(group) == pool)

    def num_pages(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)
