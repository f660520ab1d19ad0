"""One rank of a worker is killed: its worker ends, comes back whole, and what was under way is answered rightly.

In the middle of a transfer: a rank that is stopped holds it there, as no page counts before every rank has its part.
The model is one whose every token can be checked.
"""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import NamedTuple

import psutil
import pytest

from deltaserve.process.children.exits import Exit
from tests.e2e.questions import RECALL_MODEL, answers_to, ask_about
from tests.e2e.server import Server, serving, wait_until
from tests.e2e.test_deaths import stream_tokens
from tests.patience import PATIENCE_S

STREAM_LEN = 64


class Sides(NamedTuple):
    """Ranks of prefill and decode."""

    prefill: int
    decode: int
    staging: str

    @property
    def flags(self) -> list[str]:
        """Decode keeps nothing: every question has its document moved."""
        ranks = ["--prefill-tp-size", str(self.prefill), "--decode-tp-size", str(self.decode)]
        pages = ["--page-size", "16", "--num-pages", "256", "--chunked-prefill-size", "64"]
        return [*ranks, *pages, "--staging", self.staging, "--disable-decode-radix-cache"]


@pytest.fixture(scope="module")
def pair() -> Iterator[Server]:
    """One server of two ranks on each side, which die one after the other."""
    with (
        TemporaryDirectory(prefix="e2e-") as folder,
        serving(Path(folder), RECALL_MODEL, *Sides(2, 2, "off").flags, deaths=None) as server,
    ):
        yield server


def last_rank(server: Server, name: str) -> psutil.Process:
    return psutil.Process(server.pid(name)).children()[-1]


def num_ranks(server: Server, name: str) -> int:
    return 1 + len(psutil.Process(server.pid(name)).children())


def is_transferring(server: Server) -> bool:
    """As both sides report: decode has given pages away, and prefill has begun to write them."""
    metrics = server.metrics()
    granted = sum(value for key, value in metrics["decode-0"].items() if 'state="granted"' in key)
    return granted > 0 and metrics["prefill-0"].get("deltaserve_tickets_open", 0) > 0


def assert_came_back(server: Server, name: str, killed: psutil.Process, ranks: int) -> None:
    server.wait_back(name)
    assert server.deaths()[-1] == f"{name}: ended with exit code {Exit.RANK_ENDED.value}"
    assert f"(process {killed.pid}) ended with signal {signal.SIGKILL.name}" in server.log()
    assert num_ranks(server, name) == ranks
    assert not killed.is_running()


def check_a_kill_in_the_middle_of_a_transfer(server: Server, name: str, seed: int) -> None:
    """Kill the last rank of `name`, while another answer is streamed."""
    ranks = num_ranks(server, name)
    streamed, *others = ask_about(3, 1, STREAM_LEN, seed)
    assert answers_to(server, others[:1]) == [others[0].answer]  # prefill has its pages and can send them at once
    rank = last_rank(server, name)
    has_begun = Event()
    with ThreadPoolExecutor(2) as pool:
        stream = pool.submit(
            stream_tokens, server, streamed.prompt, STREAM_LEN, lambda count: has_begun.set() if count >= 10 else None
        )
        wait_until(has_begun.is_set, "the first tokens", server)
        rank.suspend()
        asked = pool.submit(answers_to, server, others)
        wait_until(lambda: is_transferring(server), "the transfer", server)
        assert not asked.done()
        rank.kill()
        assert stream.result(PATIENCE_S) == streamed.answer
        assert asked.result(PATIENCE_S) == [other.answer for other in others]
    assert_came_back(server, name, rank, ranks)
    server.wait_quiet()  # quarantined pages too


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
def test_a_rank_killed_in_the_middle_of_a_transfer(pair: Server, name: str) -> None:
    check_a_kill_in_the_middle_of_a_transfer(pair, name, seed=1)


@pytest.mark.parametrize(
    ("sides", "name"),
    [
        pytest.param(Sides(2, 1, "on"), "prefill-0", id="writer"),
        pytest.param(Sides(1, 2, "on"), "decode-0", id="reader", marks=pytest.mark.slow),
    ],
)
def test_a_rank_killed_in_the_middle_of_a_staged_transfer(folder: Path, sides: Sides, name: str) -> None:
    with serving(folder, RECALL_MODEL, *sides.flags, deaths=1) as server:
        check_a_kill_in_the_middle_of_a_transfer(server, name, seed=2)
        (log,) = server.folder.glob("deltaserve-*/prefill-0.log")
        assert "go through staging memory" in log.read_text()


@pytest.mark.parametrize("name", ["decode-0", pytest.param("prefill-0", marks=pytest.mark.wide)])
def test_a_rank_killed_in_the_middle_of_a_stream(pair: Server, name: str) -> None:
    """The worker ends at once, and comes back with as many ranks as before; the client sees at most a pause."""
    [asked] = ask_about(1, 1, STREAM_LEN, seed=3)
    rank = last_rank(pair, name)
    victims = [rank]

    def on_token(count: int) -> None:
        if count >= 10 and victims:
            victims.pop().kill()

    assert stream_tokens(pair, asked.prompt, STREAM_LEN, on_token) == asked.answer
    assert_came_back(pair, name, rank, 2)
    assert answers_to(pair, [asked]) == [asked.answer]
