"""An operator's Flush: everything no lease protects goes, nothing else, and the front knows it."""

import pytest

from deltaserve.core.ids import PeerName
from deltaserve.core.wire.messages import Flush
from tests.control.engine.duo import DECODE, FRONT, PREFILL, Duo, slow_fabric

HEAD = list(range(1, 17))


def resident(duo: Duo, name: PeerName) -> int:
    return duo.cluster.front.core.placer.residency.num_resident(name)


@pytest.mark.parametrize("name", [DECODE, PREFILL])
def test_a_quiet_worker_is_emptied_and_the_front_hears_of_it(name: PeerName) -> None:
    duo = Duo()
    duo.serve(HEAD, 1)
    duo.run(0.5)
    assert duo.cached_pages(name) == resident(duo, name) == 4
    duo.inject(name, FRONT, Flush())
    assert duo.cached_pages(name) == 0
    counts = {key: duo.metrics(name)[f'deltaserve_pages_{key}_total{{pool="0"}}'] for key in ("flushed", "evicted")}
    assert counts == {"flushed": 4, "evicted": 0}
    duo.run(1.0)
    assert resident(duo, name) == 0
    asked = duo.serve([*HEAD, 40], 3)
    assert (asked.usage.decode_cached_len == 0) is (name == DECODE)
    assert (asked.usage.prefill_cached_len == 0) is (name == PREFILL)


def test_leased_pages_stay() -> None:
    """A request that hits on both sides and is on its way keeps its pages: its answer is right all the same."""
    duo = Duo(fabric=slow_fabric(0.3))
    duo.serve(HEAD, 1)
    asked = duo.ask([*HEAD, 40, 41, 42, 43, 44], 6)
    duo.until(lambda: (room := duo.decode_room(asked)) is not None and room.ticket is not None)
    for name in (DECODE, PREFILL):
        duo.inject(name, FRONT, Flush())
    assert duo.cached_pages(DECODE) == 4
    duo.settle(asked)
    assert asked.usage.decode_cached_len == 16


@pytest.mark.parametrize("moment", range(0, 60, 3))
def test_at_any_moment_answers_stay_right(moment: int) -> None:
    duo = Duo()
    duo.serve(HEAD, 1)
    asked = [duo.ask([*HEAD, 40 + i, 41], 4) for i in range(4)]
    duo.run(moment * 0.0005)
    for name in (DECODE, PREFILL):
        duo.inject(name, FRONT, Flush())
    duo.settle(*asked)


@pytest.mark.parametrize(("dst", "src"), [(DECODE, PREFILL), (PREFILL, DECODE)])
def test_only_a_front_may_flush(dst: PeerName, src: PeerName) -> None:
    duo = Duo()
    duo.serve(HEAD, 1)
    duo.inject(dst, src, Flush())
    assert duo.cached_pages(dst) == 4
