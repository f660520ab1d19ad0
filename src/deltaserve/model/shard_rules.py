"""Which part of a checkpoint's tensor a rank holds. No torch: the launcher counts bytes with it."""

from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from deltaserve.core.layout.shard import Shard

Shape = tuple[int, ...]


class TensorPiece(NamedTuple):
    """A box of a file's tensor, and the box that it fills in what a rank holds: leading axes, the rest is whole."""

    source: tuple[slice, ...] = ()
    target: tuple[slice, ...] = ()

    def within(self, other: "TensorPiece") -> "TensorPiece":
        """What both are of. They cut along different axes."""
        return TensorPiece(_both(self.source, other.source), _both(self.target, other.target))


def _both(one: tuple[slice, ...], other: tuple[slice, ...]) -> tuple[slice, ...]:
    axes = zip_longest(one, other, fillvalue=slice(None))
    return tuple(second if first == slice(None) else first for first, second in axes)


class ExpertCut(NamedTuple):
    """Which experts a rank holds, and which part of each of them."""

    experts: Shard
    inner: Shard


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """How the experts of a layer lie on ranks."""

    ep_size: int | None = None
    """A worker's ranks stand in so many groups of equal size, one after the other: each group has its experts whole,
    its ranks a part of each. None: as many groups as ranks where the experts divide over them, else one."""
    member: Shard = Shard()
    """Which member of a group of workers of one rank each it is, over which the experts are divided."""

    def cut(self, num_experts: int, shard: Shard) -> ExpertCut:
        """The experts of a rank, and its part of each."""
        if self.member.size > 1:
            return ExpertCut(self.member, Shard())
        size = shard.size if num_experts % shard.size == 0 else 1
        groups = size if self.ep_size is None else min(self.ep_size, shard.size)
        group, place = divmod(shard.rank, shard.size // groups)
        return ExpertCut(Shard(group, groups), Shard(place, shard.size // groups))

    def held(self, num_experts: int, shard: Shard) -> range:
        """The experts of which a rank holds something."""
        return range(*self.cut(num_experts, shard).experts.heads(num_experts))


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every rank holds all of it."""

    def shape(self, whole: Shape, shard: Shard) -> Shape:
        return whole

    def pieces(self, whole: Shape, shard: Shard) -> tuple[TensorPiece, ...]:
        """What is read from the file; empty where the rank holds none of it."""
        return (TensorPiece(),)


@dataclass(frozen=True, slots=True)
class FirstRank:
    """What is added to a sum over ranks: one of them adds it."""

    def shape(self, whole: Shape, shard: Shard) -> Shape:
        return whole if shard.rank == 0 else (0, *whole[1:])

    def pieces(self, whole: Shape, shard: Shard) -> tuple[TensorPiece, ...]:
        return (TensorPiece(),) if shard.rank == 0 else ()


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of `count` equal tensors that are divided over the ranks."""

    index: int
    count: int

    def shape(self, whole: Shape, shard: Shard) -> Shape:
        return whole if self._is_held(shard) else (0, *whole[1:])

    def pieces(self, whole: Shape, shard: Shard) -> tuple[TensorPiece, ...]:
        return (TensorPiece(),) if self._is_held(shard) else ()

    def _is_held(self, shard: Shard) -> bool:
        first, end = shard.heads(self.count)
        return first <= self.index < end


@dataclass(frozen=True, slots=True)
class Divided:
    """An axis of equal units (heads, rows, experts) is divided as `Shard.heads` says: in each of its blocks alone."""

    num_units: int
    """Units in one block."""
    axis: int = 0
    num_blocks: int = 1

    def shape(self, whole: Shape, shard: Shard) -> Shape:
        return (*whole[: self.axis], self.num_blocks * self._length(whole, shard), *whole[self.axis + 1 :])

    def pieces(self, whole: Shape, shard: Shard) -> tuple[TensorPiece, ...]:
        if shard.size == 1:
            return (TensorPiece(),)
        length, block = self._length(whole, shard), whole[self.axis] // self.num_blocks
        first = shard.heads(self.num_units)[0] * self._unit(whole)
        before = (slice(None),) * self.axis
        return tuple(
            TensorPiece(
                (*before, slice(index * block + first, index * block + first + length)),
                (*before, slice(index * length, (index + 1) * length)),
            )
            for index in range(self.num_blocks)
        )

    def _length(self, whole: Shape, shard: Shard) -> int:
        first, end = shard.heads(self.num_units)
        return (end - first) * self._unit(whole)

    def _unit(self, whole: Shape) -> int:
        return whole[self.axis] // (self.num_blocks * self.num_units)


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Rows (the first axis) in equal shares. Where they do not divide, the last ranks' shares end in rows of zeros."""

    def shape(self, whole: Shape, shard: Shard) -> Shape:
        return (-(-whole[0] // shard.size), *whole[1:])

    def pieces(self, whole: Shape, shard: Shard) -> tuple[TensorPiece, ...]:
        if shard.size == 1:
            return (TensorPiece(),)
        (share, *_), count = self.shape(whole, shard), whole[0]
        first, end = min(count, shard.rank * share), min(count, (shard.rank + 1) * share)
        return (TensorPiece((slice(first, end),), (slice(0, end - first),)),) if first < end else ()


class HeadRows(NamedTuple):
    """Rows of heads of one kind."""

    num_heads: int
    rows: int
    """Rows of one head."""


@dataclass(frozen=True, slots=True)
class ByHeads:
    """Rows (the first axis) of heads of several kinds. A rank holds one kind after the other, its heads of each.

    In a file they stand in `num_groups` groups, each with its share of the heads of every kind.
    """

    kinds: tuple[HeadRows, ...]
    num_groups: int = 1
    file_order: tuple[int, ...] = ()
    """Order of the kinds within a group of the file; empty: as in `kinds`."""

    def shape(self, whole: Shape, shard: Shard) -> Shape:
        return (sum(self._num_held(kind, shard) * kind.rows for kind in self.kinds), *whole[1:])

    def pieces(self, whole: Shape, shard: Shard) -> tuple[TensorPiece, ...]:
        starts, row, pieces = self._starts(), 0, []
        for index, kind in enumerate(self.kinds):
            first, end = shard.heads(kind.num_heads)
            per_group = kind.num_heads // self.num_groups
            while first < end:
                group, place = divmod(first, per_group)
                length = (min(end, (group + 1) * per_group) - first) * kind.rows
                source = group * self._group_rows + starts[index] + place * kind.rows
                pieces.append(TensorPiece((slice(source, source + length),), (slice(row, row + length),)))
                row, first = row + length, first + length // kind.rows
        return tuple(pieces)

    def _starts(self) -> dict[int, int]:
        """Kind |-> its first row within a group."""
        starts, row = {}, 0
        for index in self.file_order or range(len(self.kinds)):
            starts[index] = row
            row += self.kinds[index].num_heads * self.kinds[index].rows // self.num_groups
        return starts

    @property
    def _group_rows(self) -> int:
        return sum(kind.num_heads * kind.rows for kind in self.kinds) // self.num_groups

    @staticmethod
    def _num_held(kind: HeadRows, shard: Shard) -> int:
        first, end = shard.heads(kind.num_heads)
        return end - first


@dataclass(frozen=True, slots=True)
class ByExperts:
    """Some of the experts, a part of each: see ExpertPlacement."""

    num_experts: int
    placement: ExpertPlacement
    experts: OneOf | Divided
    inner: Divided | FirstRank
    """How each expert is divided along another axis."""

    def shape(self, whole: Shape, shard: Shard) -> Shape:
        experts, inner = self.placement.cut(self.num_experts, shard)
        return self.inner.shape(self.experts.shape(whole, experts), inner)

    def pieces(self, whole: Shape, shard: Shard) -> tuple[TensorPiece, ...]:
        experts, inner = self.placement.cut(self.num_experts, shard)
        parts = self.inner.pieces(whole, inner)
        return tuple(piece.within(part) for piece in self.experts.pieces(whole, experts) for part in parts)


ShardRule = Replicated | FirstRank | OneOf | Divided | PaddedRows | ByHeads | ByExperts
REPLICATED = Replicated()
