"""Attention by Triton's kernels: K and V are read in place from their pages, each shared split in one item.

Guarantee: for one batch and the same KV bytes, a position's result has equal bits whether splits are shared or not.
See plan.py for the partition. Needs triton when it is imported.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from deltaserve.compute.attention.attention import Batch, StepAttention, StepStates
from deltaserve.compute.attention.attention_backend import AttentionBackend, PagesInUse
from deltaserve.compute.attention.fixed_step import FixedStepBackend, RowsOnDevice, RowsToCome
from deltaserve.compute.attention.opening import open_kernels
from deltaserve.compute.attention.plan import Int64s, TileSize, WorkTiles, plan_work
from deltaserve.compute.attention.triton.fixed_states import FixedStates, StateMoves
from deltaserve.compute.attention.triton.kind import KIND
from deltaserve.compute.attention.triton.row_work import RowCut, RowWork, SharedWork, shared_work
from deltaserve.compute.attention.triton.triton_kernels import partial_results, store_tokens
from deltaserve.compute.attention.triton.work_buffer import WorkBuffer, WorkCapacity
from deltaserve.compute.attention.triton_launch import IS_INTERPRETED, KernelLauncher, power_of_two
from deltaserve.compute.attention.triton_merge import PartialMerge, PartialResults
from deltaserve.compute.memory.kv_pool import KvArena, KvPool
from deltaserve.compute.memory.page_table import PageTable, Table
from deltaserve.compute.memory.workspace import Workspace
from deltaserve.core.errors import StateError
from deltaserve.core.ids import PoolId
from deltaserve.core.layout.dtype import DType

_LOG2_E = 1.4426950408889634
_LEAST_DIM = 16
"""Least channels in a product on tensor cores."""
_WIDE_DIM = 256
"""Heads of more channels have fewer rows and keys at once: a tile has to fit in a multiprocessor."""
_STORED_VALUES = 2048
"""Values that one program stores."""
_LEAST_ROOM = 256
"""Least room for tiles and partial results in a fixed step: so many empty programs take about a microsecond
(reckoned)."""
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


_Options = tuple[tuple[object, ...], int, int]
"""Constants, warps and stages of a launch: see KernelLauncher."""


class _Kernels:
    """What all steps of a backend launch."""

    def __init__(self, device: torch.device) -> None:
        self.store_tokens, self.partial_results = KernelLauncher(store_tokens), KernelLauncher(partial_results)
        self.merge = PartialMerge()
        self.has_e4m3 = has_e4m3(device)


class TritonAttention(AttentionBackend, FixedStepBackend):
    """AttentionBackend by Triton's kernels, also for fixed steps."""

    def __init__(self, pool: KvPool, tables: PageTable, query_heads: Sequence[int]) -> None:
        AttentionBackend.__init__(self, pool, tables, query_heads)
        device = pool.arenas[0].bytes.device
        self._kernels = _Kernels(device)
        self._state_moves = StateMoves()
        self._fixed_scratch = Workspace(device)
        """Apart: fixed steps keep what they were given when it grows, and other steps may need much more."""

    @property
    def max_keys(self) -> int:
        num_pages: int = self._tables.table(PoolId(0)).shape[1]
        return num_pages * self._pool.cache.page_size

    def fixed_step(self, on_device: RowsOnDevice, rows: RowsToCome) -> "TritonFixedStep":
        own = [arena.layout.group for arena in self._pool.page_arenas if not arena.layout.group.is_for_guesses]
        groups = [self._fixed_pages(on_device, rows, index) for index in range(len(own))]  # a draft's stands last
        return TritonFixedStep(groups, self._fixed_states(on_device), on_device, rows, self._fixed_scratch)

    def fixed_group(self, on_device: RowsOnDevice, rows: RowsToCome, group: int) -> "TritonFixedStep":
        groups = [self._fixed_pages(on_device, rows, group)]
        return TritonFixedStep(groups, (), on_device, rows, self._fixed_scratch)

    def _fixed_pages(self, on_device: RowsOnDevice, rows: RowsToCome, group: int) -> "_FixedGroup":
        pages = _PagesOfGroup(*self._place(group), self._kernels)
        pool = self._pool.cache.pool_of(pages.arena.layout.group)
        return _FixedGroup(pages, pages.cut(rows.split_tokens), on_device.tables[pool])

    def _fixed_states(self, on_device: RowsOnDevice) -> list[FixedStates]:
        cache, arenas = self._pool.cache, self._pool.state_arenas
        tables = [on_device.tables[cache.pool_of(arena.layout.group)] for arena in arenas]
        return [
            FixedStates(arena, on_device, table, cache.page_size, self._state_moves)
            for arena, table in zip(arenas, tables, strict=True)
        ]

    @property
    def scratch_bytes(self) -> int:
        return self._workspace.num_bytes + self._fixed_scratch.num_bytes

    def _begin(self, arena: KvArena, table: Table, batch: Batch, rows_per_head: int) -> StepAttention:
        group = _PagesOfGroup(arena, table, rows_per_head, self._kernels)
        work = group.planned(batch)
        is_single = int(work.part_starts[-1]) == len(work.positions)
        return TritonStep(group, WorkBuffer.of(work, arena.bytes.device), self._workspace, is_single)


class _PagesOfGroup(NamedTuple):
    """Where a page group lies, and how its queries are cut into tiles."""

    arena: KvArena
    table: Table
    group_size: int
    """Query heads to a KV head."""
    kernels: _Kernels

    @property
    def sizes(self) -> tuple[TileSize, TileSize]:
        return tile_sizes(self.group_size, self.arena.layout.group.head_dim)

    def planned(self, batch: Batch) -> WorkTiles:
        window_len = self.arena.layout.group.retention.window_len
        return plan_work(batch, self.table, self.arena.layout.page_size, self.group_size, window_len, self.sizes)

    def cut(self, split_tokens: int) -> RowCut:
        """How rows that decode are cut."""
        layout = self.arena.layout
        window_len = layout.group.retention.window_len
        return RowCut(split_tokens, window_len, layout.page_size, self.group_size, self.sizes[0])


class _FixedGroup(NamedTuple):
    """A page group of a fixed step."""

    pages: _PagesOfGroup
    cut: RowCut
    table: Tensor
    """Its pool's page table on the device."""

    def shared(self, room: int, rows: RowsToCome) -> SharedWork:
        return shared_work(self.cut, room, rows, self.table.shape[1])

    def capacity(self, num_tokens: int, rows: RowsToCome) -> WorkCapacity:
        """Room for what `rows` need, to the next power of two, but for as much at least as costs next to nothing.

        So rows that grow, or stop sharing, need new room a few times in the life of a worker. Of the programs of a
        launch, unless they are few, half at least had something to do in the step that they were made for.
        """
        results, tiles = self.cut.need(rows.ends, rows.lens)
        most_pieces = self.table.shape[1] * self.cut.page_size // self.cut.split_tokens + 1
        most_tiles = num_tokens * most_pieces * -(-self.cut.group_size // self.cut.size.rows)
        listed = num_tokens + _room(len(self.shared(num_tokens, rows).tokens))
        tiles = min(_room(tiles), most_tiles)
        return WorkCapacity(num_tokens, results=_room(results), short=tiles, long=0, listed=listed, pages=0)


def _room(need: int) -> int:
    room: int = power_of_two(max(_LEAST_ROOM, need))
    return room


class TritonFixedStep:
    """See FixedStep. Keeps the scratch memory that it was made with: what was recorded has its address. Steps of equal
    room, or of less, have the same, and as sizes are powers of two all that is kept is less than twice the largest."""

    def __init__(
        self,
        groups: Sequence[_FixedGroup],
        states: Sequence[FixedStates],
        on_device: RowsOnDevice,
        rows: RowsToCome,
        scratch: Workspace,
        replaced: "TritonFixedStep | None" = None,
    ) -> None:
        """`replaced`: has room for no more than this one."""
        self._groups = tuple(groups)
        self._states = tuple(states)
        self._on_device, self._scratch = on_device, scratch
        self._num_tokens = num_tokens = len(on_device.lines)
        room = [group.capacity(num_tokens, rows) for group in self._groups]
        if replaced is not None:
            room = [own.widened(work.capacity) for own, work in zip(room, replaced._work, strict=True)]
        self._work: list[RowWork] = [
            RowWork(on_device, group.table, group.cut, own) for group, own in zip(self._groups, room, strict=True)
        ]
        self._attention = [
            TritonStep(group.pages, work, scratch) for group, work in zip(self._groups, self._work, strict=True)
        ]
        self._shared_tokens = 0
        if not self.share(rows) or not self.holds(rows.ends, rows.lens):
            raise StateError(f"{len(rows.lines)} queries do not fit in a step of {num_tokens} tokens")

    @property
    def attention(self) -> Sequence[StepAttention]:
        return self._attention

    @property
    def states(self) -> Sequence[StepStates]:
        return self._states

    @property
    def shared_tokens(self) -> int:
        return self._shared_tokens

    def plan(self) -> None:
        for work in self._work:
            work.plan()
        for states in self._states:
            states.plan()

    def holds(self, ends: Int64s, lens: Int64s) -> bool:
        return all(work.holds(ends, lens) for work in self._work)

    def share(self, rows: RowsToCome) -> bool:
        shared = [group.shared(self._num_tokens, rows) for group in self._groups]
        if not all(work.has_room(part) for work, part in zip(self._work, shared, strict=True)):
            return False
        for work, part in zip(self._work, shared, strict=True):
            work.share(part)
        self._shared_tokens = max(part.num_tokens for part in shared)
        return True

    def widened(self, rows: RowsToCome) -> "TritonFixedStep":
        return TritonFixedStep(self._groups, self._states, self._on_device, rows, self._scratch, self)


class TritonStep:
    """A step's attention over one arena, by Triton's kernels."""

    def __init__(
        self, group: _PagesOfGroup, work: WorkBuffer | RowWork, scratch: Workspace, is_single: bool = False
    ) -> None:
        """`is_single`: no token has more than one partial result, in any step of this buffer."""
        self._arena = group.arena
        self._group_size = group.group_size
        self._sizes = group.sizes
        self._kernels = group.kernels
        self._is_single = is_single
        self._options: dict[object, _Options] = {}
        """Strides and type of queries, and tile size |-> options of their launch."""
        self.work = work
        num_heads = group.group_size * group.arena.layout.num_heads
        size = (work.capacity.results, num_heads)
        self._outs = scratch.take("outs", (*size, group.arena.layout.group.value_dim), torch.float32)
        self._sums = scratch.take("sums", size, torch.float32)

    @property
    def _strides(self) -> tuple[int, int]:
        """Elements from page to page, and from head to head."""
        arena = self._arena
        row = arena.layout.page_size * arena.layout.group.head_dim
        return arena.rows_per_page * row, arena.rows_per_head * row

    def write_kv(self, layer: int, *planes: Tensor) -> None:
        """Write the step's keys and values: planes [T, H, D] each."""
        arena, work = self._arena, self.work
        _, num_heads, dim = planes[0].shape
        width = power_of_two(dim)
        num_rows = max(1, _STORED_VALUES // width)
        to_e4m3 = arena.layout.group.dtype is DType.FP8_E4M3 and self._kernels.has_e4m3
        values = planes if to_e4m3 else [arena.stored(plane) for plane in planes]
        values = [plane if plane.stride(2) == 1 else plane.contiguous() for plane in values]
        first, second = values[0], values[-1]
        num_programs = -(-work.capacity.tokens * num_heads // num_rows)
        if num_programs:
            self._kernels.store_tokens(
                (num_programs, len(planes)),
                (first, second, arena.plane(layer, 0), work.num_tokens, work.positions, work.write_pages),
                (),
                (
                    *(first.stride(0), first.stride(1), second.stride(0), second.stride(1)),
                    *self._strides,
                    *(num_heads, arena.layout.page_size, dim, width, num_rows, to_e4m3),
                ),
            )

    def attend(self, layer: int, q: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        """q [T, Hq, D] -> [T, Hq, Dv]"""
        group, work = self._arena.layout.group, self.work
        if q.shape[0] != work.capacity.tokens or q.shape[2] != group.head_dim:
            raise StateError(f"queries of shape {tuple(q.shape)} in a step of {work.capacity.tokens} tokens")
        q = q if q.stride(2) == 1 else q.contiguous()
        out = q.new_empty(*q.shape[:-1], group.value_dim)
        short, long = self._sizes
        if work.capacity.short:
            self._compute(work.num_short, work.short, short, layer, q, scale)
        if work.capacity.long:
            self._compute(work.num_long, work.long, long, layer, q, scale)
        if work.capacity.tokens:
            partial = PartialResults(self._outs, self._sums, work.part_starts, is_single=self._is_single)
            self._kernels.merge(partial, sinks, out)
        return out

    def _compute(self, num_tiles: Tensor, tiles: Tensor, size: TileSize, layer: int, q: Tensor, scale: float) -> None:
        arena, work = self._arena, self.work
        kind = q.stride(0), q.stride(1), q.dtype, size
        options = self._options.get(kind)
        if options is None:
            options = self._options[kind] = self._options_of(q, size)
        pages = arena.plane(layer, 0), arena.plane(layer, arena.layout.group.planes - 1)
        lists = num_tiles, tiles, work.tokens, work.positions, work.first_parts, work.pages
        self._kernels.partial_results(
            (len(tiles) // 8, arena.layout.num_heads),
            (q, *pages, *lists, self._outs, self._sums),
            (scale * _LOG2_E,),
            *options,
        )

    def _options_of(self, q: Tensor, size: TileSize) -> _Options:
        group = self._arena.layout.group
        compute, is_fp8 = compute_type(q.dtype, group.dtype), group.dtype is DType.FP8_E4M3
        constants = (
            *(q.stride(0), q.stride(1), *self._strides),
            *(q.shape[1], self._group_size, self._arena.layout.page_size, group.retention.window_len or 0),
            *(group.head_dim, group.value_dim, *split_dim(group.head_dim), *split_dim(group.value_dim)),
            *(size.rows, size.keys, is_fp8, self._kernels.has_e4m3, _TYPES[compute]),
        )
        return constants, num_warps(group.head_dim), num_stages(compute)


def tile_sizes(group_size: int, head_dim: int) -> tuple[TileSize, TileSize]:
    """Sizes of tiles of short queries and of long ones. The first are few rows: a product of a decoding row alone,
    padded to them, should take less time than its keys."""
    most, keys = (32, 32) if head_dim > _WIDE_DIM else (64, 64)
    return TileSize(min(most, max(16, power_of_two(group_size))), keys), TileSize(most, keys)


def num_warps(head_dim: int) -> int:
    """Warps of a program that computes partial results."""
    return 8 if head_dim > _WIDE_DIM else 4


def num_stages(compute: torch.dtype) -> int:
    """Blocks of keys on their way to such a program at once."""
    return 1 if compute is torch.float32 else 2


def split_dim(dim: int) -> tuple[int, int]:
    """Two powers of two that hold so many channels; the second may be 0."""
    first = max(_LEAST_DIM, 1 << dim.bit_length() - 1)
    return first, max(_LEAST_DIM, power_of_two(dim - first)) if dim > first else 0


def has_e4m3(device: torch.device) -> bool:
    """Whether it converts e4m3 by itself: Ada and what came after."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def compute_type(q: torch.dtype, kept: DType) -> torch.dtype:
    """Type in which products are computed; sums are float32 always. e4m3 is exact in float16, and one instruction away
    from it. The interpreter multiplies no bfloat16."""
    if kept is DType.FP8_E4M3:
        return torch.float32 if q is torch.float32 else torch.float16
    of_pages = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}
    found = q if of_pages[kept] is q else torch.float32
    return torch.float32 if IS_INTERPRETED and found is torch.bfloat16 else found


def open_attention(pages: PagesInUse) -> AttentionBackend:
    """The backend, once it has passed its self-test. Raises BackendUnavailable."""
    return open_kernels(KIND.name, TritonAttention, pages, IS_INTERPRETED)
