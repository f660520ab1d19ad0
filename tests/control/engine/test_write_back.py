"""Answers return to prefill: tickets with the roles exchanged, and whatever happens to one of the two meanwhile."""

from collections.abc import Sequence
from dataclasses import replace
from math import nan
from typing import Any

import msgspec
import pytest

from deltaserve.control.cache.pages import PageState
from deltaserve.control.transfer.tables import ReceiverState
from deltaserve.core.hints import KvHints
from deltaserve.core.ids import PeerName
from deltaserve.core.tokens import pack_u32
from deltaserve.core.transport import Evidence, WriteState
from deltaserve.core.wire.messages import CacheUse, Drained, Envelope, Failed, Grant, Revoke, WriteBack
from deltaserve.sim.cluster import Shape
from deltaserve.sim.loopback import Fabric, Fate, Part, Posted
from tests.control.engine.duo import DECODE, PREFILL, Duo, act, slow_fabric

SHAPE = Shape(writes_back=True, prefill_pages=60, decode_pages=60)
PAGE = SHAPE.page_size
PROMPT = range(1, 2 * PAGE + 2)
OUTPUT_LEN = 3 * PAGE


def answered(duo: Duo) -> None:
    """An answer is complete and prefill has been told of it, and of nothing before."""
    asked = duo.ask(PROMPT, OUTPUT_LEN)
    duo.until(lambda: bool(asked.answer.ends) and bool(duo.sent(WriteBack, DECODE)))


def slow_answers(seconds: float = 2.0) -> Fabric:
    """What decode writes takes its time."""

    def fate(posted: Posted) -> Fate:
        took = seconds if posted.src == DECODE else 0.001
        return Fate(lands=(Part(took / 2, 1), Part(took)), notified_s=took, told_s=took)

    return Fabric(policy=fate)


def num_open(duo: Duo, name: PeerName) -> int:
    """Tickets of either kind that a worker has not ended."""
    instance = duo.worker(name).instance
    asked = [ticket for ticket in instance.serving.receiver if not ticket.is_revoked]
    return len(asked) + sum(ticket.is_open for ticket in instance.outflow.sender)


def pages_there(duo: Duo, *states: PageState) -> int:
    return sum(duo.worker(PREFILL).instance.parts.pools[0].count(state) for state in states)


def test_prefill_has_what_decode_has() -> None:
    duo = Duo(SHAPE)
    answered(duo)
    duo.run(0.5)
    duo.quiet()
    whole = (len(PROMPT) + OUTPUT_LEN - 1) // PAGE
    assert duo.cached_pages(PREFILL) == duo.cached_pages(DECODE) == whole
    assert duo.metrics(PREFILL)["deltaserve_write_back_pages_total"] == whole - len(PROMPT) // PAGE
    assert (
        duo.metrics(PREFILL)["deltaserve_write_back_bytes_total"]
        == duo.metrics(DECODE)["deltaserve_transfer_bytes_sent_total"]
    )


def test_prefill_computes_the_next_turn_from_it() -> None:
    """With pages of another size the delta begins inside one of decode's."""
    duo = Duo(replace(SHAPE, decode_page_size=6))
    asked = duo.serve(PROMPT, OUTPUT_LEN)
    duo.run(0.5)
    duo.flush(DECODE)
    again = duo.serve([*PROMPT, *asked.answer.tokens, 5], 2)
    whole = (len(PROMPT) + OUTPUT_LEN - 1) // 12 * 12
    assert (again.usage.decode_cached_len, again.usage.prefill_cached_len) == (0, whole)


def test_an_answer_stays_in_its_namespace() -> None:
    duo = Duo(SHAPE)
    asked = duo.serve(PROMPT, OUTPUT_LEN, namespace="alice")
    duo.run(0.5)
    duo.flush(DECODE)
    turn = [*PROMPT, *asked.answer.tokens, 5]
    assert duo.serve(turn, 2, namespace="bob").usage.prefill_cached_len == 0
    assert (
        duo.serve(turn, 2, namespace="alice").usage.prefill_cached_len == (len(PROMPT) + OUTPUT_LEN - 1) // PAGE * PAGE
    )


def test_the_chance_of_a_next_turn_is_told_by_depth() -> None:
    duo = Duo(SHAPE)
    asked = duo.serve(PROMPT, OUTPUT_LEN)
    for number in range(30, 42):  # questions behind which nothing comes
        duo.serve([number] * (PAGE + 1), PAGE)
    duo.run(700.0)
    duo.serve([*PROMPT, *asked.answer.tokens, 5], PAGE, hints=KvHints(retain_ms=1000))
    duo.serve([29] * (PAGE + 1), PAGE)
    first, *_, kept, last = (told.next_turn_chance for told in duo.sent(WriteBack, DECODE))
    assert (first, kept) == (1.0, 1.0)
    assert last < 0.15


def test_a_prefetch_is_no_turn_of_its_conversation() -> None:
    """A question, its next turn made ready, and the turn: the second of two, whichever way it was prepared."""
    duo = Duo(SHAPE)
    asked = duo.serve(PROMPT, OUTPUT_LEN)
    turn = [*PROMPT, *asked.answer.tokens, *[5] * PAGE]
    duo.serve(turn, 1, hints=KvHints(prefetch=True))
    room = duo.ask(turn, PAGE)
    duo.until(lambda: duo.decode_room(room) is not None)
    opened = duo.decode_room(room)
    assert opened is not None
    assert opened.num_turns == 2
    duo.settle(room)


def test_what_is_made_ready_is_sure_to_go_on() -> None:
    """That its turn comes is what the client said, whatever conversations do."""
    duo = Duo(SHAPE)
    for number in range(30, 42):  # questions behind which nothing comes
        duo.serve([number] * (PAGE + 1), PAGE)
    duo.run(700.0)
    duo.serve([29] * (2 * PAGE), PAGE + 1, hints=KvHints(prefetch=True))
    duo.serve([28] * (PAGE + 1), PAGE)
    *_, ready, plain = (told.next_turn_chance for told in duo.sent(WriteBack, DECODE))
    assert ready == 1.0
    assert plain < 0.15


@pytest.mark.parametrize(("prefetch", "is_learnt"), [(False, True), (True, False)])
def test_of_prompts_that_are_made_ready_nothing_is_learnt(prefetch: bool, is_learnt: bool) -> None:
    """Nothing comes behind them: of requests that says something."""
    duo = Duo(SHAPE)
    for number in range(30, 42):
        duo.serve([number] * (PAGE + 1), PAGE, hints=KvHints(prefetch=prefetch))
    duo.run(700.0)
    duo.serve([29] * (PAGE + 1), PAGE)
    *_, last = (told.next_turn_chance for told in duo.sent(WriteBack, DECODE))
    assert (last < 0.15) is is_learnt


def test_a_turn_that_was_made_ready_and_never_came_did_not_come() -> None:
    duo = Duo(SHAPE)
    for number in range(30, 42):
        asked = duo.serve([number] * (PAGE + 1), PAGE)
        duo.serve([number] * (PAGE + 1) + [*asked.answer.tokens, 5], 1, hints=KvHints(prefetch=True))
    duo.run(700.0)
    duo.serve([29] * (PAGE + 1), PAGE)
    *_, last = (told.next_turn_chance for told in duo.sent(WriteBack, DECODE))
    assert last < 0.15


def test_what_is_not_worth_its_way_stays_with_decode() -> None:
    """Bytes that take seconds against tokens that are computed in a part of one."""
    duo = Duo(replace(SHAPE, itl_target_s=1.0), fabric=slow_answers())
    for number in range(30, 50):
        duo.serve([number] * (PAGE + 1), PAGE)
        duo.run(4.0)
    metrics = duo.metrics(PREFILL)
    assert metrics["deltaserve_prefill_tokens_per_second"] > 0
    assert metrics["deltaserve_write_backs_dear_total"] > 8
    assert 4 <= metrics["deltaserve_write_backs_asked_total"] < 12
    duo.quiet()


def test_where_it_is_off_nobody_tells() -> None:
    duo = Duo(replace(SHAPE, writes_back=False))
    duo.serve(PROMPT, OUTPUT_LEN)
    duo.run(0.5)
    assert not duo.sent(WriteBack, DECODE)


@pytest.mark.parametrize(
    ("shares_cores", "itl_target_s", "num_told"), [(True, None, 0), (True, 0.05, 1), (False, None, 1)]
)
def test_what_decode_computed_on_cores_that_prefill_shares_stays(
    shares_cores: bool, itl_target_s: float | None, num_told: int
) -> None:
    """There the next turn is decode's, too. With a target for its gaps it may be prefill's."""
    shape = replace(SHAPE, shares_cores=shares_cores, itl_target_s=itl_target_s, extend_len=len(PROMPT))
    duo = Duo(shape)
    duo.weigh(400)
    duo.serve(PROMPT, OUTPUT_LEN)
    duo.run(0.5)
    assert duo.metrics(DECODE)["deltaserve_conditional_prefills_total"] == 1
    assert len(duo.sent(WriteBack, DECODE)) == num_told


def test_what_prefill_computed_returns_on_shared_cores_too() -> None:
    duo = Duo(replace(SHAPE, shares_cores=True))
    answered(duo)


def test_bypassing_answers_and_their_prompts_stay_out_of_both_trees() -> None:
    duo = Duo(SHAPE)
    duo.settle(duo.ask(PROMPT, OUTPUT_LEN, cache=CacheUse.BYPASS))
    duo.run(0.5)
    assert not duo.sent(WriteBack, DECODE)


def test_a_lost_grant_is_repeated_and_a_repeated_one_changes_nothing() -> None:
    grants: list[Grant] = []

    def link(src: PeerName, dst: PeerName, envelope: Envelope) -> Sequence[float] | None:
        if isinstance(envelope.body, Grant) and src == PREFILL:
            grants.append(envelope.body)
            return () if len(grants) == 1 else (0.0005, 0.001, 0.3)
        return None

    duo = Duo(SHAPE, link=link)
    answered(duo)
    duo.until(lambda: duo.metrics(PREFILL)["deltaserve_write_back_pages_total"] > 0)
    duo.run(0.5)
    duo.quiet()
    assert len(grants) == 2
    assert duo.metrics(DECODE)["deltaserve_write_backs_sent_total"] == 1


@pytest.mark.parametrize("num_evicted", [1, 5], ids=["its end", "all of it"])
def test_what_was_evicted_meanwhile_is_not_sent(num_evicted: int) -> None:
    """Decode holds nothing for an answer: a grant that finds it gone is told so, and prefill has its pages back."""

    def link(src: PeerName, dst: PeerName, envelope: Envelope) -> Sequence[float] | None:
        return (0.2,) if isinstance(envelope.body, Grant) and src == PREFILL else None

    duo = Duo(SHAPE, link=link)
    answered(duo)
    duo.decode.parts.cache.evict([num_evicted])
    duo.until(lambda: any(f.message == "these pages are not here any more" for f in duo.sent(Failed, DECODE)))
    duo.quiet()
    assert duo.cached_pages(PREFILL) == len(PROMPT) // PAGE


def test_what_arrives_behind_an_evicted_prefix_is_freed() -> None:
    duo = Duo(SHAPE, fabric=slow_answers())
    answered(duo)
    duo.until(lambda: pages_there(duo, PageState.GRANTED) > 0)
    duo.flush(PREFILL)
    duo.quiet()
    assert duo.cached_pages(PREFILL) == 0


def test_what_was_computed_meanwhile_is_kept_once() -> None:
    duo = Duo(SHAPE, fabric=slow_answers())
    asked = duo.ask(PROMPT, OUTPUT_LEN)
    duo.until(lambda: bool(asked.answer.ends) and pages_there(duo, PageState.GRANTED) > 0)
    duo.flush(DECODE)
    again = duo.ask([*PROMPT, *asked.answer.tokens], 2)
    duo.settle(again)
    assert duo.cached_pages(PREFILL) == (len(PROMPT) + OUTPUT_LEN) // PAGE


@pytest.mark.parametrize("gone", [DECODE, PREFILL])
def test_the_link_ends_while_pages_are_on_their_way(gone: PeerName) -> None:
    """The ticket ends with it on both sides, and the two work together again."""
    duo = Duo(SHAPE, fabric=slow_answers())
    answered(duo)
    duo.until(lambda: num_open(duo, PREFILL) == num_open(duo, DECODE) == 1)
    other = PREFILL if gone == DECODE else DECODE
    act(duo.worker(gone), lambda turn: duo.worker(gone).instance._lose(other, turn))
    assert num_open(duo, gone) == 0
    duo.quiet(limit_s=20.0)
    duo.serve(PROMPT, 3)


def test_who_leaves_is_let_go_when_it_asks_about_nothing_more() -> None:
    """Decode remembers how its writes ended until prefill says, with its next frame, that their tickets are over."""
    duo = Duo(SHAPE)
    answered(duo)
    duo.until(lambda: duo.worker(DECODE).instance.outflow.sender.num_tombstones > 0)
    assert not duo.decode.back.may_let_go(PREFILL)
    duo.run(1.5)
    assert duo.metrics(DECODE)["deltaserve_write_backs_sent_total"] == 1
    assert duo.decode.back.may_let_go(PREFILL)


def test_a_stopped_writer_is_waited_for_no_longer_than_ten_seconds() -> None:
    def link(src: PeerName, dst: PeerName, envelope: Envelope) -> Sequence[float] | None:
        return () if isinstance(envelope.body, Grant) and src == PREFILL else None

    duo = Duo(SHAPE, link=link)
    answered(duo)
    duo.until(lambda: bool(duo.sent(Revoke, PREFILL)), limit_s=15.0)
    duo.quiet()
    assert duo.sent(Drained, DECODE)


def test_pages_that_somebody_waits_for_are_withdrawn_after_a_second() -> None:
    """The pool holds one prompt beside the answer that is on its way: the second one needs its pages."""
    shape = replace(SHAPE, prefill_pages=16, context_len=15 * PAGE)
    duo = Duo(shape, fabric=slow_answers(8.0))
    answered(duo)
    duo.until(lambda: pages_there(duo, PageState.GRANTED) > 0)
    began = duo.world.now
    asked = duo.ask([9, *range(1, 14 * PAGE)], 2)
    duo.until(lambda: bool(duo.sent(Revoke, PREFILL)), limit_s=15.0)
    assert duo.world.now - began < 5.0
    duo.until(lambda: bool(asked.answer.ends), limit_s=60.0)
    assert asked.answer.error is None


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": b""},
        {"tokens": b"abc"},
        {"tokens": pack_u32([1] * (PAGE + 1))},
        {"tokens": pack_u32([1 << 30] * PAGE)},
        {"tokens": pack_u32([1] * PAGE * 1000)},
        {"tokens": pack_u32([2] * PAGE), "next_turn_chance": 1.5},
        {"tokens": pack_u32([2] * PAGE), "next_turn_chance": nan},
    ],
    ids=["none", "no list", "no whole pages", "no tokens", "too many", "more than certain", "no chance"],
)
def test_what_cannot_be_an_answer_is_not_asked_for(changes: dict[str, Any]) -> None:
    duo = Duo(SHAPE)
    told = WriteBack(room=b"r" * 16, attempt=1, tokens=pack_u32([1] * PAGE), namespace="", next_turn_chance=1.0)
    duo.inject(PREFILL, DECODE, told)
    duo.run(0.1)
    assert len(duo.sent(Grant, PREFILL)) == 1, "this one could be"
    duo.inject(PREFILL, DECODE, msgspec.structs.replace(told, room=b"s" * 16, **changes))
    duo.run(0.1)
    assert len(duo.sent(Grant, PREFILL)) == 1
    duo.quiet()


def test_a_failed_write_of_an_answer_ends_both_directions() -> None:
    """Between two workers there is one endpoint: what prefill writes meanwhile is tried again."""
    of_prefill: list[Fate] = [Fate()]

    def fate(posted: Posted) -> Fate:
        return (
            Fate(lands=(), notified_s=None, told_s=1.0, told=WriteState.ERROR)
            if posted.src == DECODE
            else of_prefill[-1]
        )

    duo = Duo(SHAPE, fabric=Fabric(policy=fate))
    answered(duo)
    of_prefill.append(Fate(lands=(Part(3.0),), notified_s=3.0, told_s=3.0))
    asked = duo.ask([9, *PROMPT], 2)
    duo.until(lambda: num_open(duo, DECODE) == 2)
    duo.until(lambda: not duo.worker(DECODE).instance.links.is_ready(PREFILL))
    assert num_open(duo, DECODE) == 0
    of_prefill.append(Fate())
    duo.settle(asked)


def test_without_proof_pages_enter_the_tree_when_they_are_verified() -> None:
    duo = Duo(replace(SHAPE, evidence=Evidence.CONTENTS, verify_checksums=True), fabric=slow_fabric())
    answered(duo)
    receiver = duo.worker(PREFILL).instance.serving.receiver
    duo.until(lambda: any(ticket.state is ReceiverState.LANDED for ticket in receiver))
    assert duo.cached_pages(PREFILL) == len(PROMPT) // PAGE, "announced, and not compared yet"
    duo.quiet(limit_s=20.0)
    assert duo.cached_pages(PREFILL) == (len(PROMPT) + OUTPUT_LEN - 1) // PAGE
