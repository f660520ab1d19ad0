"""What clients say of priority reaches the queues of prefill and of decode, and orders them where that was chosen."""

from dataclasses import replace

import pytest

from deltaserve.core.ids import PeerName
from deltaserve.core.wire.messages import Offer, Submit
from deltaserve.sim.cluster import FRONT, Shape
from tests.control.engine.duo import DECODE, PREFILL, Duo

SHAPE = Shape(max_running=1, prefill_pages=60, decode_pages=60)
LEAST, MOST = -3, 5


def test_the_submit_and_the_offer_say_it() -> None:
    duo = Duo(SHAPE)
    duo.settle(duo.ask(range(1, 10), 2, priority=MOST))
    assert [body.priority for body in duo.sent(Submit, FRONT)] == [MOST]
    assert [body.priority for body in duo.sent(Offer, DECODE)] == [MOST]


@pytest.mark.parametrize(
    ("policy", "is_first"), [("priority", True), ("priority-low-first", False), ("fcfs", False), ("lpm", False)]
)
@pytest.mark.parametrize("side", [PREFILL, DECODE])
def test_the_queue_of_each_side_is_ordered_by_it(policy: str, is_first: bool, side: PeerName) -> None:
    """A row is taken by a third request meanwhile: on prefill by a long prompt, on decode by a long answer."""
    num_prompt, num_output = (100, 1) if side == PREFILL else (5, 60)
    duo = Duo(replace(SHAPE, schedule_policy=policy))
    first = duo.ask([1 + i % 90 for i in range(num_prompt)], num_output)
    duo.until(lambda: bool(duo.worker(side).instance.parts.scheduler.running.requests))
    least = duo.ask([92] * 5, 20, priority=LEAST)
    duo.run(0.002)
    most = duo.ask([93] * 5, 20, priority=MOST)
    duo.settle(first, least, most)
    assert (most.answer.ended_at < least.answer.ended_at) is is_first
