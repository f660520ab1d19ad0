"""Random batches over a page pool, and attention computed the plain way, for tests on any device."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltaserve.compute.attention.attention import Batch, Query, Shared
from deltaserve.compute.attention.attention_backend import AttentionBackend
from deltaserve.compute.attention.native.native_attention import NativeAttention
from deltaserve.compute.attention.reference.torch_attention import TorchAttention
from deltaserve.compute.memory.element_conversion import torch_dtype
from deltaserve.compute.memory.kv_pool import KvPool
from deltaserve.compute.memory.page_table import PageTable
from deltaserve.core.ids import PageId, PoolId
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.spec import CacheSpec, PageGroup
from deltaserve.core.lifetime import KEEP_ALL, Lifetime, Retention
from deltaserve.core.rounding import Rounding
from tests.compute.native.native_build import native_context

POOL = PoolId(0)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one test world."""

    page_size: int = 16
    split_tokens: int = 32
    num_layers: int = 2
    kv_heads: int = 2
    group_size: int = 2
    head_dim: int = 16
    dtype: DType = DType.FLOAT32
    kv_dtype: DType = DType.FLOAT32
    device: str = "cpu"
    first_page: int = 0
    """Pages below are never touched: the kernel gives them no memory."""
    latent_dim: int | None = None
    """One plane is kept, and this many channels of its keys are the values."""
    window_len: int | None = None
    isa: str | None = None
    """Instruction set of the native library; None: torch computes."""
    num_threads: int = 1
    """Threads of the native library."""
    rounding: Rounding = Rounding.OF_QUERY
    """Rounding of the native library."""
    uses_triton: bool = False
    uses_flashinfer: bool = False

    @property
    def num_heads(self) -> int:
        return self.kv_heads * self.group_size


class World:
    """A pool full of NaN, a page table, and the K and V every position of every row should have.

    Rows may lie on common pages: row r reads positions [0, common[r]) from row 0's pages.
    """

    def __init__(self, shape: Shape, lens: Sequence[int], common: Sequence[int] | None = None, seed: int = 0) -> None:
        self.shape, self.lens = shape, list(lens)
        self.common = list(common or [0] * len(lens))
        self.generator = torch.Generator().manual_seed(seed)
        device = torch.device(shape.device)
        planes = 2 if shape.latent_dim is None else 1
        group = PageGroup("kv", shape.num_layers, shape.kv_heads, shape.head_dim, shape.kv_dtype)
        group = replace(group, planes=planes, latent_dim=shape.latent_dim, retention=self.retention)
        cache = CacheSpec(shape.page_size, (group,))
        counts = [cache.num_pages(length) for length in lens]
        num_pages = sum(counts) + 3
        self.pool = KvPool(cache, (shape.first_page + num_pages,), device)
        arena = self.pool.page_arenas[0]
        arena.bytes[shape.first_page * arena.layout.page_bytes :].fill_(0xFF)  # NaN in every dtype
        self.tables = PageTable(1, len(lens), max(counts))
        order = torch.randperm(num_pages, generator=self.generator).tolist()
        self._trap = shape.first_page + order.pop()  # stays full of NaN
        for row, count in enumerate(counts):
            own = [PageId(shape.first_page + order.pop()) for _ in range(count)]
            shared = self.common[row] // shape.page_size
            if row and shared:
                own[:shared] = [PageId(page) for page in self.tables.table(POOL)[0, :shared].tolist()]
            self.tables.write(POOL, row, 0, tuple(own))
        self.backend = self._backend()
        self.kv = [self._random_kv(length) for length in lens]
        for row in range(1, len(lens)):
            self.kv[row][:, :, : self.common[row]] = self.kv[0][:, :, : self.common[row]]

    def _backend(self) -> AttentionBackend:
        shape = self.shape
        if shape.uses_triton:
            kernels = importlib.import_module(
                "deltaserve.compute.attention.triton.triton_attention"
            )  # where triton can be had
            backend: AttentionBackend = kernels.TritonAttention(self.pool, self.tables, (shape.num_heads,))
            return backend
        if shape.uses_flashinfer:
            requests = importlib.import_module(
                "deltaserve.compute.attention.flashinfer.flashinfer_attention"
            )  # the same
            backend = requests.FlashInferAttention(self.pool, self.tables, (shape.num_heads,))
            return backend
        if shape.isa is None:
            return TorchAttention(self.pool, self.tables, (shape.num_heads,))
        context = native_context(shape.isa, shape.num_threads, shape.rounding)
        return NativeAttention(self.pool, self.tables, (shape.num_heads,), context)

    def _random_kv(self, length: int) -> Tensor:
        """[layers, planes, length, H, D] as it reads back from the pool: rounded to the pool's dtype."""
        shape = self.shape
        size = (shape.num_layers, self.pool.page_arenas[0].layout.group.planes, length, shape.kv_heads, shape.head_dim)
        values = torch.randn(size, generator=self.generator).to(torch_dtype(shape.dtype))
        rounded = values.to(torch_dtype(shape.kv_dtype)).to(torch_dtype(shape.dtype))
        return rounded.to(shape.device)

    def queries(self, q_lens: Sequence[int]) -> tuple[Query, ...]:
        """The last q_len positions of each row."""
        return tuple(Query(row, self.lens[row] - q_len, q_len) for row, q_len in enumerate(q_lens))

    def fill(self, q_lens: Sequence[int]) -> None:
        """Write everything before the queries, as an earlier step would have."""
        for row, q_len in enumerate(q_lens):
            start = self.lens[row] - q_len
            if start:
                batch = Batch((Query(row, 0, start),), self.shape.split_tokens)
                step = self.backend.begin_step(batch)[0]
                for layer in range(self.shape.num_layers):
                    step.write_kv(layer, *self.kv[row][layer, :, :start])

    @property
    def retention(self) -> Retention:
        window_len = self.shape.window_len
        return KEEP_ALL if window_len is None else Retention(Lifetime.WINDOW, window_len)

    def free_behind(self, queries: Sequence[Query]) -> None:
        """Pages that no token to come can see are gone: NaN stands in their place, and before the window in its page.

        The latter where nobody else reads the page, and not for FlashInfer, which reads a window's first page whole.
        """
        arena, size = self.pool.page_arenas[0], self.shape.page_size
        for query in queries:
            first = self.retention.first_needed(query.q_start, size)
            self.tables.table(POOL)[query.line, :first] = self._trap
            num_left = max(0, query.q_start + 1 - (self.shape.window_len or query.q_end)) - first * size
            if self.shape.uses_flashinfer:
                continue
            if num_left > 0 and first * size >= max(self.common if query.line == 0 else [self.common[query.line]]):
                page = int(self.tables.table(POOL)[query.line, first])
                start = page * arena.layout.page_bytes
                rows = arena.bytes[start : start + arena.layout.page_bytes].view(arena.rows_per_page, size, -1)
                rows[:, :num_left] = 0xFF

    def run(self, batch: Batch, layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Write the step's K and V, attend. q [T, Hq, D] -> [T, Hq, Dv]"""
        step = self.backend.begin_step(batch)[0]
        new = [self.kv[query.line][layer, :, query.q_start : query.q_end] for query in batch.queries]
        step.write_kv(layer, *torch.cat(new, 1))
        return step.attend(layer, q, self.shape.head_dim**-0.5, sinks)

    def random_q(self, num_tokens: int) -> Tensor:
        shape = self.shape
        q = torch.randn((num_tokens, shape.num_heads, shape.head_dim), generator=self.generator)
        return q.to(torch_dtype(shape.dtype)).to(shape.device)

    def expected(self, batch: Batch, layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Softmax over every position up to the query's own, within the window, in float64."""
        outs, token = [], 0
        scale, group = self.shape.head_dim**-0.5, self.shape.group_size
        for query in batch.queries:
            planes = self.kv[query.line][layer, :, : query.q_end].double().repeat_interleave(group, 2)
            k, v = planes[0], planes[-1][..., : self.shape.latent_dim]
            part = q[token : token + query.q_len].double()
            scores = torch.einsum("qhd,khd->hqk", part, k) * scale
            keys = torch.arange(query.q_end, device=q.device)
            hidden = keys[None] > keys[query.q_start :, None]
            if self.shape.window_len is not None:
                hidden |= keys[None] <= keys[query.q_start :, None] - self.shape.window_len
            scores = scores.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                scores = torch.cat((scores, sinks.double().view(-1, 1, 1).expand(-1, query.q_len, 1)), -1)
            weights = scores.softmax(-1)[..., : query.q_end]
            outs.append(torch.einsum("hqk,khd->qhd", weights, v))
            token += query.q_len
        return torch.cat(outs)


TOLERANCE = {DType.FLOAT32: 2e-5, DType.BFLOAT16: 3e-2, DType.FLOAT16: 4e-3}


def check_against_plain(shape: Shape, lens: Sequence[int], q_lens: Sequence[int], sinks: Tensor | None = None) -> None:
    """Mixed queries over scattered pages equal plain attention; garbage in unwritten and freed slots is never seen."""
    world = World(shape, lens)
    world.fill(q_lens)
    batch = Batch(world.queries(q_lens), shape.split_tokens)
    world.free_behind(batch.queries)
    for layer in range(shape.num_layers):
        q = world.random_q(batch.num_tokens)
        got = world.run(batch, layer, q, sinks)
        assert got.shape == (*q.shape[:2], shape.latent_dim or shape.head_dim)
        assert got.dtype == q.dtype
        assert got.is_contiguous()
        torch.testing.assert_close(
            got.double(),
            world.expected(batch, layer, q, sinks),
            atol=TOLERANCE[shape.dtype],
            rtol=TOLERANCE[shape.dtype],
        )


def _filled(
    shape: Shape, lens: Sequence[int], common: Sequence[int], q_lens: Sequence[int]
) -> tuple[World, tuple[Query, ...], Tensor]:
    """A world before the step of these queries, and their q [T, Hq, D]."""
    world = World(shape, lens, common)
    world.fill(q_lens)
    queries = world.queries(q_lens)
    world.free_behind(queries)
    return world, queries, world.random_q(sum(q_lens))


def check_sharing_against_plain(
    shape: Shape, lens: Sequence[int], common: Sequence[int], q_lens: Sequence[int], sinks: Tensor | None = None
) -> None:
    """Every way of sharing whole splits is right: for backends that promise no equal bits."""
    world, queries, q = _filled(shape, lens, common, q_lens)
    layer, tolerance = shape.num_layers - 1, TOLERANCE[shape.dtype]
    want = world.expected(Batch(queries, shape.split_tokens), layer, q, sinks)
    for shared in sharings(world, queries):
        got = world.run(Batch(queries, shape.split_tokens, shared), layer, q, sinks)
        torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def check_sharing_keeps_bits(
    shape: Shape, lens: Sequence[int], common: Sequence[int], q_lens: Sequence[int], sinks: Tensor | None = None
) -> None:
    """Every way of sharing whole splits gives the same bits as none; and the result is right."""
    world, queries, q = _filled(shape, lens, common, q_lens)
    private = Batch(queries, shape.split_tokens)
    layer = shape.num_layers - 1
    plain = world.run(private, layer, q, sinks)
    tolerance = TOLERANCE[shape.dtype]
    want = world.expected(private, layer, q, sinks)
    torch.testing.assert_close(plain.double(), want, atol=tolerance, rtol=tolerance)
    for shared in sharings(world, queries):
        batch = Batch(queries, shape.split_tokens, shared)
        assert torch.equal(world.run(batch, layer, q, sinks), plain), shared


def sharings(world: World, queries: Sequence[Query]) -> list[tuple[Shared, ...]]:
    """All rows that reach a split together; pairs only; split by split; the last common split only."""
    split = world.shape.split_tokens

    def reach(row: int) -> int:
        common = max(world.common) if row == 0 else world.common[row]
        return min(common, queries[row].q_start) // split

    ends = [reach(row) for row in range(len(queries))]
    levels = []
    for depth in range(max(ends)):
        rows = tuple(row for row, end in enumerate(ends) if end > depth)
        if len(rows) > 1:
            levels.append(Shared(depth * split, (depth + 1) * split, rows))
    assert levels, "the world shares nothing"
    merged: list[Shared] = []
    for level in levels:
        if merged and merged[-1].queries == level.queries:
            merged[-1] = Shared(merged[-1].start, level.end, level.queries)
        else:
            merged.append(level)
    pairs = tuple(Shared(level.start, level.end, level.queries[-2:]) for level in levels)
    return [tuple(merged), tuple(levels), pairs, (levels[-1],)]
