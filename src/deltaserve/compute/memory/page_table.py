"""(line, page index) |-> page, one table per pool."""

import numpy as np
import numpy.typing as npt

from deltaserve.core.ids import PageId, PoolId

Table = npt.NDArray[np.int32]  # [lines, max_pages]


class PageTable:
    """Kept on the host: index tensors are made from it once per step. Lines are plain overwrites, never cleared."""

    def __init__(self, num_pools: int, num_lines: int, max_pages: int) -> None:
        self._tables = tuple(np.zeros((num_lines, max_pages), np.int32) for _ in range(num_pools))

    def table(self, pool: PoolId) -> Table:
        return self._tables[pool]

    def write(self, pool: PoolId, line: int, first_index: int, pages: tuple[PageId, ...]) -> None:
        """Pages of indexes [first_index, first_index + len(pages)). Raises ValueError beyond the line's end."""
        table = self._tables[pool]
        if first_index + len(pages) > table.shape[1]:
            raise ValueError(f"page index {first_index + len(pages) - 1} in a line of {table.shape[1]} pages")
        table[line, first_index : first_index + len(pages)] = pages
