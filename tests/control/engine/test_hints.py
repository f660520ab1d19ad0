"""What clients hint reaches both trees, counts at the end of a request, and changes no answer."""

from dataclasses import replace

import pytest

from deltaserve.core.hints import Hint, HintAnswer, HintOutcome, KvHints
from deltaserve.core.wire.messages import CacheUse, Offer, WriteBack
from deltaserve.sim.cluster import Shape
from tests.control.engine.duo import DECODE, PREFILL, Duo
from tests.sim.small_cluster import Cluster

HEAD, PAGE = list(range(1, 17)), 4
DONE = KvHints(done=True)
SHAPE = Shape(writes_back=True, prefill_pages=60, decode_pages=60)
RETIRED = "deltaserve_pages_retired_total"


def hit_after_losing(duo: Duo, num_pages: int, prompt: list[int]) -> tuple[int, int]:
    """Tokens of the prompt that decode and prefill still have when each has evicted so many pages."""
    for side in (duo.decode, duo.prefill):
        side.parts.cache.evict((num_pages,))
    asked = duo.serve(prompt, 1)
    return asked.usage.decode_cached_len, asked.usage.prefill_cached_len


@pytest.mark.parametrize("is_told", [False, True])
def test_what_is_done_goes_first_on_both_sides(is_told: bool) -> None:
    """The first conversation was used before the other, which has no further turn."""
    duo = Duo(SHAPE)
    first, last = [60, *range(2, 16)], [70, *range(2, 16)]
    duo.serve(first, 2)
    duo.serve(last, 2, hints=KvHints(done=is_told))
    for name in (DECODE, PREFILL):
        assert bool(duo.metrics(name)[RETIRED]) is is_told
    kept = hit_after_losing(duo, 3, first)
    assert (kept == (12, 12)) is is_told
    duo.cluster.check()


def test_the_offer_says_it_and_no_answer_is_written_back() -> None:
    duo = Duo(SHAPE)
    duo.serve(HEAD, 9, hints=DONE)
    assert [offer.hints for offer in duo.sent(Offer, DECODE)] == [DONE]
    assert not duo.sent(WriteBack, DECODE)
    duo.serve([50, *HEAD], 9)
    assert duo.sent(WriteBack, DECODE)


@pytest.mark.parametrize(
    ("shape", "cache", "answer"),
    [
        (SHAPE, CacheUse.NORMAL, HintAnswer(hint=Hint.DONE, outcome=HintOutcome.ACCEPTED)),
        (
            SHAPE,
            CacheUse.BYPASS,
            HintAnswer(hint=Hint.DONE, outcome=HintOutcome.REFUSED, reason="no_cache: nothing is left in a cache"),
        ),
        (
            replace(SHAPE, radix_cache=False),
            CacheUse.NORMAL,
            HintAnswer(hint=Hint.DONE, outcome=HintOutcome.REFUSED, reason="decode keeps no cache of prefixes"),
        ),
    ],
)
def test_decode_says_what_becomes_of_it(shape: Shape, cache: CacheUse, answer: HintAnswer) -> None:
    duo = Duo(shape)
    asked = duo.ask(HEAD, 3, cache=cache, hints=DONE)
    duo.settle(asked)
    assert asked.usage.hints == (answer,)
    silent = duo.ask(HEAD, 3, cache=cache)
    duo.settle(silent)
    assert silent.usage.hints == ()
    assert bool(duo.metrics(DECODE)[RETIRED]) is (answer.outcome is HintOutcome.ACCEPTED)


@pytest.mark.parametrize(
    ("length", "cache", "outcomes"),
    [
        (15, CacheUse.NORMAL, (HintOutcome.ACCEPTED, HintOutcome.ACCEPTED)),
        (70, CacheUse.NORMAL, (HintOutcome.CLIPPED, HintOutcome.ACCEPTED)),
        (15, CacheUse.BYPASS, (HintOutcome.REFUSED, HintOutcome.REFUSED)),
    ],
)
def test_each_of_two_hints_is_answered(length: int, cache: CacheUse, outcomes: tuple[HintOutcome, ...]) -> None:
    """How much is kept says nothing of whether the prompt is ready."""
    duo = Duo(SHAPE)
    asked = duo.ask([1 + i % 90 for i in range(length)], 1, cache=cache, hints=KvHints(prefetch=True, retain_ms=1000))
    duo.settle(asked)
    assert [answer.hint for answer in asked.usage.hints] == [Hint.RETAIN, Hint.PREFETCH]
    assert tuple(answer.outcome for answer in asked.usage.hints) == outcomes
    assert all(bool(answer.reason) is (answer.outcome is not HintOutcome.ACCEPTED) for answer in asked.usage.hints)


def test_what_others_share_is_not_done() -> None:
    duo = Duo(SHAPE)
    duo.serve([*HEAD, 40, 41, 42, 43], 1)
    duo.serve([*HEAD, 50, 51, 52, 53], 1, hints=DONE)
    for name in (DECODE, PREFILL):
        assert duo.metrics(name)[RETIRED] == 1
    duo.serve([*HEAD, 50, 51, 52, 53, 54], 1)


def test_a_client_that_leaves_is_done_as_well() -> None:
    duo = Duo(SHAPE)
    asked = duo.ask(HEAD, 40, hints=DONE)
    duo.until(lambda: len(asked.answer.tokens) > 4)
    duo.cancel(asked)
    duo.until(lambda: duo.metrics(DECODE)[RETIRED] >= len(HEAD) // PAGE)
    duo.run(0.5)
    duo.cluster.check()


def test_a_retracted_request_is_not_at_its_end() -> None:
    """What it gives up for a while is not evicted before what others left: it comes back for it."""
    cluster = Cluster(Shape(num_prefill=0, num_decode=0, num_unified=1, decode_pages=16, reserve_len=0))
    cluster.warm_up()
    wanted = [cluster.generation([80 + i, *range(1, 20)], 30) for i in range(2)]
    answers = [cluster.front.submit(replace(generation, hints=DONE)) for generation in wanted]
    (worker,) = cluster.world.workers.values()
    serving, seen = worker.instance.serving, []

    def note() -> bool:
        retracted = serving.parts.scheduler.running.num_retractions
        seen.append((len(serving.rooms), retracted, serving.parts.cache.num_retired))
        return all(answer.ends for answer in answers)

    cluster.world.run(until=cluster.world.now + 20.0, done=note)
    assert any(num_rooms == 2 and retracted for num_rooms, retracted, _ in seen)
    assert all(not retired for num_rooms, _, retired in seen if num_rooms == 2)
    assert seen[-1][2] > 0
    cluster.check()


@pytest.mark.parametrize("is_told", [False, True])
def test_what_is_kept_for_a_while_goes_last_on_both_sides(is_told: bool) -> None:
    """The first conversation was used before the other, and its next turn comes."""
    duo = Duo(SHAPE)
    first, last = [60, *range(2, 16)], [70, *range(2, 16)]
    duo.serve(first, 2, hints=KvHints(retain_ms=60_000 * is_told))
    duo.serve(last, 2)
    for name in (DECODE, PREFILL):
        assert bool(duo.metrics(name)["deltaserve_pages_retained"]) is is_told
    kept = hit_after_losing(duo, 3, first)
    assert (kept == (12, 12)) is is_told
    duo.run(61.0)
    assert all(duo.metrics(name)["deltaserve_pages_retained"] == 0 for name in (DECODE, PREFILL))
    duo.cluster.check()


@pytest.mark.parametrize(
    ("retain_ms", "length", "outcome"),
    [
        (1_000, 15, HintOutcome.ACCEPTED),
        (3_600_000, 15, HintOutcome.ACCEPTED),
        (3_600_001, 15, HintOutcome.CLIPPED),
        (1_000, 70, HintOutcome.CLIPPED),
    ],
)
def test_decode_says_how_much_is_kept(retain_ms: int, length: int, outcome: HintOutcome) -> None:
    """A tenant keeps 15 of 60 pages."""
    duo = Duo(SHAPE)
    asked = duo.serve([1 + i % 90 for i in range(length)], 2, hints=KvHints(retain_ms=retain_ms))
    (told,) = asked.usage.hints
    assert (told.hint, told.outcome) == (Hint.RETAIN, outcome)
    assert bool(told.reason) is (outcome is not HintOutcome.ACCEPTED)
    assert duo.metrics(DECODE)["deltaserve_pages_retained"] <= 15


def test_the_next_turn_of_what_is_kept_is_kept_too() -> None:
    """A tenant keeps 15 of 60 pages: what is kept of the conversation counts once, not as taken from its next turn."""
    duo = Duo(SHAPE)
    hints, told = KvHints(retain_ms=60_000), []
    for length in (40, 44, 56, 64):
        asked = duo.serve([1 + i % 90 for i in range(length)], 1, hints=hints)
        told += [answer.outcome for answer in asked.usage.hints]
    assert told == [HintOutcome.ACCEPTED] * 3 + [HintOutcome.CLIPPED]
    other = duo.serve([90 - i for i in range(20)], 1, hints=hints)
    assert [answer.outcome for answer in other.usage.hints] == [HintOutcome.ACCEPTED], "the older one makes way"
    assert duo.metrics(DECODE)["deltaserve_pages_retained"] == 15
    duo.cluster.check()
