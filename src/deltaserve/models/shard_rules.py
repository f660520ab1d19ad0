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


ShardRule = Replicated | FirstRank | OneOf | Divided | ByExperts
REPLICATED = Replicated()
