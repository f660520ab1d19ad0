"""Which part of a checkpoint's tensor a rank holds. No torch: the launcher counts bytes with it."""

from dataclasses import dataclass
from typing import NamedTuple

from deltaserve.layout.shard import Shard

Shape = tuple[int, ...]


class TensorPiece(NamedTuple):
    """A box of a file's tensor, and the box that it fills in what a rank holds: leading axes, the rest is whole."""

    source: tuple[slice, ...] = ()
    target: tuple[slice, ...] = ()


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
    """Of a block."""
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


class HeadRows(NamedTuple):
    """Rows of heads of one kind."""

    num_heads: int
    rows: int
    """Of one head."""


@dataclass(frozen=True, slots=True)
class ByHeads:
    """Rows (the first axis) of heads of several kinds. A rank holds one kind after the other, its heads of each.

    In a file they stand in `num_groups` groups, each with its share of the heads of every kind.
    """

    kinds: tuple[HeadRows, ...]
    num_groups: int = 1
    file_order: tuple[int, ...] = ()
    """Of the kinds within a group; empty: as in `kinds`."""

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
    """Whole experts where their number divides evenly over the ranks, else a part of each."""

    num_experts: int
    whole: OneOf | Divided
    part: Divided | FirstRank

    def shape(self, whole: Shape, shard: Shard) -> Shape:
        return self._rule(shard).shape(whole, shard)

    def pieces(self, whole: Shape, shard: Shard) -> tuple[TensorPiece, ...]:
        return self._rule(shard).pieces(whole, shard)

    def _rule(self, shard: Shard) -> OneOf | Divided | FirstRank:
        return self.part if self.num_experts % shard.size else self.whole


ShardRule = Replicated | FirstRank | OneOf | Divided | ByHeads | ByExperts
REPLICATED = Replicated()
