"""Each check of `conformance.py` on each adapter."""

from collections.abc import Callable, Iterator

import pytest

from deltaserve.core.branches import TRANSPORTS
from deltaserve.core.transport import Transport
from deltaserve.transports.registry import transport_kind
from tests.fixtures.mooncake_engines import need_mooncake
from tests.transports.conformance import CHECKS
from tests.transports.sides import World
from tests.transports.worlds import WORLDS


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    _need(request.param)
    made = WORLDS[request.param]()
    yield made
    made.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conforms(world: World, check: Callable[[World], None]) -> None:
    check(world)


@pytest.mark.parametrize("name", WORLDS)
def test_adapters_fit_the_seam(name: str) -> None:
    _need(name)
    world = WORLDS[name]()
    transport: Transport = world.side("p", 64).transport
    known = name.partition(" ")[0]
    if known in TRANSPORTS:  # the simulator's proves what it is told to
        assert transport.evidence is transport_kind(known).evidence
    world.close()


def _need(name: str) -> None:
    if name == "mooncake":
        need_mooncake()
