import time
from collections.abc import Callable, Iterator

import pytest

from deltaserve.process.links.limits import LinkLimits
from deltaserve.process.links.links import Links
from deltaserve.process.links.security import LinkSecurity

MakeLinks = Callable[..., Links]


@pytest.fixture
def make_links() -> Iterator[MakeLinks]:
    """Makes links that are closed after the test."""
    made: list[Links] = []

    def make(
        security: LinkSecurity | None = None,
        limits: LinkLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> Links:
        made.append(Links(security, limits or LinkLimits(), clock))
        return made[-1]

    yield make
    for links in made:
        links.close()
