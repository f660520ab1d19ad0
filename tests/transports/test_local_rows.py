"""Each row of `local_rows.py` between processes, over memory of the host, and over what stands for a GPU's; a real one:
tests/gpu/test_local_cuda.py.
"""

from collections.abc import Callable, Iterator

import pytest

from tests.transports.local_rows import ROWS, LocalTroupe


@pytest.fixture(scope="module", params=["host", "card"])
def troupe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTroupe]:
    made = LocalTroupe(tmp_path_factory.mktemp("sockets"), request.param)
    yield made
    made.dismiss()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
def test_row(troupe: LocalTroupe, row: Callable[[LocalTroupe], None]) -> None:
    row(troupe)
