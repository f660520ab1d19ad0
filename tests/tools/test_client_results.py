"""docs/clients.md, as a run of some clients writes it: their rows anew, the others' as they were."""

import pytest

from tools.clients.catalogue import CLIENTS
from tools.clients.client_table import PAGE
from tools.clients.results_page import Row, page_of

NAMES = ["one", "two", "three"]
CHECKS = [f"check {number} of a client with many" for number in range(12)]


def _row(client: str, *, version: str = "1.0", failed: tuple[tuple[str, str], ...] = ()) -> Row:
    return Row(client, version, "2026-01-02", CHECKS, failed)


def test_rows_come_in_one_order_and_with_the_names_of_their_checks() -> None:
    page = page_of([_row("three"), _row("one", failed=((CHECKS[3], "a | b"),))], NAMES, "")
    one, three = [line for line in page.splitlines() if line.startswith(("| one", "| three"))]
    assert one == f"| one | 1.0 | 2026-01-02 | 11 of 12 | {CHECKS[3]}: a / b |"
    assert three == "| three | 1.0 | 2026-01-02 | 12 of 12 |  |"
    assert page.index("\n- one: ") < page.index("\n- three: ")
    assert all(len(line) <= 120 for line in page.splitlines())


@pytest.mark.parametrize("again", [[], ["two"], ["one", "three"], NAMES])
def test_what_did_not_run_stays_as_it_was(again: list[str]) -> None:
    before = page_of([_row(name) for name in NAMES], NAMES, "")
    after = page_of([_row(name, version="2.0") for name in again], NAMES, before)
    assert after == page_of([_row(name, version="2.0" if name in again else "1.0") for name in NAMES], NAMES, "")


def test_a_client_that_is_gone_has_no_row() -> None:
    before = page_of([_row(name) for name in NAMES], NAMES, "")
    assert page_of([], NAMES[:2], before) == page_of([_row(name) for name in NAMES[:2]], NAMES, "")


def test_the_page_is_what_would_be_written() -> None:
    """Its words are those of the program, and every client has a row."""
    page = PAGE.read_text()
    assert page == page_of([], list(CLIENTS), page)
    assert all(f"\n| {name} |" in page and f"\n- {name}: " in page for name in CLIENTS)
