"""What two looks at a server come to, and how it is shown."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from deltaserve.commands.top.figures import FileUse, Look, PoolUse, figures, series_of
from deltaserve.commands.top.screen import bar, fitted, number, seconds, shown
from deltaserve.core.sizes import size

_METRICS = """
# TYPE deltaserve_requests_total counter
deltaserve_requests_total{{outcome="ok"}} {ok}
deltaserve_requests_total{{outcome="client_gone"}} 1.0
# TYPE deltaserve_generation_tokens_total counter
deltaserve_generation_tokens_total {tokens}
# TYPE deltaserve_prompt_tokens_looked_up_total counter
deltaserve_prompt_tokens_looked_up_total {looked_up}
# TYPE deltaserve_prompt_tokens_found_total counter
deltaserve_prompt_tokens_found_total {found}
# TYPE deltaserve_cached_tokens_total counter
deltaserve_cached_tokens_total{{side="decode"}} 640.0
# TYPE deltaserve_num_requests_running gauge
deltaserve_num_requests_running 3.0
# TYPE deltaserve_computed_tokens_total counter
deltaserve_computed_tokens_total{{instance="decode-0",role="decode"}} 5.0
# TYPE deltaserve_time_to_first_token_seconds histogram
deltaserve_time_to_first_token_seconds_bucket{{le="0.1"}} {fast}
deltaserve_time_to_first_token_seconds_bucket{{le="0.2"}} {all}
deltaserve_time_to_first_token_seconds_bucket{{le="+Inf"}} {all}
"""


def _worker(computed: float, landed: float, **fields: object) -> dict[str, Any]:
    metrics = {
        "deltaserve_computed_tokens_total": computed,
        "deltaserve_transfer_bytes_landed_total": landed,
        'deltaserve_pages_evicted_total{pool="0"}': computed / 10,
    }
    status = {
        "num_running": 3,
        "num_waiting": 1,
        "num_pages": [100],
        "free_pages": [20],
        "evictable_pages": [50],
        "quarantined_pages": [2],
        "decode_step_s": 0.004,
        "metrics": metrics,
    }
    return {"name": "decode-0", "role": "decode", "state": "ready", "leaving": False, "status": status, **fields}


def _look(at_s: float, worker: dict[str, Any], **values: float) -> Look:
    series = series_of(_METRICS.format(**values))
    return Look(at_s, {"served_model_name": "m", "engine": {"workers": [worker]}}, series)


_BEFORE = _look(10.0, _worker(1000.0, 0.0), ok=5, tokens=100, looked_up=1000, found=0, fast=5, all=5)
_NOW = _look(12.0, _worker(1600.0, 4096.0), ok=9, tokens=140, looked_up=1400, found=300, fast=6, all=9)


def test_rates_are_of_what_was_gained_since_the_last_look() -> None:
    server = figures(_NOW, _BEFORE)
    assert (server.requests_per_s, server.output_per_s, server.found_share) == (2.0, 20.0, 0.75)
    assert (server.running, server.waiting, server.found_tokens, server.moved_bytes) == (3, 0, 640.0, 4096.0)
    assert server.ttft_s is not None
    assert 0.1 < server.ttft_s < 0.2, "one of the four was quicker"
    (worker,) = server.workers
    assert (worker.tokens_per_s, worker.bytes_per_s, worker.evicted_per_s) == (300.0, 2048.0, 30.0)
    assert worker.pools == (PoolUse(used=30, cached=50, free=20),)
    assert (worker.running, worker.waiting, worker.quarantined, worker.state) == (3, 1, 2, "ready")


def test_the_first_look_has_no_rates_and_a_share_of_all() -> None:
    server = figures(_NOW, None)
    assert (server.requests_per_s, server.workers[0].tokens_per_s) == (None, None)
    assert server.found_share == 300 / 1400


def test_a_worker_that_is_new_or_away_has_none() -> None:
    away = {**_worker(0.0, 0.0), "status": None, "state": "greeting"}
    for before, now in ((_worker(1.0, 1.0), away), (away, _worker(1.0, 1.0))):
        values = {"ok": 5, "tokens": 100, "looked_up": 0, "found": 0, "fast": 0, "all": 0}
        server = figures(_look(11.0, now, **values), _look(10.0, before, **values))
        assert server.workers[0].tokens_per_s is None
        assert (server.found_share, server.ttft_s) == (None, None)
    assert figures(_look(1.0, away, **values), None).workers[0].state == "starting or unreachable"
    leaving = _worker(1.0, 1.0, leaving=True)
    assert figures(_look(1.0, leaving, **values), None).workers[0].state == "leaving"


def test_counters_of_a_front_that_was_restarted_do_not_run_backwards() -> None:
    server = figures(_BEFORE, _NOW)
    assert (server.requests_per_s, server.output_per_s) == (0.0, 0.0)


def test_the_picture() -> None:
    console = Console(width=160, record=True, force_terminal=False)
    console.print(shown(figures(_NOW, _BEFORE), "http://localhost:30000"))
    text = console.export_text()
    for words in (
        "m at http://localhost:30000",
        "3 running, 0 waiting, 2/s done",
        "75% of prompt tokens found; 4 KiB moved to these workers, 640 prompt tokens were on decode already",
        "4 ms",
        "2 KiB",
        "#######============..... 100",
        "evicts 30/s, 2 pages in quarantine",
    ):
        assert words in text, text


_FILE = {
    "deltaserve_tier_slots": 400.0,
    "deltaserve_tier_pages": 120.0,
    "deltaserve_tier_pages_stored_total": 500.0,
    "deltaserve_tier_bytes_loaded_total": 3.0 * 2**20,
    "deltaserve_tier_failures_total": 2.0,
}


@pytest.mark.parametrize(
    ("tier", "use", "words"),
    [
        ({}, None, None),
        (_FILE, FileUse(120, 400, 3.0 * 2**20, 2), "120 of 400 pages, 3.0 MiB back, 2 failed"),
        (_FILE | {"deltaserve_tier_failures_total": 0.0}, FileUse(120, 400, 3.0 * 2**20, 0), "3.0 MiB back  "),
        ({"deltaserve_tier_slots": 0.0}, FileUse(0, 0, 0.0, 0), "cannot be had"),
    ],
)
def test_a_file_under_the_cache_is_shown_where_there_is_one(
    tier: dict[str, float], use: FileUse | None, words: str | None
) -> None:
    plain, filed = _worker(0.0, 0.0), _worker(0.0, 0.0, name="prefill-0")
    filed["status"]["metrics"] |= tier
    look = Look(1.0, {"served_model_name": "m", "engine": {"workers": [plain, filed]}}, {})
    server = figures(look, None)
    assert [worker.file for worker in server.workers] == [None, use]
    console = Console(width=200, record=True, force_terminal=False)
    console.print(shown(server, "here"))
    text = console.export_text()
    assert (" file " in text) is (use is not None), text
    assert words is None or words in text, text


@pytest.mark.parametrize("revisions", [("a1", "b2"), ("a1", "a1"), ("a1", None)])
def test_revisions_are_shown_where_there_are_several(revisions: tuple[str, str | None]) -> None:
    workers = [_worker(0.0, 0.0) | {"name": f"decode-{i}", "revision": each} for i, each in enumerate(revisions)]
    look = Look(1.0, {"served_model_name": "m", "engine": {"workers": workers}}, {})
    console = Console(width=200, record=True, force_terminal=False)
    console.print(shown(figures(look, None), "here"))
    assert ("revision b2" in (text := console.export_text())) == (revisions == ("a1", "b2")), text


def test_a_narrow_terminal_has_a_line_for_each_worker() -> None:
    console = Console(width=80, record=True, force_terminal=False)
    console.print(shown(figures(_NOW, _BEFORE), "here", 80))
    lines = console.export_text().splitlines()
    (line,) = [line for line in lines if line.startswith("decode-0")]
    assert "####======.. 100" in line or "###======... 100" in line, line
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("num_lines", [3, 8, 14, 40])
def test_what_is_below_the_table_is_cut_to_the_screen(num_lines: int) -> None:
    parts = [[f"tree {number}" for number in range(10)], ["request 0", "request 1"]]
    lines = fitted(parts, num_lines).plain.splitlines()
    assert len(lines) <= num_lines
    assert ("tree 9" in lines) is (num_lines == 40)
    assert ("... 10 lines in all" in lines) is (num_lines < 40)
    assert "request 0" in lines or num_lines == 3


@given(st.integers(0, 10**7), st.integers(0, 10**7), st.integers(0, 10**7))
def test_a_bar_is_as_long_as_any_and_shows_what_is_there(used: int, cached: int, free: int) -> None:
    text = bar(PoolUse(used, cached, free))
    if not used + cached + free:
        assert text == "-"
        return
    cells, total = text.split(" ")
    assert (len(cells), int(total)) == (24, used + cached + free)
    assert not cached or "=" in cells
    assert used or "#" not in cells


def test_numbers_are_short() -> None:
    assert [number(value) for value in (None, 0.0, 0.123, 12.0, 1234.5, 45678.0, 2.5e6, 3e9)] == [
        *("-", "0", "0.123", "12", "1234", "45.7K", "2.5M", "3G")
    ]
    assert [seconds(value) for value in (None, 0.00123, 0.5, 2.0)] == ["-", "1.23 ms", "500 ms", "2.00 s"]
    assert [size(value) for value in (0, 512, 2048, 3 << 20, 5 << 30)] == [
        "0 B",
        "512 B",
        "2 KiB",
        "3.0 MiB",
        "5.0 GiB",
    ]
