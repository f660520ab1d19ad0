"""Arenas of the page groups: `[P, H, L, planes, S, D]`, byte for byte as core/layout/kv.py says."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deltaserve.compute.memory.arena import Arena
from deltaserve.compute.memory.element_conversion import fp8_codes, fp8_values, torch_dtype
from deltaserve.compute.memory.page_checksums import page_checksums
from deltaserve.compute.memory.state_arena import StateArena
from deltaserve.compute.memory.workspace import Workspace
from deltaserve.core.ids import PageId, PoolId
from deltaserve.core.layout.copy_plan import PageSlice
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.kv import KvLayout, StateLayout
from deltaserve.core.layout.shard import Shard
from deltaserve.core.layout.spec import CacheGroup, CacheSpec, PageGroup
from deltaserve.core.tokens import pack_u32
from deltaserve.core.transport import Sharing


class KvArena(Arena):
    """One page group's memory on one device.

    Elements are kept as raw bytes for fp8 (index kernels know no float8) and in their own dtype otherwise; fp8 has
    scale 1.0 and saturates at 448.
    """

    def __init__(
        self, layout: KvLayout, num_pages: int, device: torch.device, sharing: Sharing = Sharing.PRIVATE
    ) -> None:
        super().__init__(layout.page_bytes, num_pages, device, sharing)
        self.layout = layout
        self._dtype = torch_dtype(layout.group.dtype)
        self._fp8 = layout.group.dtype is DType.FP8_E4M3
        elements = self.bytes if self._fp8 else self.bytes.view(self._dtype)
        group, page_size = layout.group, layout.page_size
        # Conversion by table: six times faster than torch's own on the CPU.
        floats = (torch.float32, torch.bfloat16, torch.float16)
        self._values = {dtype: fp8_values(dtype, device) for dtype in floats}  # [256]
        self.rows_per_page = layout.num_heads * group.num_layers * group.planes
        """Rows of [S, D] elements in a page."""
        self.rows_per_head = group.num_layers * group.planes
        planes = [(layer, plane) for layer in range(group.num_layers) for plane in range(group.planes)]
        # Views that start at the (layer, plane) of page 0, head 0: one index tensor serves every layer.
        row = page_size * group.head_dim
        self._rows = {lp: _tail_rows(elements, (lp[0] * group.planes + lp[1]) * row, row) for lp in planes}
        self._tokens = {lp: _tail_rows(elements, (lp[0] * group.planes + lp[1]) * row, group.head_dim) for lp in planes}

    def gather(self, layer: int, plane: int, rows: Tensor, out: Tensor, raw: Workspace) -> Tensor:
        """`rows` [N] int64: page * rows_per_page + head * rows_per_head -> `out` [N, S * D], in its float dtype."""
        source = self._rows[layer, plane]
        if out.dtype == source.dtype:
            return torch.index_select(source, 0, rows, out=out)
        found = raw.take("gather", (len(rows), source.shape[1]), source.dtype)
        torch.index_select(source, 0, rows, out=found)
        if not self._fp8:
            return out.copy_(found)
        codes = raw.take("codes", (found.numel(),), torch.int32).copy_(found.view(-1))
        torch.index_select(self._values[out.dtype], 0, codes, out=out.view(-1))
        return out

    def plane(self, layer: int, plane: int) -> Tensor:
        """[rows, D] as they are stored, numbered by `slots` (see scatter)."""
        return self._tokens[layer, plane]

    def scatter(self, layer: int, plane: int, slots: Tensor, values: Tensor) -> None:
        """`slots` [N] int64: row (as above) * S + offset in the page; `values` [N, D] in any float dtype."""
        self._tokens[layer, plane].index_copy_(0, slots, self.stored(values))

    def scatter_planes(self, layer: int, slots: Tensor, planes: Sequence[Tensor]) -> None:
        """Write tokens of all planes, [T, H, D] each; `slots` as of `scatter`, for all heads of a token."""
        for plane, values in enumerate(planes):
            self.scatter(layer, plane, slots, values.reshape(-1, values.shape[-1]))

    def stored(self, values: Tensor) -> Tensor:
        """Any float dtype -> as pages hold it, of the same shape."""
        return fp8_codes(values) if self._fp8 else values.to(self._dtype)


class KvPool:
    """All groups of a model on one device."""

    def __init__(
        self,
        cache: CacheSpec,
        num_pages: Sequence[int],
        device: torch.device,
        shard: Shard = Shard(),
        sharing: Sharing = Sharing.PRIVATE,
    ) -> None:
        """`num_pages` per pool of `cache.pools`."""
        self.cache = cache
        self.num_pages = tuple(num_pages)

        def arena(group: CacheGroup) -> KvArena | StateArena:
            count = num_pages[cache.pool_of(group)]
            if isinstance(group, PageGroup):
                return KvArena(KvLayout(group, cache.page_size, shard), count, device, sharing)
            return StateArena(StateLayout(group, shard), count, device, sharing)

        self.arenas = tuple(map(arena, cache.groups))

    @property
    def page_arenas(self) -> tuple[KvArena, ...]:
        """Arenas of page groups."""
        return tuple(arena for arena in self.arenas if isinstance(arena, KvArena))

    @property
    def state_arenas(self) -> tuple[StateArena, ...]:
        """Arenas of state groups."""
        return tuple(arena for arena in self.arenas if isinstance(arena, StateArena))

    def checksums(
        self, pool: PoolId, pages: Sequence[PageId], slices: Sequence[Sequence[PageSlice]] | None = None
    ) -> bytes:
        """Packed uint32 crc32 of each page, over these slices of each group of the pool, in order; None: all of it."""
        arenas = [a for a in self.arenas if self.cache.pool_of(a.layout.group) == pool]
        whole = [(PageSlice(0, arena.layout.page_bytes),) for arena in arenas]
        return pack_u32(page_checksums([arena.pages for arena in arenas], pages, slices or whole))


def _tail_rows(elements: Tensor, offset: int, size: int) -> Tensor:
    """[N, size] rows of everything from element `offset` on."""
    tail = elements[offset:]
    return tail[: tail.numel() // size * size].view(-1, size)
