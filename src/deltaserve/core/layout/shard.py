"""Which heads a rank holds.

With more ranks than heads, heads are replicated by integer *division* (rank * heads // size), never modulo: ranks
0..3 of 8 hold head 0 of 2, ranks 4..7 head 1 (docs: models, "TP shards").
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size` ranks."""

    rank: int = 0
    size: int = 1

    def heads(self, num_heads: int) -> tuple[int, int]:
        """Half-open range of the heads this rank holds. The union over ranks covers all heads."""
        first = self.rank * num_heads // self.size
        return first, first + max(1, num_heads // self.size)

    def fits(self, num_heads: int) -> bool:
        """Whether heads divide evenly over ranks, or ranks evenly over heads (replication)."""
        return num_heads % self.size == 0 or self.size % num_heads == 0


def holders(num_heads: int, head: int, size: int) -> range:
    """Ranks of `size` that hold a head: one, or a run of replicas. The inverse of `Shard.heads`."""
    replicas = max(1, size // num_heads)
    first = head * size // num_heads
    return range(first, first + replicas)
