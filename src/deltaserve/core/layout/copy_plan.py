"""Who copies what when pages move between two workers, each of any number of tensor-parallel ranks.

A page is a row of *blocks* of heads. Of each block a rank has the heads that `Shard.heads` gives it, the blocks one
behind the other:

    K and V pages   one block  (kv heads, layers * 2 rows, head_dim)
    MLA latent      one block  (1, layers, latent + rope): every rank holds it
    conv state      three      (k heads, q), (k heads, k), (v heads, v): a rank's share is not one contiguous slice
    GDN state       one        (v heads, layers, dk * dv)

Every head that a reader holds comes from exactly one writer. Where several writers hold it, the readers that want it
take them in turn: equal sizes pair rank r with rank r, and a latent comes from writer d mod P.

`plan_cache` plans for all page groups of a model, once per pair of workers; a `Route` then turns lists of pages into
copies. There is a route for every (writer, reader), also where nothing moves: a rank that has nothing to send is told
so, and the writers that a reader waits for are counted from the plan.

Called by control/transfer/endpoint.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from deltaserve.core.extents import Copy, Span, merge_copies
from deltaserve.core.ids import RegionId
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.shard import Shard, holders
from deltaserve.core.layout.spec import CacheGroup, CacheSpec, HeadBlock


@dataclass(frozen=True, slots=True)
class PageFormat:
    """How one page group lies on all ranks of a worker. States: a page of one token."""

    blocks: tuple[HeadBlock, ...]
    page_size: int
    dtype: DType
    num_ranks: int = 1

    @classmethod
    def of_group(cls, group: CacheGroup, page_size: int, num_ranks: int = 1) -> Self:
        return cls(group.blocks, group.page_len(page_size), group.dtype, num_ranks)

    @property
    def fits(self) -> bool:
        """Whether every block divides evenly over the ranks, or the ranks over its heads."""
        return all(Shard(0, self.num_ranks).fits(block.num_heads) for block in self.blocks)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on one rank; equal on all ranks."""
        first = Shard(0, self.num_ranks)
        return sum(_length(first.heads(b.num_heads)) * self.head_bytes(b) for b in self.blocks)

    def head_bytes(self, block: HeadBlock) -> int:
        return block.num_rows * self.page_size * block.row_width * self.dtype.itemsize

    def block_start(self, index: int) -> int:
        """Offset in a rank's page of its heads of block `index`."""
        first = Shard(0, self.num_ranks)
        return sum(_length(first.heads(b.num_heads)) * self.head_bytes(b) for b in self.blocks[:index])


class RankPair(NamedTuple):
    """A rank that writes and a rank that is written to."""

    writer: int
    reader: int


class PageSlice(NamedTuple):
    """A range of bytes of a page."""

    offset: int
    num_bytes: int


class HeadRun(NamedTuple):
    """Consecutive heads of a block that go from one rank to another. Offsets: bytes, in a page of either rank."""

    block: HeadBlock
    num_heads: int
    src_offset: int
    dst_offset: int


class PlacedPages(NamedTuple):
    """Pages of one rank that hold a prompt's tokens from page index `first` on."""

    region: RegionId
    first: int
    pages: Sequence[int]


class TokenOverlap(NamedTuple):
    """Tokens that lie in one page on both sides."""

    src_page: int
    src_token: int
    dst_page: int
    dst_token: int
    num_tokens: int


class ElementCopy(NamedTuple):
    """A run of elements, by their byte offsets in the regions: of unequal length there when the dtypes differ."""

    src_offset: int
    dst_offset: int
    num_elements: int


@dataclass(frozen=True, slots=True)
class Route:
    """What one writer rank copies to one reader rank, of every page of a group."""

    writer: int
    reader: int
    src: PageFormat
    dst: PageFormat
    heads: tuple[HeadRun, ...]

    src_page_bytes: int
    dst_page_bytes: int
    is_whole: bool
    """Both ranks hold the same heads in the same pages: consecutive pages are one copy."""

    @classmethod
    def of_heads(cls, writer: int, reader: int, src: PageFormat, dst: PageFormat, heads: tuple[HeadRun, ...]) -> Self:
        is_equal = src.page_size == dst.page_size and src.dtype is dst.dtype and src.page_bytes == dst.page_bytes
        num_bytes = sum(run.num_heads * src.head_bytes(run.block) for run in heads)
        is_in_place = all(run.src_offset == run.dst_offset for run in heads)
        is_whole = is_equal and is_in_place and num_bytes == src.page_bytes
        return cls(writer, reader, src, dst, heads, src.page_bytes, dst.page_bytes, is_whole)

    @property
    def has_nothing(self) -> bool:
        """The reader gets these pages from others: this writer says so, and is not waited for."""
        return not self.heads

    @property
    def src_slices(self) -> tuple[PageSlice, ...]:
        """What of a page of the writer goes to the reader: one byte after the other what `dst_slices` are there."""
        return tuple(PageSlice(run.src_offset, run.num_heads * self.src.head_bytes(run.block)) for run in self.heads)

    @property
    def dst_slices(self) -> tuple[PageSlice, ...]:
        return tuple(PageSlice(run.dst_offset, run.num_heads * self.dst.head_bytes(run.block)) for run in self.heads)

    def arriving(self, num_tokens: int) -> tuple[PageSlice, ...]:
        """`dst_slices` of a page of which only the first tokens are written."""
        if num_tokens == self.dst.page_size:
            return self.dst_slices
        slices = []
        for run in self.heads:
            token_bytes = run.block.row_width * self.dst.dtype.itemsize
            row_bytes = self.dst.page_size * token_bytes
            rows = range(run.num_heads * run.block.num_rows)
            slices += [PageSlice(run.dst_offset + row * row_bytes, num_tokens * token_bytes) for row in rows]
        return tuple(slices)

    @property
    def needs_staging(self) -> bool:
        """Elements change on the way: they are converted in a buffer, no write moves them from place to place."""
        return self.src.dtype is not self.dst.dtype

    @property
    def is_recut(self) -> bool:
        """A page of the reader is no range of bytes of the writer's: page sizes or dtypes differ."""
        return self.src.page_size != self.dst.page_size or self.needs_staging

    def copies(self, src: PlacedPages, dst: PlacedPages) -> list[Copy]:
        """Copies of the tokens that both page lists hold, as few as the layouts allow.

        Equal shards: one per run of pages that is consecutive on both sides. Unequal shards: one per page and run of
        heads. Unequal page sizes: one per row of a head, which is a case for staging.
        """
        if self.needs_staging:
            raise ValueError(f"{self.src.dtype.value} to {self.dst.dtype.value}: only a staged transfer converts")
        if self.src.page_size != self.dst.page_size:
            return self._row_copies(src, dst)
        if src.first != dst.first or len(src.pages) != len(dst.pages):
            ours, theirs = f"{len(src.pages)} source pages from {src.first}", f"{len(dst.pages)} from {dst.first}"
            raise ValueError(f"{ours} for {theirs}")
        return _page_runs(src, dst, self.src_page_bytes) if self.is_whole else self._head_copies(src, dst)

    def _head_copies(self, src: PlacedPages, dst: PlacedPages) -> list[Copy]:
        src_bytes, dst_bytes = self.src_page_bytes, self.dst_page_bytes
        runs = [(run, run.num_heads * self.src.head_bytes(run.block)) for run in self.heads]
        copies = [
            Copy(
                Span(src.region, src_page * src_bytes + run.src_offset, num_bytes),
                Span(dst.region, dst_page * dst_bytes + run.dst_offset, num_bytes),
            )
            for src_page, dst_page in zip(src.pages, dst.pages, strict=True)
            for run, num_bytes in runs
        ]
        return merge_copies(copies)

    def _row_copies(self, src: PlacedPages, dst: PlacedPages) -> list[Copy]:
        itemsize = self.src.dtype.itemsize
        copies = [
            Copy(Span(src.region, start, num * itemsize), Span(dst.region, target, num * itemsize))
            for start, target, num in self.element_copies(src, dst)
        ]
        return merge_copies(copies)

    def element_copies(self, src: PlacedPages, dst: PlacedPages) -> Iterator[ElementCopy]:
        """Copies in rows of elements, for any two page sizes and dtypes."""
        for tokens in token_overlaps(src, self.src.page_size, dst, self.dst.page_size):
            for run in self.heads:
                yield from self._rows(tokens, run)

    def _rows(self, tokens: TokenOverlap, run: HeadRun) -> Iterator[ElementCopy]:
        width = run.block.row_width
        src_token, dst_token = width * self.src.dtype.itemsize, width * self.dst.dtype.itemsize
        src = tokens.src_page * self.src_page_bytes + run.src_offset + tokens.src_token * src_token
        dst = tokens.dst_page * self.dst_page_bytes + run.dst_offset + tokens.dst_token * dst_token
        for row in range(run.num_heads * run.block.num_rows):
            yield ElementCopy(
                src + row * self.src.page_size * src_token,
                dst + row * self.dst.page_size * dst_token,
                tokens.num_tokens * width,
            )


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Routes of all page groups between two workers."""

    num_writers: int
    num_readers: int
    routes: Mapping[str, tuple[tuple[Route, ...], ...]]
    """Page group |-> by writer, then by reader; none is left out."""

    def route(self, group: str, writer: int, reader: int) -> Route:
        return self.routes[group][writer][reader]

    def writers_of(self, reader: int) -> tuple[int, ...]:
        """The writers that a reader waits for, with every chunk: also with one that has no pages for them."""
        return tuple(w for w in range(self.num_writers) if self._has_route(w, reader))

    def readers_of(self, writer: int) -> tuple[int, ...]:
        """The readers that hear of every chunk from this writer. To all others it says once that it has nothing."""
        return tuple(r for r in range(self.num_readers) if self._has_route(writer, r))

    @property
    def pairs(self) -> tuple[RankPair, ...]:
        """All that something goes between: a chunk is there when each of them has announced it."""
        return tuple(RankPair(w, r) for r in range(self.num_readers) for w in self.writers_of(r))

    def _has_route(self, writer: int, reader: int) -> bool:
        return any(not of_group[writer][reader].has_nothing for of_group in self.routes.values())


def plan_cache(src: CacheSpec, num_writers: int, dst: CacheSpec, num_readers: int) -> CachePlan:
    """Plan for two workers of one model; page size and dtypes may differ. Raises ValueError naming what may not.

    A group for guesses that one side alone keeps has routes, by which nothing moves.
    """
    ours, theirs = ({group.name: group for group in side.groups} for side in (src, dst))
    both = [name for name in ours if name in theirs]
    groups = ours | theirs
    alone = [name for name in groups if name not in both]
    if [_kept(ours[name]) for name in both] != [_kept(theirs[name]) for name in theirs if name in both] or not all(
        groups[name].is_for_guesses for name in alone
    ):
        raise ValueError("the two sides keep different page groups")

    def formats(name: str) -> tuple[PageFormat, PageFormat]:
        written, read = ours.get(name, groups[name]), theirs.get(name, groups[name])
        return (
            PageFormat.of_group(written, src.page_size, num_writers),
            PageFormat.of_group(read, dst.page_size, num_readers),
        )

    routes = {name: (plan_routes if name in both else _no_routes)(*formats(name)) for name in groups}
    return CachePlan(num_writers, num_readers, routes)


def _no_routes(src: PageFormat, dst: PageFormat) -> tuple[tuple[Route, ...], ...]:
    """Empty routes, by writer, then by reader: for a page group that one of the two sides does not keep."""
    return tuple(
        tuple(Route.of_heads(writer, reader, src, dst, ()) for reader in range(dst.num_ranks))
        for writer in range(src.num_ranks)
    )


def plan_routes(src: PageFormat, dst: PageFormat) -> tuple[tuple[Route, ...], ...]:
    """The routes of one page group: by writer, then by reader."""
    if src.blocks != dst.blocks:
        raise ValueError("the two sides cut a page into different blocks")
    for side in (src, dst):
        if not side.fits:
            raise ValueError(f"heads do not divide evenly over {side.num_ranks} ranks, nor ranks over heads")
    heads: list[list[list[HeadRun]]] = [[[] for _ in range(dst.num_ranks)] for _ in range(src.num_ranks)]
    for reader in range(dst.num_ranks):
        for index in range(len(src.blocks)):
            for writer, run in _runs_of_block(src, dst, index, reader):
                heads[writer][reader].append(run)
    return tuple(
        tuple(Route.of_heads(writer, reader, src, dst, tuple(runs)) for reader, runs in enumerate(row))
        for writer, row in enumerate(heads)
    )


def token_overlaps(src: PlacedPages, src_size: int, dst: PlacedPages, dst_size: int) -> Iterator[TokenOverlap]:
    """Cut the tokens that both page lists hold at every page boundary of either side."""
    token = max(src.first * src_size, dst.first * dst_size)
    end = min((src.first + len(src.pages)) * src_size, (dst.first + len(dst.pages)) * dst_size)
    while token < end:
        src_index, src_token = divmod(token, src_size)
        dst_index, dst_token = divmod(token, dst_size)
        num_tokens = min(end - token, src_size - src_token, dst_size - dst_token)
        yield TokenOverlap(
            src.pages[src_index - src.first], src_token, dst.pages[dst_index - dst.first], dst_token, num_tokens
        )
        token += num_tokens


def _runs_of_block(src: PageFormat, dst: PageFormat, index: int, reader: int) -> Iterator[tuple[int, HeadRun]]:
    """Cut a reader's heads of one block by the writers they come from."""
    block = src.blocks[index]
    src_head, dst_head = src.head_bytes(block), dst.head_bytes(block)
    first, end = Shard(reader, dst.num_ranks).heads(block.num_heads)
    head = first
    while head < end:
        writer = _writer_of(block.num_heads, head, reader, src.num_ranks, dst.num_ranks)
        theirs, their_end = Shard(writer, src.num_ranks).heads(block.num_heads)
        if not theirs <= head < their_end:
            raise ValueError(f"rank {writer} of {src.num_ranks} does not hold head {head}")
        num_heads = min(end, their_end) - head
        src_offset = src.block_start(index) + (head - theirs) * src_head
        dst_offset = dst.block_start(index) + (head - first) * dst_head
        yield writer, HeadRun(block, num_heads, src_offset, dst_offset)
        head += num_heads


def _writer_of(num_heads: int, head: int, reader: int, num_writers: int, num_readers: int) -> int:
    """Readers that want the same head take the writers that hold it in turn."""
    having = holders(num_heads, head, num_writers)
    wanting = holders(num_heads, head, num_readers)
    return having[(reader - wanting.start) % len(having)]


def _page_runs(src: PlacedPages, dst: PlacedPages, page_bytes: int) -> list[Copy]:
    copies = []
    src_start, dst_start, num_pages = 0, 0, 0
    for src_page, dst_page in zip(src.pages, dst.pages, strict=True):
        if num_pages and src_page == src_start + num_pages and dst_page == dst_start + num_pages:
            num_pages += 1
            continue
        if num_pages:
            copies.append(_page_copy(src.region, src_start, dst.region, dst_start, num_pages * page_bytes, page_bytes))
        src_start, dst_start, num_pages = src_page, dst_page, 1
    if num_pages:
        copies.append(_page_copy(src.region, src_start, dst.region, dst_start, num_pages * page_bytes, page_bytes))
    return copies


def _page_copy(src: RegionId, src_page: int, dst: RegionId, dst_page: int, num_bytes: int, page_bytes: int) -> Copy:
    return Copy(Span(src, src_page * page_bytes, num_bytes), Span(dst, dst_page * page_bytes, num_bytes))


def _kept(group: CacheGroup) -> tuple[object, ...]:
    """What of a page group must be equal on both sides."""
    return (group.name, group.num_layers, group.blocks, group.retention)


def _length(heads: tuple[int, int]) -> int:
    return heads[1] - heads[0]
