"""(line, page index) |-> page."""

import pytest

from deltaserve.compute.memory.page_table import PageTable
from deltaserve.core.ids import PageId, PoolId


def test_writes_land_in_their_pool_and_line() -> None:
    tables = PageTable(2, 3, 4)
    tables.write(PoolId(1), 2, 1, (PageId(7), PageId(8)))
    assert tables.table(PoolId(1))[2].tolist() == [0, 7, 8, 0]
    assert not tables.table(PoolId(0)).any()


def test_a_line_has_an_end() -> None:
    with pytest.raises(ValueError, match="page index 4 in a line of 4 pages"):
        PageTable(1, 1, 4).write(PoolId(0), 0, 3, (PageId(1), PageId(2)))
