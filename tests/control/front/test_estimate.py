"""The shape of the price: what must cost more than what."""

from dataclasses import replace

import pytest

from deltaserve.control.engine.near import Weighing
from deltaserve.control.front.estimate import (
    HANDOVER_S,
    Candidate,
    Computing,
    Keeping,
    Prices,
    estimate,
    prefill_way,
)
from deltaserve.control.front.load import DecodeLoad, PrefillLoad
from deltaserve.core.ids import PeerName

PRICES = Prices(kv_bytes_per_token=131072, transfer_bytes_per_s=4e9)
PROMPT = 8000
PREFILL = PrefillLoad(PeerName("prefill-0"), queue_tokens=0.0, tokens_per_s=8000.0)
DECODE = DecodeLoad(
    PeerName("decode-0"),
    num_rooms=2.0,
    max_running=8,
    waiting_tokens=0.0,
    free_tokens=50_000.0,
    pool_tokens=100_000,
    step_s=0.02,
    output_len=256.0,
)


def pair_of(
    prefill: PrefillLoad = PREFILL, decode: DecodeLoad = DECODE, *, prefill_hit: int = 0, decode_hit: int = 0
) -> Candidate:
    return Candidate(Computing(prefill, prefill_hit), Keeping(decode, decode_hit))


PAIR = pair_of()


def ttft(pair: Candidate, prompt_len: int = PROMPT) -> float:
    return estimate(prompt_len, pair, PRICES).ttft_s


def test_a_cold_idle_pair_costs_compute_wire_and_one_step() -> None:
    price = estimate(PROMPT, PAIR, PRICES)
    assert (price.queue_s, price.prefill_s, price.decode_wait_s, price.step_s) == (0.0, 1.0, 0.0, 0.02)
    assert price.wire_s == pytest.approx(PROMPT * 131072 / 4e9)
    assert price.ttft_s == pytest.approx(1.02 + price.wire_s)


def test_a_miss_on_prefill_costs_more_than_one_on_decode() -> None:
    only_decode_misses = ttft(pair_of(prefill_hit=6400))
    only_prefill_misses = ttft(pair_of(decode_hit=6400))
    assert only_decode_misses < only_prefill_misses < ttft(PAIR)


def test_hits_on_both_sides_are_best() -> None:
    both = ttft(pair_of(prefill_hit=6400, decode_hit=6400))
    assert both < ttft(pair_of(prefill_hit=6400))


def test_a_full_hit_on_prefill_still_computes_one_token() -> None:
    assert estimate(PROMPT, pair_of(prefill_hit=PROMPT), PRICES).prefill_s == 1 / 8000


def test_a_long_enough_queue_outweighs_a_hit() -> None:
    hot = pair_of(prefill_hit=6400, prefill=replace(PREFILL, queue_tokens=7000.0))
    warm = pair_of(prefill_hit=6400, prefill=replace(PREFILL, queue_tokens=1000.0))
    assert ttft(warm) < ttft(PAIR) < ttft(hot)


def test_memory_is_waited_for_only_when_it_is_short() -> None:
    tight = replace(DECODE, free_tokens=4000.0)
    short = estimate(PROMPT, pair_of(decode=tight), PRICES)
    assert short.decode_wait_s > 0
    assert estimate(PROMPT, pair_of(decode=tight, decode_hit=6400), PRICES).decode_wait_s == 0
    crowded = replace(tight, waiting_tokens=9000.0)
    assert estimate(PROMPT, pair_of(decode=crowded), PRICES).decode_wait_s > short.decode_wait_s


def test_a_worker_that_tells_of_no_pool_is_not_waited_for() -> None:
    silent = replace(DECODE, free_tokens=0.0, pool_tokens=0)
    assert estimate(PROMPT, pair_of(decode=silent), PRICES).decode_wait_s == 0


def test_rows_are_waited_for_when_all_are_taken() -> None:
    full, overfull = replace(DECODE, num_rooms=8.0), replace(DECODE, num_rooms=12.0)
    waits = [
        estimate(PROMPT, pair_of(decode=load), PRICES).decode_wait_s
        for load in (replace(DECODE, num_rooms=7.0), full, overfull)
    ]
    assert waits[0] == 0 and 0 < waits[1] < waits[2]


def test_a_slower_decode_worker_costs_more() -> None:
    assert ttft(pair_of(decode=replace(DECODE, step_s=0.05))) > ttft(PAIR)


def test_nothing_moves_within_one_worker() -> None:
    alone = pair_of(decode=replace(DECODE, worker=PREFILL.worker))
    assert alone.is_unified
    assert estimate(PROMPT, alone, PRICES).wire_s == 0


def test_the_wait_is_queue_and_decode_memory() -> None:
    busy = pair_of(prefill=replace(PREFILL, queue_tokens=4000.0), decode=replace(DECODE, free_tokens=0.0))
    price = estimate(PROMPT, busy, PRICES)
    assert price.sure_wait_s == price.queue_s + price.decode_wait_s > 0.5


@pytest.mark.parametrize(("prefill", "decode"), [(False, True), (True, False), (False, False)])
def test_what_is_assumed_is_priced_but_is_no_sure_wait(prefill: bool, decode: bool) -> None:
    busy = pair_of(
        prefill=replace(PREFILL, queue_tokens=4000.0, is_measured=prefill),
        decode=replace(DECODE, free_tokens=0.0, is_measured=decode),
    )
    price = estimate(PROMPT, busy, PRICES)
    assert price.sure_wait_s == price.queue_s * prefill + price.decode_wait_s * decode
    assert price.ttft_s > price.queue_s + price.decode_wait_s > 0.5


def way_of(prompt_len: int, pair: Candidate, prices: Prices = PRICES) -> Weighing:
    """The rule's view of a pair, for a prompt of which decode would compute nothing."""
    way = prefill_way(prompt_len, pair, prices)
    assert way is not None
    return Weighing(missing_len=0, backlog_len=0, num_rows=0, way=way, most_len=256)


def wait_len(prefill: PrefillLoad = PREFILL, *, lacking: int = 1, prices: Prices = PRICES) -> int:
    pair = pair_of(prefill, prefill_hit=PROMPT - lacking)
    return way_of(PROMPT, pair, prices).prefill_wait_len


def test_prefill_is_waited_for_as_long_as_it_computes_and_hands_over() -> None:
    """Its queue, and of the prompt what it lacks: an answer that decode alone holds is among it."""
    handover = int(HANDOVER_S * PREFILL.tokens_per_s)
    queued = replace(PREFILL, queue_tokens=500.0)
    for lacking in (1, 20, 300):
        assert wait_len(lacking=lacking) >= lacking + handover
        assert wait_len(queued, lacking=lacking) == 500 + wait_len(lacking=lacking)


def test_slow_wires_count() -> None:
    slow = replace(PRICES, transfer_bytes_per_s=PRICES.transfer_bytes_per_s / 1000)
    assert wait_len(prices=slow) > wait_len()


def test_what_was_measured_counts_in_place_of_what_is_assumed() -> None:
    """The trip and each byte; 0 is an answer too."""
    measured = replace(DECODE, handover_s=0.5, byte_s=1e-8)
    pair = pair_of(decode=measured, prefill_hit=PROMPT - 1, decode_hit=PROMPT - 100)
    assert way_of(PROMPT, pair).prefill_wait_len == int(1 + (0.5 + 100 * 131072 * 1e-8) * PREFILL.tokens_per_s)
    quick = pair_of(decode=replace(DECODE, handover_s=0.0, byte_s=0.0), prefill_hit=PROMPT - 1)
    assert way_of(PROMPT, quick).prefill_wait_len == 1


def test_however_quick_a_way_is_a_prefix_is_worth_to_find_again() -> None:
    """Else a conversation would go wherever a step is a millisecond shorter."""
    quick = replace(DECODE, byte_s=0.0)
    assert ttft(pair_of(decode=quick, decode_hit=6400)) < ttft(pair_of(decode=quick)) == ttft(PAIR)
    slow = replace(DECODE, byte_s=1e-7)
    assert ttft(pair_of(decode=slow)) > ttft(PAIR)


@pytest.mark.parametrize(("byte_s", "is_near"), [(None, False), (1 / 269e9, False), (1 / 165e6, True)])
def test_a_slow_link_turns_the_decision(byte_s: float | None, is_near: bool) -> None:
    """46 KB a token; decode alone holds 8,000 of 8,100 tokens, and draws tokens of 12 rows. By the slow link those
    tokens take 2.2 s to prefill, which computes all of them in 1.6 s."""
    prices = Prices(kv_bytes_per_token=46_000, transfer_bytes_per_s=4e9)
    prefill = replace(PREFILL, tokens_per_s=5_000.0)
    pair = pair_of(prefill, replace(DECODE, byte_s=byte_s), decode_hit=8_000)
    weighing = replace(way_of(8_100, pair, prices), missing_len=100, num_rows=12)
    assert weighing.local_wait_len == 1_400
    assert (weighing.pull_wait_len > weighing.prefill_wait_len) is is_near
    assert weighing.is_near is is_near


def test_a_worker_that_computes_anyway_is_not_waited_for() -> None:
    alone = replace(PREFILL, worker=DECODE.worker, queue_tokens=500.0)
    assert prefill_way(PROMPT, pair_of(alone, decode_hit=7000), PRICES) is None


def pull_len(prefill_hit: int, decode_hit: int, prices: Prices = PRICES) -> int:
    return way_of(PROMPT, pair_of(prefill_hit=prefill_hit, decode_hit=decode_hit), prices).pull_wait_len


def test_what_decode_holds_does_not_have_to_be_computed() -> None:
    """It is on its way for as long as its bytes take."""
    pair = pair_of(prefill_hit=1000, decode_hit=7000)
    pull_s = HANDOVER_S + 6000 * PRICES.kv_bytes_per_token / PRICES.transfer_bytes_per_s
    assert pull_len(1000, 7000) == way_of(PROMPT, pair).prefill_wait_len - 6000 + int(pull_s * PREFILL.tokens_per_s)
    slow = replace(PRICES, transfer_bytes_per_s=PRICES.transfer_bytes_per_s / 1000)
    assert pull_len(1000, 7000, slow) > way_of(PROMPT, pair, slow).prefill_wait_len, "a slow link is worse"


def test_what_prefill_has_itself_is_not_pulled() -> None:
    assert pull_len(7000, 7000) == pull_len(7000, 1000) == 0
