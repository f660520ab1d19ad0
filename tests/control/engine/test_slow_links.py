"""Writes that take seconds, announcements that are late or lost: nobody is fenced, nothing is sent twice for that."""

from deltaserve.control.transfer.commands import FencePeer
from deltaserve.core.wire.messages import Draining, Failed, Grant, Offer, Sent, Starting
from deltaserve.sim.loopback import Fabric, Fate, Part, Posted
from tests.control.engine.duo import DECODE, PREFILL, Duo, slow_fabric

PROMPT = range(1, 31)


def fences(duo: Duo) -> list[FencePeer]:
    """Filled with every fence that either worker asks for from now on."""
    asked: list[FencePeer] = []
    for name in (PREFILL, DECODE):
        endpoint = duo.worker(name).ranks[0].endpoint
        perform = endpoint.perform

        def watched(command, now, perform=perform):  # type: ignore[no-untyped-def]
            if isinstance(command, FencePeer):
                asked.append(command)
            return perform(command, now)

        endpoint.perform = watched  # type: ignore[method-assign]
    return asked


def test_clients_that_leave_on_a_slow_link_cost_nobody_else_the_peer() -> None:
    """Each write takes 3 s, longer than decode waits for a silent writer."""
    duo = Duo(fabric=slow_fabric(3.0))
    asked_fences = fences(duo)
    leaver = duo.ask([90, *PROMPT], 3)
    others = [duo.ask([50 + i, *PROMPT], 3) for i in range(3)]
    duo.until(lambda: not duo.worker(PREFILL).ranks[0].endpoint.is_idle())
    duo.cancel(leaver)
    duo.settle(*others, limit_s=120.0)
    assert asked_fences == []
    draining = duo.sent(Draining)
    assert {d.ticket for d in draining} == {1}
    assert all(d.bytes_outstanding > 0 for d in draining)


def test_a_writer_that_falls_silent_while_it_drains_is_fenced() -> None:
    duo = Duo(fabric=slow_fabric(3.0), link=lambda src, dst, e: () if isinstance(e.body, Draining) else None)
    asked_fences = fences(duo)
    leaver = duo.ask(PROMPT, 3)
    duo.until(lambda: not duo.worker(PREFILL).ranks[0].endpoint.is_idle())
    duo.cancel(leaver)
    duo.until(lambda: bool(asked_fences))
    duo.quiet(limit_s=30.0)


def told_before_it_is_announced(seconds: float) -> Fabric:
    """The writer learns of the end at once; its notifications take `seconds`."""

    def policy(posted: Posted) -> Fate:
        return Fate(lands=(Part(0.0),), notified_s=seconds, told_s=0.0)

    return Fabric(policy=policy)


def test_a_repeated_grant_does_not_cost_a_transfer_that_has_been_sent() -> None:
    """Its announcement is on its way: prefill, which has ended the room, must not make decode give it up."""
    duo = Duo(fabric=told_before_it_is_announced(0.3))
    asked = duo.ask(PROMPT, 3)
    duo.until(lambda: bool(duo.sent(Starting)) and not duo.prefill.rooms)
    (grant,) = duo.sent(Grant, DECODE)
    duo.inject(PREFILL, DECODE, grant)
    duo.settle(asked)
    assert (len(duo.sent(Sent)), duo.sent(Failed), len(duo.sent(Offer, DECODE))) == (1, [], 1)


def test_an_announcement_that_is_lost_is_missed_soon_after_prefill_says_that_all_was_sent() -> None:
    duo = Duo(fabric=Fabric(policy=lambda posted: Fate(notified_s=None)))
    asked = duo.ask(PROMPT, 3)
    duo.until(lambda: bool(duo.sent(Sent)))
    told_at = duo.world.now
    duo.world.fabric.policy = lambda posted: Fate()
    duo.until(lambda: bool(asked.answer.ends), limit_s=30.0)
    assert duo.world.now - told_at < 3.0
    assert asked.answer.error is None
    assert tuple(asked.answer.tokens) == asked.expected
    duo.quiet()
