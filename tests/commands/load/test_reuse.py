"""What was computed of prompts, from the times and tokens that a server tells."""

from dataclasses import replace
from typing import Any

from deltaserve.commands.load.moved_bytes import BACK, GRANTED, MovedBytes
from deltaserve.commands.load.record import RequestRecord
from deltaserve.commands.load.reuse import MeanWaits, reuse_of
from deltaserve.core.metrics import HELP


def record(turn: int, prompt_len: int, known_len: int, **timing: int | str | None) -> RequestRecord:
    told: dict[str, Any] = {
        "decode_cached_tokens": 0,
        "prefill_cached_tokens": 0,
        "transferred_bytes": 0,
        "transferred_state_bytes": 0,
    }
    return RequestRecord(
        conversation=0,
        turn=turn,
        sent_s=0.0,
        prompt_len=prompt_len,
        arrivals=(),
        e2e_s=1.0,
        output_len=10,
        cached_len=None,
        tokens_right=None,
        tokens_expected=0,
        error=None,
        usage={"timings": [told | timing]},
        known_len=known_len,
    )


def test_a_prompt_is_computed_by_whoever_computes_it() -> None:
    cold = record(0, 100, 0, transferred_bytes=1000)
    by_prefill = record(1, 130, 110, decode_cached_tokens=108, prefill_cached_tokens=96, transferred_bytes=300)
    by_decode = record(2, 160, 140, decode_cached_tokens=136, decode_loaded_tokens=64)
    found = reuse_of([cold, by_prefill, by_decode])
    assert found is not None
    assert (found.num_requests, found.num_prefilled) == (3, 2)
    assert found.new_len == 100 + 20 + 20
    assert found.computed_len == 100 + (130 - 96) + (160 - 136)
    assert (found.decode_cached_len, found.prefill_cached_len) == (108 + 136, 96)
    assert found.moved_bytes == 1300
    assert found.delta_len == 100 + (130 - 108)
    assert found.moved_over_delta is None
    assert "bytes back to prefill" not in dict(found.as_rows())
    assert found.loaded_len == 64
    assert ("of that from files", "64") in [*found.as_rows()]
    assert found.num_evicted == 0


def test_what_moved_is_told_beside_what_was_asked_for_and_what_came_back() -> None:
    cold = record(0, 100, 0, transferred_bytes=1026)
    found = reuse_of([cold, record(1, 150, 110, decode_cached_tokens=148)], MovedBytes(granted=1024, back=64))
    assert found is not None
    rows = dict(found.as_rows())
    assert rows["tokens of the delta"] == "100"
    assert rows["bytes moved over bytes of the delta"] == "1.0020"
    assert rows["bytes moved for each token of the delta"] == "10.3"
    assert rows["bytes back to prefill"] == "64"
    nothing = reuse_of([record(0, 100, 0)], MovedBytes(granted=0, back=0))
    assert nothing is not None
    assert nothing.moved_over_delta is None


def test_metrics_of_another_server_say_nothing_of_bytes() -> None:
    assert MovedBytes.read('vllm:num_requests_running{engine="0"} 3.0\n') is None
    assert {GRANTED, BACK} <= set(HELP)
    assert MovedBytes.read("<html>not metrics {</html>") is None
    assert MovedBytes(5, 7).since(MovedBytes(3, 9)) == MovedBytes(2, 0)


def test_a_later_turn_whose_prefix_nobody_holds_is_counted() -> None:
    lost = record(1, 130, 110, decode_cached_tokens=8, transferred_bytes=300)
    held_by_one = record(1, 130, 110, decode_cached_tokens=104, transferred_bytes=300)
    found = reuse_of([lost, held_by_one, record(0, 100, 90)])
    assert found is not None
    assert found.num_evicted == 1


def test_without_timings_nothing_is_said() -> None:
    plain = replace(record(0, 10, 0), usage={"prompt_tokens": 10})
    failed = replace(record(0, 10, 0), error="refused")
    assert reuse_of([plain, failed]) is None


def test_shares_say_what_the_rule_did() -> None:
    found = reuse_of([record(0, 100, 0, transferred_bytes=1000), record(1, 100, 0, decode_cached_tokens=80)])
    assert found is not None
    assert found.share_by_decode == 0.5
    assert found.share_computed == 120 / 200


def test_what_was_pulled_and_what_was_waited_for_is_told() -> None:
    waits = {"local_wait_tokens": 300, "prefill_wait_tokens": 500, "pull_wait_tokens": 100}
    pulled = record(0, 100, 0, transferred_bytes=9, computed_on="prefill", prefill_pulled_tokens=60, **waits)
    loaded = record(1, 100, 0, decode_loaded_tokens=20, computed_on="decode", **{**waits, "pull_wait_tokens": 0})
    found = reuse_of([pulled, loaded, record(2, 200, 0, computed_on=None)])
    assert found is not None
    assert (found.share_pulled, found.share_loaded) == (60 / 400, 20 / 400)
    assert found.waits == MeanWaits(300.0, 300.0)
    rows = dict(found.as_rows())
    assert rows["of that pulled from decode"] == "60"
    assert rows["tokens waited for, mean: by decode, by prefill"] == "300, 300"


def test_where_nothing_was_weighed_no_wait_is_told() -> None:
    found = reuse_of([record(0, 100, 0)])
    assert found is not None and found.waits is None
    assert not any("waited" in label for label, _ in found.as_rows())
