"""How the feature matrix is read and judged."""

from pathlib import Path

import pytest

from tools.features import (
    ROOT,
    Heard,
    Row,
    Verdict,
    choose,
    line_of,
    main,
    nodes_of,
    read_rows,
    run_command,
    run_tests,
    verdict_of_test,
)

TABLE = """
| id | what | source | state | command | note |
|---|---|---|---|---|---|
| A1 | one \\| thing | here | done | `pytest tests/x.py::test_a tests/x.py::test_b` | |
| A2 | another | there | issue 9 | | ranks |
| B1 | a third | there | part | `scripts/check` and `python -c pass` | half of it |
"""
ROWS = read_rows(TABLE)


def test_rows_are_read_from_the_table() -> None:
    assert [row.id for row in ROWS] == ["A1", "A2", "B1"]
    assert ROWS[1] == Row("A2", "another", "there", "issue 9", (), "ranks")
    assert ROWS[2].commands == ("scripts/check", "python -c pass")


def test_a_torn_row_is_named() -> None:
    with pytest.raises(ValueError, match="A7: 3 cells"):
        read_rows("| A7 | what | done |")


def test_only_commands_of_nothing_but_tests_are_run_together() -> None:
    assert nodes_of(ROWS[0].commands[0]) == ("tests/x.py::test_a", "tests/x.py::test_b")
    assert nodes_of("pytest -m slow tests/x.py") == ()
    assert nodes_of("scripts/check") == ()


def test_by_default_what_is_done_is_chosen() -> None:
    assert choose(ROWS, []) == ROWS[:1]
    assert choose(ROWS, ["B1", "A2"]) == (ROWS[2], ROWS[1])


def test_an_unknown_row_is_an_error_that_names_near_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"A9: no such row; near it: .*A1"):
        choose(ROWS, ["A9"])
    assert main(["A999"]) == 2
    assert capsys.readouterr().err.startswith("features: A999: no such row; near it: A")


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ({"tests/x.py::test_a": "PASSED"}, Verdict(holds=True)),
        ({"tests/x.py::test_a[1]": "PASSED", "tests/x.py::test_a[2]": "PASSED"}, Verdict(holds=True)),
        ({"tests/x.py::test_a[1]": "PASSED", "tests/x.py::test_a[2]": "FAILED"}, Verdict(holds=False, line="why")),
        ({"tests/x.py::test_a": "SKIPPED"}, Verdict(holds=False, line="tests/x.py::test_a skipped")),
        ({"tests/x.py::test_ab": "PASSED"}, Verdict(holds=False, line="tests/x.py::test_a did not run")),
    ],
)
def test_a_test_holds_when_all_of_it_passed(outcomes: dict[str, str], expected: Verdict) -> None:
    assert verdict_of_test("tests/x.py::test_a", outcomes, {"tests/x.py::test_a[2]": "why"}) == expected


def test_a_row_fails_with_one_of_its_commands() -> None:
    good, bad = Verdict(holds=True), Verdict(holds=False, line="exit code 1: no")
    assert line_of(ROWS[2], {"scripts/check": good, "python -c pass": bad}) == (
        "B1   part         FAILS  exit code 1: no",
        bad,
    )
    assert line_of(ROWS[1], {}) == ("A2   issue 9      -      ranks", None)


def test_a_command_holds_when_it_ends_well() -> None:
    assert run_command("python -c pass", 60.0) == Verdict(holds=True)
    failed = run_command("python -c \"print('so'); exit(3)\"", 60.0)
    assert failed == Verdict(holds=False, line="exit code 3: so")
    late = run_command('python -c "import time; time.sleep(600)"', 0.2)
    assert late.line.startswith("ended by the limit of 0.2 s")


def test_tests_are_judged_one_by_one() -> None:
    here = Path(__file__).relative_to(ROOT)
    passed, absent = f"{here}::test_a_torn_row_is_named", f"{here}::test_nothing"
    assert run_tests([passed], 120.0) == {passed: Verdict(holds=True)}
    assert not run_tests([absent], 120.0)[absent].holds


def test_a_line_that_a_library_cut_is_told_again_at_the_end() -> None:
    """UCX writes to stderr between a test's name and what became of it."""
    heard = Heard()
    lines = (
        "tests/a.py::test_one PASSED                          [ 50%]",
        "tests/a.py::test_two[nixl] [1795692032.6] [vm:20223:3] tcp_cm.c:758 UCX ERROR tcp_ep: unsuccessful",
        "PASSED                                               [100%]",
        "PASSED tests/a.py::test_one",
        "PASSED tests/a.py::test_two[nixl]",
        "FAILED tests/a.py::test_three - assert 1 == 2",
    )
    assert [heard.hear(line) for line in lines] == [True, False, False, False, False, False]
    assert heard.outcomes == {
        "tests/a.py::test_one": "PASSED",
        "tests/a.py::test_two[nixl]": "PASSED",
        "tests/a.py::test_three": "FAILED",
    }
    assert heard.reasons == {"tests/a.py::test_three": "tests/a.py::test_three: assert 1 == 2"}
    assert heard.outcomes["tests/a.py::test_one"] == "PASSED"
