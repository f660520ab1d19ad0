"""Hints over HTTP and through real workers: what a client is done with is evicted before what it is not, and what it
comes back to behind it."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.e2e.server import ROOT, Server, serving, wait_until

MODEL = ROOT / "models" / "recall-micro"
PAGE, NUM_PAGES = 16, 64
FLAGS = ("--page-size", str(PAGE), "--num-pages", str(NUM_PAGES), "--context-length", "1024")
PROMPT_LEN = 20 * PAGE
RETIRED = "deltaserve_pages_retired_total"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with TemporaryDirectory(prefix="e2e-") as folder, serving(Path(folder), MODEL, *FLAGS) as started:
        yield started


def prompt(first: int) -> list[int]:
    return [first, *range(40, 40 + PROMPT_LEN // 2), *range(40, 39 + PROMPT_LEN // 2)]


def num_retired(server: Server) -> float:
    """Pages, on the side that has fewer."""
    metrics = server.metrics()
    return min(metrics[worker].get(RETIRED, 0.0) for worker in ("prefill-0", "decode-0"))


def test_a_branch_that_is_done_goes_before_an_older_one(server: Server) -> None:
    """The pool holds three prompts: a fourth takes the place of the one whose client is done."""
    older, over, newer = map(prompt, (32, 33, 34))
    first = server.complete(older, 8)
    server.complete(over, 8, kv_hints={"done": True})
    server.complete(newer, 8)
    wait_until(lambda: num_retired(server) >= PROMPT_LEN // PAGE, "both sides to retire it", server)
    server.complete(prompt(35), 8)
    again = server.complete(older, 8)
    assert again.tokens == first.tokens
    assert again.cached_len >= PROMPT_LEN - PAGE
    assert server.complete(over, 8).cached_len < PROMPT_LEN - PAGE
    server.wait_quiet()


def test_what_was_prefetched_is_there(server: Server) -> None:
    """Nothing of it is computed again but what is not a whole page, on either side."""
    ready = server.complete(prompt(50), 64, kv_hints={"prefetch": True})
    assert ready.tokens == []
    assert ready.usage["kv_hints"] == {"prefetch": "accepted"}
    assert server.complete(prompt(50), 8).cached_len >= PROMPT_LEN - PAGE
    server.wait_quiet()


def test_a_conversation_whose_tool_runs_stays_while_others_pass_through(server: Server) -> None:
    """Six others go through what is left of the pool, and take nothing of it."""
    kept = prompt(36)[: 15 * PAGE]
    first = server.complete(kept, 8, kv_hints={"retain_s": 600})
    assert first.usage["kv_hints"] == {"retain_s": "accepted"}
    for number in range(37, 43):
        server.complete(prompt(number), 8)
    again = server.complete(kept, 8, kv_hints={"done": True})
    assert again.tokens == first.tokens
    assert again.cached_len >= 14 * PAGE
    too_long = server.complete(prompt(43), 8, kv_hints={"retain_s": 600})
    assert too_long.usage["kv_hints"]["retain_s"] == "clipped"
    server.wait_quiet()
