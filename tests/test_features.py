"""docs/features.md names every row once, in a known state, and only commands and tests that exist."""

import ast
import re
import subprocess
import sys
from functools import cache

import pytest

from tests.patience import PATIENCE_S
from tools.features import PAGE, ROOT, STATES, Row, nodes_of, read_rows

TEXT = PAGE.read_text()
ROWS = read_rows(TEXT)
PROGRAMS = {"python", "pytest", "deltaserve", "make"}


def ids_promised() -> list[str]:
    """From the line `Rows: A1-A33 ...`."""
    line = re.search(r"^Rows: (.+)$", TEXT, re.MULTILINE)
    assert line is not None
    ranges = re.findall(r"([A-Z])1-\1(\d+)", line[1])
    assert len(ranges) == len(line[1].split()) == 5
    return [f"{family}{number}" for family, last in ranges for number in range(1, int(last) + 1)]


@cache
def names_of_tests(path: str) -> frozenset[str]:
    """Names of test functions and test cases of a file."""
    names: set[str] = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(name for name in names if name.startswith(("test_", "Test")))


def test_every_row_is_there_once_and_in_order() -> None:
    assert [row.id for row in ROWS] == ids_promised()
    assert len(ROWS) == 130


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_row_says_what_it_claims(row: Row) -> None:
    assert row.state in STATES
    assert row.what
    assert row.source
    assert row.commands or row.state != "done", "done, and nothing shows it"
    assert row.note or row.state not in ("part", "open", "not planned"), "say what is missing"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_what_a_row_names_exists(row: Row) -> None:
    for command in row.commands:
        program = command.split()[0]
        assert program in PROGRAMS or (ROOT / program).is_file()
        for word in command.split()[1:]:
            if word.startswith(("tests/", "benchmarks/")):
                assert (ROOT / word.split("::")[0]).exists(), word
        for node in nodes_of(command):
            path, _, name = node.partition("::")
            assert name.partition("[")[0] in names_of_tests(path), node


def marks_cells(source: str) -> bool:
    return "mark.wide" in source or "import cells" in source


def test_of_each_that_is_named_without_parameters_a_cell_is_not_marked_wide() -> None:
    """So `make test`, too, shows something of the row."""
    nodes = {node for row in ROWS for command in row.commands for node in nodes_of(command) if "[" not in node}
    files = {path for node in nodes if marks_cells((ROOT / (path := node.partition("::")[0])).read_text())}
    options = ("--collect-only", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow and not wide")
    argv = [sys.executable, "-m", "pytest", *options, *sorted(files)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    kept = {line.partition("[")[0] for line in done.stdout.splitlines() if line.startswith("tests/")}
    kept |= {name.partition("::")[0] for name in kept}
    assert kept
    assert {node for node in nodes if node.partition("::")[0] in files} <= kept
