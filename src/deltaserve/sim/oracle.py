"""The stand-in model: every KV entry is a stamp of all tokens up to it, every next token a hash of all stamps read.

    stamp(pool, i) = H(stamp(pool, i - 1) as read from its page, token i)        16 bytes, in the page like any KV
    next token     = H(all stamps of the row, read from its pages) mod vocab
So a page that is stale, foreign, half landed or misplaced changes the output, and the right output is a pure function
of the prompt: `oracle_output`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash

from deltaserve.base.extents import Region
from deltaserve.base.ids import AuxSlot, PageId, PoolId, RegionId, RowId
from deltaserve.base.tokens import TOKEN_BYTES, pack_u32
from deltaserve.layout.dtype import DType
from deltaserve.layout.kv import KvLayout
from deltaserve.layout.spec import CacheSpec, Lifetime, PageGroup
from deltaserve.sched.plan import ItemResult, PlanItem, Sampled, StepPlan, StepResult, TokenValues

STAMP_BYTES = 16
AUX_SLOT_BYTES = 2048


def stamp_spec(page_size: int, num_pools: int = 1) -> CacheSpec:
    """A model whose only layer keeps one stamp per token, in one or two pools."""
    lifetimes = (Lifetime.FULL, Lifetime.WINDOW)[:num_pools]
    groups = tuple(
        PageGroup(f"stamps-{life.value}", 1, 1, STAMP_BYTES // 4, DType.FLOAT32, life, planes=1) for life in lifetimes
    )
    return CacheSpec(page_size, groups)


def next_stamp(pool: int, previous: bytes, token: bytes) -> bytes:
    return xxhash.xxh3_128_digest(bytes([pool]) + previous + token)


def next_token(stamps: Sequence[bytes], vocab_size: int) -> int:
    """`stamps`: all stamps of the row, one concatenation per pool."""
    return xxhash.xxh3_64_intdigest(b"".join(stamps)) % vocab_size


def oracle_output(prompt: bytes, num_output: int, vocab_size: int, num_pools: int = 1) -> tuple[int, ...]:
    """The tokens a request must get, whatever happened on the way."""
    tokens, chains = bytearray(prompt), [bytearray() for _ in range(num_pools)]
    output: list[int] = []
    while len(output) < num_output:
        for pool, chain in enumerate(chains):
            for offset in range(len(chain) // STAMP_BYTES * TOKEN_BYTES, len(tokens), TOKEN_BYTES):
                token = bytes(tokens[offset : offset + TOKEN_BYTES])
                chain += next_stamp(pool, bytes(chain[-STAMP_BYTES:]), token)
        output.append(next_token([bytes(chain) for chain in chains], vocab_size))
        tokens += pack_u32(output[-1:])
    return tuple(output)


class StampMemory:
    """Pages and aux slots as bytearrays; the transfer.memory.Memory of a simulated rank."""

    def __init__(self, cache: CacheSpec, num_pages: Sequence[int], num_aux_slots: int) -> None:
        self.layouts = {group.name: KvLayout(group, cache.page_size) for group in cache.groups}
        self.regions: list[tuple[str, Region]] = []
        self.memory: dict[RegionId, bytearray] = {}
        for pool, group in enumerate(cache.groups):
            self._add(group.name, self.layouts[group.name].arena_bytes(num_pages[pool]))
        self._add("aux", num_aux_slots * AUX_SLOT_BYTES)
        self._page_size = cache.page_size

    def _add(self, component: str, num_bytes: int) -> None:
        region = RegionId(len(self.regions))
        self.memory[region] = bytearray(num_bytes)
        self.regions.append((component, Region(region, 0, num_bytes, "cpu")))

    @property
    def _aux(self) -> bytearray:
        return self.memory[RegionId(len(self.regions) - 1)]

    def pages(self, pool: PoolId, pages: Sequence[PageId]) -> bytes:
        """Bytes of `pages`, one after the other."""
        size = self._page_size * STAMP_BYTES
        arena = self.memory[RegionId(pool)]
        return b"".join(bytes(arena[page * size : (page + 1) * size]) for page in pages)

    def write_stamp(self, pool: PoolId, page: PageId, offset: int, stamp: bytes) -> None:
        at = (page * self._page_size + offset) * STAMP_BYTES
        self.memory[RegionId(pool)][at : at + STAMP_BYTES] = stamp

    def checksums(self, pool: PoolId, pages: tuple[PageId, ...]) -> bytes:
        return pack_u32(xxhash.xxh32_intdigest(self.pages(pool, (page,))) for page in pages)

    def read_aux(self, slot: AuxSlot) -> bytes:
        return bytes(self._aux[slot * AUX_SLOT_BYTES : (slot + 1) * AUX_SLOT_BYTES])

    def write_aux(self, slot: AuxSlot, data: bytes) -> None:
        if len(data) > AUX_SLOT_BYTES:
            raise ValueError(f"{len(data)} bytes exceed an aux slot")
        start = slot * AUX_SLOT_BYTES
        self._aux[start : start + len(data)] = data


@dataclass(slots=True)
class _Row:
    tokens: bytearray
    tables: list[list[PageId]] = field(default_factory=list)


class OracleExecutor:
    """The Executor of a simulated rank."""

    def __init__(self, cache: CacheSpec, memory: StampMemory, vocab_size: int) -> None:
        self._cache = cache
        self._memory = memory
        self._vocab_size = vocab_size
        self._rows: dict[RowId, _Row] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        for row in plan.closes:
            del self._rows[row]
        for opened in plan.opens:
            tables: list[list[PageId]] = [[] for _ in range(self._cache.num_pools)]
            self._rows[opened.row] = _Row(bytearray(opened.tokens), tables)
        for update in plan.pages:
            table = self._rows[update.row].tables[update.pool]
            table[update.first_index : update.first_index + len(update.pages)] = update.pages
        return StepResult(plan.step, tuple(self._compute(item) for item in plan.items))

    def _compute(self, item: PlanItem) -> ItemResult:
        row = self._rows[item.row]
        if not isinstance(item.inputs, TokenValues):
            raise ValueError("the oracle runs at overlap depth 0")
        end = item.q_start + item.q_len
        row.tokens[item.q_start * TOKEN_BYTES : end * TOKEN_BYTES] = item.inputs.tokens
        chains = [self._extend(row, PoolId(pool), item) for pool in range(self._cache.num_pools)]
        if not item.samples:
            return ItemResult(item.row)
        return ItemResult(item.row, Sampled(next_token(chains, self._vocab_size)))

    def _extend(self, row: _Row, pool: PoolId, item: PlanItem) -> bytes:
        """Write the stamps of the item's positions; returns all stamps [0, end) as they stand in the pages."""
        page_size, table = self._cache.page_size, row.tables[pool]
        end = item.q_start + item.q_len
        chain = bytearray(self._memory.pages(pool, table[: self._cache.num_pages(end)]))
        for position in range(item.q_start, end):
            previous = bytes(chain[(position - 1) * STAMP_BYTES : position * STAMP_BYTES]) if position else b""
            token = bytes(row.tokens[position * TOKEN_BYTES : (position + 1) * TOKEN_BYTES])
            stamp = next_stamp(pool, previous, token)
            chain[position * STAMP_BYTES : (position + 1) * STAMP_BYTES] = stamp
            self._memory.write_stamp(pool, table[position // page_size], position % page_size, stamp)
        return bytes(chain[: end * STAMP_BYTES])
