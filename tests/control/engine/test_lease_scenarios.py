"""hit / miss x success / failure on decode: no lease remains, hit pages are evictable, delta pages free; no drift."""

from collections.abc import Sequence

import pytest

from deltaserve.control.engine.status import DecodeState
from deltaserve.core.errors import FailReason
from deltaserve.core.transport import WriteState
from deltaserve.sim.cluster import Shape
from deltaserve.sim.loopback import Fate, Posted
from tests.control.engine.duo import DECODE, PREFILL, Asked, Duo, slow_fabric

HEAD = list(range(1, 17))
"""Four pages."""


def fail_writes(posted: Posted) -> Fate:
    return Fate(lands=(), notified_s=None, told_s=0.001, told=WriteState.ERROR)


def outcome(duo: Duo, prompt: Sequence[int], succeeds: bool) -> Asked:
    """One request that is answered, or whose transfer fails as often as it is tried."""
    if succeeds:
        return duo.serve(prompt)
    healthy = duo.fabric.policy
    duo.fabric.policy = fail_writes
    asked = duo.ask(prompt, 3)
    duo.until(lambda: asked.answer.ends == 1, limit_s=60.0)
    assert asked.answer.error is not None
    reasons = (FailReason.TRANSFER_FAILED, FailReason.PEER_FENCED, FailReason.PEER_LOST, FailReason.NO_PEER)
    assert asked.answer.error.reason in reasons
    duo.fabric.policy = healthy
    duo.quiet()
    duo.cluster.warm_up()
    duo.run(3.0)
    return asked


@pytest.mark.parametrize("succeeds", [True, False], ids=["success", "failure"])
@pytest.mark.parametrize("hits", [True, False], ids=["hit", "miss"])
def test_a_scenario_five_times(hits: bool, succeeds: bool) -> None:
    duo = Duo()
    if hits:
        duo.serve(HEAD)
    seen = []
    for _ in range(5):
        outcome(duo, [*HEAD, 50, 51, 52, 53, 54] if hits else [60, *HEAD], succeeds)
        pool = duo.decode.parts.pools[0]
        seen.append((duo.cached_pages(DECODE), pool.num_free))
        assert duo.held(DECODE).is_nothing
        assert duo.held(PREFILL).is_nothing
        evictable = duo.decode.parts.cache.evictable_pages(0)
        assert evictable == duo.cached_pages(DECODE)
        assert pool.num_free + evictable == pool.num_pages
    assert len(set(seen)) == 1, f"drift: {seen}"
    assert duo.cached_pages(DECODE) == (4 if hits else 0) + (1 if hits and succeeds else 0) + (
        4 if not hits and succeeds else 0
    )


def test_the_budget_fails_after_the_lease() -> None:
    """A request with a long hit waits for its delta holding the lease alone, and gets both in the end."""
    duo = Duo(Shape(decode_pages=12, reserve_len=0), fabric=slow_fabric())
    duo.serve(HEAD)
    runner = duo.ask([70, 71, 72, 73, *range(20, 36)], 8)  # seven pages when it ends
    duo.until(lambda: len(runner.answer.tokens) > 0)
    waiting = duo.ask([*HEAD, *range(50, 70)], 3)
    duo.until(lambda: (room := duo.decode_room(waiting)) is not None and room.state is DecodeState.STARTED)
    room = duo.decode_room(waiting)
    assert room is not None
    assert room.request.lease is not None
    assert (room.request.lease.num_pages, room.request.owned, room.ticket) == (4, (), None)
    duo.settle(runner, waiting)


def test_a_lease_is_given_up_when_nobody_else_can_go_on() -> None:
    """Two requests lease what the other one needs: the pool holds either, not both."""
    duo = Duo(Shape(decode_pages=10, prefill_pages=40, reserve_len=0))
    duo.serve(HEAD)
    duo.serve([30, *range(50, 63)])
    first = duo.ask([*HEAD, *range(70, 90)], 2)
    second = duo.ask([30, *range(50, 63), *range(20, 40)], 2)
    duo.settle(first, second)
