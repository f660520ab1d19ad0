"""The drawn tables are those of the code."""

from tools.state_diagrams import PAGE, drawing, redrawn


def test_the_page_shows_the_present_tables() -> None:
    page = PAGE.read_text()
    assert redrawn(page) == page, "python -m tools.state_diagrams redraws them"


def test_every_table_is_drawn() -> None:
    for line in (
        "FREE         allocate -> OWNED,  grant -> GRANTED",
        "QUARANTINED  drain -> FREE",
        "fence* -> DRAINED",
    ):
        assert line in drawing()
