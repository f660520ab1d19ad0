"""Documents name files that exist, and the walk through one request misses none of the packages it passes."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "deltaserve"
ON_THE_WAY = (
    *("server", "server/text", "process/front"),
    *(f"control/{room}" for room in ("front", "engine", "sched", "cache", "transfer")),
)
"""Folders every file of which the walk of docs/architecture.md names."""
_FILE = re.compile(r"`(\w+(?:/\w+)+\.py)`")


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]
)
def test_named_files_exist(document: str) -> None:
    named = set(_FILE.findall((ROOT / document).read_text()))
    assert not [name for name in named if not (SOURCE / name).is_file() and not (ROOT / name).is_file()]


def test_the_walk_through_one_request_names_every_file() -> None:
    named = set(_FILE.findall((ROOT / "docs" / "architecture.md").read_text()))
    files = {f"{package}/{path.name}" for package in ON_THE_WAY for path in (SOURCE / package).glob("[a-z]*.py")}
    assert files
    assert files - named == set()
