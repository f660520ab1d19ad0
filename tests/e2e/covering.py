"""Few rows of a table of factors in which every two values that may meet do: a covering set of strength two."""

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product

Row = tuple[object, ...]
"""A value for each factor."""
Pair = tuple[int, object, int, object]
"""Two values, each with the number of its factor."""


def pairs_of(row: Row) -> frozenset[Pair]:
    return frozenset((i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2))


def allowed_rows(factors: Sequence[Sequence[object]], is_allowed: Callable[[Row], bool]) -> list[Row]:
    return [row for row in product(*factors) if is_allowed(row)]


def covering_rows(rows: Sequence[Row], begin_with: Iterable[Row]) -> list[Row]:
    """Rows chosen from `rows`, which are all that are allowed: those of `begin_with`, then greedily, in a fixed order,
    whichever has the most pairs that none has yet."""
    pairs = {row: pairs_of(row) for row in rows}
    missing = set[Pair]().union(*pairs.values())
    chosen = []
    for row in begin_with:
        chosen.append(row)
        missing -= pairs[row]
    while missing:
        best = max(rows, key=lambda row: len(missing & pairs[row]))
        chosen.append(best)
        missing -= pairs[best]
    return chosen
