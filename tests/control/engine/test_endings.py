"""A room may end at any moment, on either side: books agree after every event, and nothing is left."""

from collections.abc import Callable, Sequence

import pytest

from deltaserve.control.engine.api import DrainRequested
from deltaserve.control.engine.status import DecodeState, PrefillState
from deltaserve.control.sched.plan import ItemOutcome, ItemResult, StepPlan, StepResult
from deltaserve.core.errors import FailReason
from deltaserve.core.ids import PeerName
from deltaserve.core.wire.messages import Cancel, Envelope, Failed, Finish, Grant, Status
from deltaserve.sim.cluster import Shape
from tests.control.engine.duo import DECODE, FRONT, PREFILL, Asked, Duo, slow_fabric
from tests.sim.small_cluster import Cluster

PROMPT = list(range(1, 31))


def late_grants(src: PeerName, dst: PeerName, envelope: Envelope) -> Sequence[float] | None:
    return (0.05,) if isinstance(envelope.body, Grant) else None


def lossy_grants(src: PeerName, dst: PeerName, envelope: Envelope) -> Sequence[float] | None:
    return () if isinstance(envelope.body, Grant) else None


REMOTE = [DecodeState.OFFERED, DecodeState.STARTED, DecodeState.GRANTED, DecodeState.VERIFYING]


@pytest.mark.parametrize("state", [*REMOTE, DecodeState.RUNNING])
def test_cancelled_in_every_state_of_decode(state: DecodeState) -> None:
    duo = Duo(Shape(max_running=1), fabric=slow_fabric())
    blockers = [duo.ask([90, 91], 30)] if state is DecodeState.STARTED else []  # nobody is granted beside it
    asked = duo.ask(PROMPT, 12)
    duo.until(lambda: (room := duo.decode_room(asked)) is not None and room.state is state)
    duo.cancel(asked)
    duo.until(lambda: duo.decode_room(asked) is None)
    duo.settle(*blockers)
    assert asked.answer.tokens == list(asked.expected[: len(asked.answer.tokens)])
    duo.serve(PROMPT, 5)


def test_cancelled_while_queued_for_a_row() -> None:
    cluster = Cluster(Shape(num_prefill=0, num_decode=0, num_unified=1, max_running=1))
    cluster.warm_up()
    unified = cluster.world.workers[PeerName("unified-0")]
    first = cluster.front.submit(cluster.generation(PROMPT, 20))
    waiting = cluster.generation(PROMPT, 20)
    cluster.front.submit(waiting)
    cluster.world.run(until=cluster.world.now + 0.01)
    (room,) = [r for r in unified.instance.serving.rooms if r.room == waiting.room]
    assert room.state is DecodeState.QUEUED
    cluster.front.cancel(waiting.room, FailReason.CANCELLED)
    cluster.world.run(until=cluster.world.now + 5.0, done=lambda: first.ends == 1)
    cluster.world.run(until=cluster.world.now + 1.0)
    cluster.check()
    assert cluster.is_quiet()
    assert first.error is None


@pytest.mark.parametrize("state", [s for s in PrefillState if s is not PrefillState.ENDED])
def test_cancelled_in_every_state_of_prefill(state: PrefillState) -> None:
    duo = Duo(Shape(max_running=1), fabric=slow_fabric(), link=late_grants)
    blockers = [duo.ask(range(40, 90), 3)] if state is PrefillState.QUEUED else []
    asked = duo.ask(PROMPT, 12)
    duo.until(lambda: (room := duo.prefill_room(asked)) is not None and room.state is state)
    duo.cancel(asked)
    duo.until(lambda: duo.prefill_room(asked) is None)
    duo.settle(*blockers)
    duo.serve(PROMPT, 5)


def test_cancel_from_another_front_is_ignored() -> None:
    duo = Duo()
    asked = duo.ask(PROMPT, 12)
    duo.until(lambda: len(asked.answer.tokens) > 2)
    duo.inject(DECODE, PREFILL, Cancel(room=asked.room, reason=FailReason.CANCELLED))
    duo.settle(asked)


def test_a_deadline_ends_a_room_on_both_sides() -> None:
    duo = Duo(link=lossy_grants)
    asked = duo.ask(PROMPT, 12)
    duo.until(lambda: (room := duo.prefill_room(asked)) is not None and room.state is PrefillState.AHEAD)
    room, ahead = duo.decode_room(asked), duo.prefill_room(asked)
    assert room is not None
    assert ahead is not None
    room.request.deadline = ahead.request.deadline = duo.world.now + 0.5
    duo.until(lambda: asked.answer.ends == 1)
    assert asked.answer.error is not None
    assert asked.answer.error.reason is FailReason.DEADLINE
    duo.quiet()


def test_a_prompt_computed_ahead_of_its_grant_is_sent_in_one_piece() -> None:
    duo = Duo(link=late_grants)
    asked = duo.ask(PROMPT, 3)
    duo.until(lambda: (room := duo.prefill_room(asked)) is not None and room.state is PrefillState.AHEAD)
    duo.settle(asked)


# ---------------------------------------------------------------- stop strings


@pytest.mark.parametrize("keep", [1, 3, 6, 7])
def test_finish_truncates_and_keeps_the_pages_of_what_was_kept(keep: int) -> None:
    duo = Duo()
    asked = duo.ask(range(1, 15), 30)
    duo.until(lambda: len(asked.answer.tokens) >= 7)
    duo.inject(DECODE, FRONT, Finish(room=asked.room, output_len=keep))
    duo.until(lambda: asked.answer.ends == 1)
    assert asked.usage.output_len == keep
    duo.quiet()
    assert duo.cached_pages(DECODE) == (14 + keep) // 4 or duo.cached_pages(DECODE) == (14 + keep - 1) // 4
    duo.serve([*range(1, 15), *asked.expected[:keep], 5], 4)


def test_finish_under_a_running_step_waits_for_its_commit() -> None:
    duo = Duo()
    asked = duo.ask(PROMPT, 30)
    scheduler = duo.decode.parts.scheduler
    duo.until(
        lambda: (
            len(asked.answer.tokens) >= 4
            and (room := duo.decode_room(asked)) is not None
            and scheduler.steps.is_in_flight(room.request)
        )
    )
    duo.inject(DECODE, FRONT, Finish(room=asked.room, output_len=2))
    assert duo.decode_room(asked) is not None
    duo.until(lambda: asked.answer.ends == 1)
    assert asked.usage.output_len == 2
    duo.quiet()


@pytest.mark.parametrize("state", [DecodeState.OFFERED, DecodeState.STARTED, DecodeState.GRANTED])
def test_finish_while_a_resumed_room_waits_for_prefill(state: DecodeState) -> None:
    duo, asked = resumed(state)
    duo.inject(DECODE, FRONT, Finish(room=asked.room, output_len=1))
    duo.until(lambda: asked.answer.ends == 1)
    assert asked.answer.error is None
    assert asked.usage.output_len == 1
    duo.quiet()
    duo.serve(PROMPT, 3)


@pytest.mark.parametrize("state", [DecodeState.OFFERED, DecodeState.STARTED, DecodeState.GRANTED])
def test_cancelled_while_a_resumed_room_waits_for_prefill(state: DecodeState) -> None:
    duo, asked = resumed(state)
    duo.cancel(asked)
    duo.until(lambda: duo.decode_room(asked) is None)
    duo.quiet()


def resumed(state: DecodeState) -> tuple[Duo, Asked]:
    """A retracted room on its way back through prefill: the only one running, when another's pages were granted."""
    duo = Duo(Shape(decode_pages=16, reserve_len=0, extend_len=0), fabric=slow_fabric())
    asked = duo.ask([80, *range(1, 20)], 40)
    duo.until(lambda: len(asked.answer.tokens) > 0)
    other = duo.ask([81, *range(1, 20)], 40)

    def is_back() -> bool:
        room = duo.decode_room(asked)
        return room is not None and room.request.num_retractions > 0 and room.state is state

    duo.until(is_back)
    duo.cancel(other)
    return duo, asked


# ---------------------------------------------------------------- numbers


def break_step(duo: Duo, name: PeerName, outcome: ItemOutcome, when: Callable[[StepPlan], bool]) -> None:
    """From now on a worker's executor answers steps with `outcome` where `when` says so."""
    worker = duo.worker(name)
    execute = worker.executor.execute

    def broken(plan: StepPlan) -> StepResult:
        result = execute(plan)
        if not when(plan):
            return result
        return StepResult(plan.step, tuple(ItemResult(item.row, (), outcome) for item in result.items))

    worker.executor.execute = broken  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (ItemOutcome.NOT_FINITE, FailReason.NUMERICAL),
        (ItemOutcome.FAILED, FailReason.COMPUTE_FAILED),
        (ItemOutcome.NO_GRAMMAR, FailReason.GRAMMAR_FAILED),
    ],
)
@pytest.mark.parametrize("name", [PREFILL, DECODE])
def test_a_step_that_is_not_computed_ends_the_request_and_is_not_cached(
    name: PeerName, outcome: ItemOutcome, reason: FailReason
) -> None:
    duo = Duo(Shape(chunk_len=64))
    before = duo.cached_pages(name)
    break_step(duo, name, outcome, lambda plan: any(item.samples for item in plan.items))
    asked = duo.ask(PROMPT, 12)
    duo.until(lambda: asked.answer.ends == 1)
    assert asked.answer.error is not None
    assert asked.answer.error.reason is reason
    duo.quiet()
    landed = 0 if name == PREFILL else len(PROMPT) // 4  # prefill's part was sound
    assert duo.cached_pages(name) - before == landed


# ---------------------------------------------------------------- drain


@pytest.mark.parametrize("name", [PREFILL, DECODE])
def test_a_draining_worker_finishes_what_it_has_and_takes_nothing_new(name: PeerName) -> None:
    duo = Duo(fabric=slow_fabric())
    asked = duo.ask(PROMPT, 8)
    duo.until(lambda: duo.prefill_room(asked) is not None)
    duo.report(name, DrainRequested())
    instance = duo.worker(name).instance
    assert not instance.is_drained()
    duo.settle(asked)
    assert instance.is_drained()
    later = duo.ask(PROMPT, 3)
    duo.until(lambda: later.answer.ends == 1, limit_s=1.0)
    assert later.answer.error is not None
    assert later.answer.error.reason is FailReason.NO_PEER
    assert instance.is_drained()


def test_a_worker_that_drains_says_so_at_once() -> None:
    """An idle one ends before its next heartbeat; requests would wait for it as for one that was killed."""
    duo = Duo()
    duo.quiet()
    told = len(duo.sent(Status, DECODE))
    duo.report(DECODE, DrainRequested())
    (status,) = duo.sent(Status, DECODE)[told:]
    assert status.draining


def test_offers_to_a_draining_prefill_are_refused_at_once() -> None:
    duo = Duo()
    duo.report(PREFILL, DrainRequested())
    asked = duo.ask(PROMPT, 3)
    duo.until(lambda: bool(duo.sent(Failed)), limit_s=0.5)
    assert [failed.reason for failed in duo.sent(Failed)] == [FailReason.DRAINING]
    duo.cancel(asked)
    duo.quiet()


# ---------------------------------------------------------------- a Cancel that is lost


def test_a_prompt_that_waits_for_a_grant_is_asked_about_where_its_cancel_was_lost() -> None:
    """Decode knows nothing of it any more, and says so when it is announced again."""
    lost: list[Cancel] = []

    def link(src: PeerName, dst: PeerName, envelope: Envelope) -> Sequence[float] | None:
        if isinstance(envelope.body, Grant):
            return ()
        if isinstance(envelope.body, Cancel) and dst == PREFILL and not lost:
            lost.append(envelope.body)
            return ()
        return None

    duo = Duo(link=link)
    asked = duo.ask(PROMPT, 3)
    duo.until(lambda: (room := duo.prefill_room(asked)) is not None and room.state is PrefillState.AHEAD)
    duo.cancel(asked)
    duo.until(lambda: duo.prefill_room(asked) is None)
    assert len(lost) == 1
    duo.quiet()
