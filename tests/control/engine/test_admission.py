"""Who waits for whom: full decode workers, prompts computed ahead, leases of waiting rooms."""

from typing import Any

import pytest

from deltaserve.control.engine.status import PrefillState
from deltaserve.control.engine.turn import EngineTurn
from deltaserve.core.errors import FailReason
from deltaserve.core.ids import PeerName
from deltaserve.core.wire.messages import Ask, Envelope, Failed, Grant, Offer, Starting, Status
from deltaserve.sim.cluster import Shape
from tests.control.engine.duo import DECODE, PREFILL, Duo
from tests.sim.small_cluster import Cluster


def no_grants(src: PeerName, dst: PeerName, envelope: Envelope) -> tuple[float, ...] | None:
    return () if isinstance(envelope.body, Grant) else None


def states(duo: Duo) -> list[PrefillState]:
    return [room.state for room in duo.prefill.rooms.values()]


def test_prompts_of_one_reader_are_announced_up_to_the_horizon() -> None:
    """Each is computed ahead into the tree; those beyond wait unannounced until one of them is granted."""
    duo = Duo(Shape(prefill_pages=200), link=no_grants)
    asked = [duo.ask([i, *range(50, 61)], 3) for i in range(8)]
    duo.run(0.4)
    assert states(duo) == [PrefillState.AHEAD] * 6 + [PrefillState.QUEUED] * 2  # 60 of 64 tokens by five of them
    assert len({starting.room for starting in duo.sent(Starting)}) == 6
    assert duo.held(PREFILL).owned == 0  # all other pages are in the tree
    duo.link = lambda src, dst, envelope: None
    duo.settle(*asked)


def test_a_prompt_computed_ahead_yields_its_memory_to_a_granted_one_and_is_a_hit_later() -> None:
    """The first grants are lost, so the pool fills with prompts computed ahead; a granted one must still fit."""
    duo = Duo(Shape(prefill_pages=12), link=no_grants)
    ahead = [duo.ask([i, *range(50, 65)], 3) for i in range(2)]
    duo.run(0.2)
    assert states(duo) == [PrefillState.AHEAD] * 2
    duo.link = lambda src, dst, envelope: None
    duo.serve(range(40, 80), 3)
    assert not all(asked.answer.ends for asked in ahead)
    duo.settle(*ahead)


def test_a_prompt_is_computed_ahead_until_its_grant_is_here() -> None:
    """Also one whose grant comes while it is computed: from then on others make way for it."""
    duo = Duo(link=no_grants)
    asked = duo.ask(range(60), 3)
    duo.until(lambda: states(duo) == [PrefillState.COMPUTING])
    room = duo.prefill_room(asked)
    assert room is not None
    request = room.request
    assert request.is_ahead
    duo.link = lambda src, dst, envelope: None
    duo.until(lambda: room.ticket is not None)
    assert not request.is_ahead
    duo.settle(asked)


def test_a_full_decode_worker_stalls_nobody_else() -> None:
    """One of two decode workers grants nothing: the rooms of the other one are computed and answered meanwhile."""
    full = PeerName("decode-0")

    def link(src: PeerName, dst: PeerName, envelope: Envelope) -> tuple[float, ...]:
        return () if src == full and isinstance(envelope.body, Grant) else (0.0005,)

    cluster = Cluster(Shape(num_decode=2, prefill_pages=30, decode_pages=200), link=link)
    cluster.warm_up()
    cluster.world.run(until=cluster.world.now + 0.2)
    decode = cluster.world.workers[full].instance
    answers = []
    for wave in range(2):  # the rooms of the full one have waited for seconds when the second wave comes
        answers += [cluster.front.submit(cluster.generation([wave, i, *range(50, 64)], 3)) for i in range(20)]
        cluster.world.run(until=cluster.world.now + 2.0)
    num_stuck = len(decode.serving.rooms)
    assert 10 < num_stuck < 30
    assert sum(answer.ends for answer in answers) == 40 - num_stuck
    assert all(answer.error is None for answer in answers)


def test_a_prompt_is_sent_once_however_long_it_waits() -> None:
    """Prefill acknowledges the offer; from then on decode asks in a few bytes."""
    duo = Duo(Shape(prefill_pages=200), link=no_grants)
    asked = [duo.ask([i, *range(50, 61)], 3) for i in range(8)]
    duo.run(10.0)
    assert len(duo.sent(Offer, DECODE)) == 8
    waiting = [room.room for room in duo.prefill.rooms.values() if room.state is PrefillState.QUEUED]
    questions = [ask.room for ask in duo.sent(Ask, DECODE)]
    assert waiting
    assert set(waiting) <= set(questions)
    duo.link = lambda src, dst, envelope: None
    duo.settle(*asked)


def test_a_question_about_a_room_that_is_gone_ends_the_attempt() -> None:
    duo = Duo(Shape(prefill_pages=200), link=lambda src, dst, e: () if isinstance(e.body, Grant | Failed) else None)
    for i in range(6):
        duo.ask([i, *range(50, 61)], 3)
    asked = duo.ask([9, *range(50, 61)], 3)
    duo.run(0.4)
    room = duo.prefill_room(asked)
    assert room is not None
    duo.prefill._fail(room, FailReason.OVERLOADED, "said over a connection that broke", EngineTurn(0.0, False, []))
    duo.run(0.6)
    assert duo.decode_room(asked) is not None
    duo.link = lambda src, dst, envelope: None
    duo.until(lambda: any(failed.room == asked.room for failed in duo.sent(Failed)))
    duo.settle(asked)


def test_workers_report_all_that_waits_for_whomever() -> None:
    """Prefill: what it has taken and not computed, running or not. Decode: every room, and what has no pages yet."""
    duo = Duo(Shape(max_running=2, prefill_pages=200, decode_pages=200), link=no_grants)
    duo.worker(PREFILL).pace.slowness = 1e5
    for first in range(5):
        duo.ask([first, *range(50, 81)], 3)
    duo.run(1.2)
    computing = duo.sent(Status, PREFILL)[-1]
    assert computing.waiting_tokens == 5 * 32
    assert computing.num_waiting + computing.num_running == 5
    keeping = duo.sent(Status, DECODE)[-1]
    assert (keeping.num_waiting, keeping.waiting_tokens) == (5, 3 * 32), "two rows, so two grants"


@pytest.mark.parametrize(("prefill_wait_len", "num_offers"), [(0, 1), (5, 1), (6, 0), (50, 0)])
def test_decode_computes_a_short_delta_itself_when_the_front_says_so(prefill_wait_len: int, num_offers: int) -> None:
    """16 tokens are cached, 6 are missing."""
    duo = Duo(Shape(extend_len=10))
    duo.serve(range(1, 17), 3)
    duo.weigh(prefill_wait_len)
    before = len(duo.sent(Offer, DECODE))
    asked = duo.serve([*range(1, 17), *range(60, 66)], 3)
    assert len(duo.sent(Offer, DECODE)) - before == num_offers
    assert asked.usage.decode_cached_len == 16
    assert duo.metrics(DECODE)["deltaserve_conditional_prefills_total"] == 1 - num_offers


@pytest.mark.parametrize(("shape", "num_offers"), [({}, 0), ({"itl_target_s": 0.05}, 1), ({"shares_cores": False}, 1)])
def test_on_cores_that_prefill_shares_decode_computes_long_prompts_too(shape: dict[str, Any], num_offers: int) -> None:
    """Longer than --decode-extend-tokens. Not where rows are not to wait longer than a target allows."""
    duo = Duo(Shape(**{"extend_len": 10, "shares_cores": True, **shape}))
    duo.weigh(40)
    duo.serve(range(1, 31), 3)
    assert len(duo.sent(Offer, DECODE)) == num_offers
    assert duo.metrics(DECODE)["deltaserve_conditional_prefills_total"] == 1 - num_offers
