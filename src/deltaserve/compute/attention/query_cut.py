"""How the keys of a short query are cut into partial results: by its own positions alone, never by its batch.

    position  lo ........ first whole split ......... q_start // S * S ........ q_end
              [   head   )[ split )[ split )[ split )[          tail          )
               private     may be shared               private, causal

`lo` is the first key that a position of the query sees: 0 without a window. A split is whole where every position sees
all of it; the head is what only some see. Without whole splits, or where everything is seen, there is no head.
"""

from typing import NamedTuple

from deltaserve.compute.attention.attention import Query


class EdgeKeys(NamedTuple):
    """Keys [start, end) that one query reads alone, as partial result `part`."""

    start: int
    end: int
    part: int


class QueryCut(NamedTuple):
    """Partial results are numbered as splits are: the head stands before the first whole one, the tail after all."""

    splits: range
    """Whole splits."""
    edges: tuple[EdgeKeys, ...]
    """Keys beside whole splits: head (if there is one) and tail."""

    @property
    def first_part(self) -> int:
        return self.splits.start - len(self.edges) + 1

    @property
    def num_parts(self) -> int:
        return len(self.splits) + len(self.edges)


def cut_query(query: Query, split_tokens: int, window_len: int | None) -> QueryCut:
    """`window_len`: tokens that a token sees, itself included; None: all before it."""
    tail = query.q_start // split_tokens
    if window_len is None or query.q_end <= window_len:
        return QueryCut(range(tail), (EdgeKeys(tail * split_tokens, query.q_end, tail),))
    lo = max(0, query.q_start - window_len + 1)
    # Beyond the first key that the last position sees: each position has a key in the head.
    first = (query.q_end - window_len) // split_tokens + 1
    if first >= tail:
        return QueryCut(range(tail, tail), (EdgeKeys(lo, query.q_end, tail),))
    head = EdgeKeys(lo, first * split_tokens, first - 1)
    return QueryCut(range(first, tail), (head, EdgeKeys(tail * split_tokens, query.q_end, tail)))
