"""Documents name files that exist, every folder of the source has its page, and texts stay as short as they promise.

Docstrings begin with their subject."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "deltaserve"
FOLDERS = sorted(path.parent for path in SOURCE.rglob("__init__.py") if path.parent != SOURCE)
DOCUMENTS = ("README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted(ROOT.glob("docs/*.md"))))

MAX_WORDS_ARCHITECTURE = 2000
MAX_WORDS_PAGE = 400
MAX_WORDS_README = 1000
MAX_FILES_OF_A_REQUEST = 90
MAX_WORDS_STEP = 60
MAX_LINE = 120

_FILE = re.compile(r"`(\w+(?:/\w+)+\.py)`")
_ANY_FILE = re.compile(r"`((?:[\w.]+/)*\w+\.(?:py|cpp|h))`")
_STEP = re.compile(r"^\d+\. (.+?)(?=^\d+\. |\Z)", re.DOTALL | re.MULTILINE)


_PROGRAM = re.compile(r"python (?:-u )?((?:benchmarks|tools|tests)/[\w/]+\.py)\b")
_MODULE = re.compile(r"python -m ((?:benchmarks|tools|tests|deltaserve)(?:\.\w+)*)\b((?:\s+[^`\s#;]+)*)")
_OWN_IMPORT = re.compile(r"^(?:from|import) (?:benchmarks|tools|tests)\b", re.MULTILINE)
PRINTING = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.py", "tools/**/*.py", "src/**/*.md", "src/**/*.py")
    for path in ROOT.glob(pattern)
)


def file_of_module(name: str) -> Path | None:
    """Where `python -m NAME` begins, if it begins anywhere."""
    base = (SOURCE.parent if name.startswith("deltaserve") else ROOT) / name.replace(".", "/")
    return next((path for path in (base.with_suffix(".py"), base / "__main__.py") if path.is_file()), None)


def walk() -> str:
    """The section of docs/architecture.md on one request."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    return text.partition("## One request in twelve steps\n")[2].partition("\n**Failure.**")[0]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_files_exist(document: str) -> None:
    named = set(_FILE.findall((ROOT / document).read_text()))
    assert not [name for name in named if not (SOURCE / name).is_file() and not (ROOT / name).is_file()]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(SOURCE).as_posix())
def test_every_folder_has_a_page(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    assert len(text.split()) <= MAX_WORDS_PAGE
    places = (folder, SOURCE, ROOT)
    named = set(_ANY_FILE.findall(text))
    assert not [name for name in named if not any((place / name).is_file() for place in places)]
    links = re.findall(r"\]\(([^):#]+)\)", text)
    assert not [link for link in links if not (folder / link).exists()]


@pytest.mark.parametrize("page", PRINTING, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_programs_run_as_they_are_printed(page: Path) -> None:
    """`python FILE` finds no package of this folder: a file that imports one is printed as `python -m MODULE`."""
    text = page.read_text()
    by_path = [ROOT / name for name in _PROGRAM.findall(text)]
    assert not [path for path in by_path if not path.is_file() or _OWN_IMPORT.search(path.read_text())]
    for name, arguments in _MODULE.findall(text):
        path = file_of_module(name)
        assert path is not None, name
        if name.startswith("benchmarks.bench_"):
            unknown = [flag for flag in re.findall(r"--[a-z][\w-]*", arguments) if flag not in path.read_text()]
            assert not unknown, name


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= MAX_WORDS_README


def test_the_map_is_short() -> None:
    assert len((ROOT / "docs" / "architecture.md").read_text().split()) <= MAX_WORDS_ARCHITECTURE


def test_the_walk_through_one_request_is_twelve_short_steps() -> None:
    steps = _STEP.findall(walk())
    assert len(steps) == 12
    assert not [step for step in steps if len(step.split()) > MAX_WORDS_STEP]


def test_the_walk_through_one_request_names_few_files_and_all_exist() -> None:
    named = set(_ANY_FILE.findall(walk()))
    files = {path.name for path in SOURCE.rglob("*.py")}
    assert not [name for name in named if name.rpartition("/")[2] not in files]
    assert 30 < len(named) <= MAX_FILES_OF_A_REQUEST


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every string that stands alone: of modules, classes, functions and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


@pytest.mark.parametrize("folder", ["src", "tests", "tools", "benchmarks"])
def test_docstrings_begin_with_their_subject(folder: str) -> None:
    """A docstring like `Of each pool.` leaves the reader to guess what is counted: `Pages of each pool.` says it."""
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.strip().splitlines()[0]}"
        for path in files
        for line, text in docstrings(ast.parse(path.read_text()))
        if text.split()[:1] == ["Of"]
    ]
    assert found == []


_NOT_OURS = re.compile(r"\b(desks?|doors?|greeters?|happenings?|excus\w+|twins?|bequeath\w*|hungry)\b", re.IGNORECASE)
"""Metaphors for what the field has words for: listener, admission, handshake, notice, request in flight, hand over."""
_NAMES = re.compile(r"`[^`]*`|[\w/.]+\.(?:py|md)")
PAGES = (
    *DOCUMENTS,
    "CHANGELOG.md",
    *(f"{path.relative_to(ROOT)}" for path in sorted((*ROOT.glob("docs/*/*.md"), *SOURCE.rglob("*.md")))),
)


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of every comment and docstring."""
    yield from docstrings(ast.parse(text))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@pytest.mark.parametrize("folder", ["src", "tests", "tools", "benchmarks"])
def test_comments_use_the_words_of_the_field(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word[0]}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in comments(path.read_text())
        if (word := _NOT_OURS.search(_NAMES.sub("", text)))
    ]
    assert found == []


def identifiers(text: str) -> Iterator[tuple[int, str]]:
    """Line and words of every name in a file of code, as `free doors` of require_free_doors and FreeDoors."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], re.sub(r"_|(?<=[a-z])(?=[A-Z])", " ", token.string)


@pytest.mark.parametrize("folder", ["src", "tests", "tools", "benchmarks"])
def test_identifiers_use_the_words_of_the_field(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word[0]}"
        for path in files
        for line, words in [(1, path.stem.replace("_", " ")), *identifiers(path.read_text())]
        if (word := _NOT_OURS.search(words))
    ]
    assert found == []


def test_the_script_of_benchmarks_runs_or_names_each_one_of_its_page() -> None:
    script = (ROOT / "scripts" / "bench").read_text()
    told = set(re.findall(r"\bbench_(\w+)", (ROOT / "docs" / "performance.md").read_text()))
    run = {name for names in re.findall(r"^all\+?=\((.*)\)$", script, re.MULTILINE) for name in names.split()}
    left_out = set(re.findall(r"\w+", script.partition("Not among them")[2].partition("set -euo")[0]))
    assert told - run - left_out == set()
    assert [name for name in run if not (ROOT / "benchmarks" / f"bench_{name}.py").is_file()] == []


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Number and text of every line of a page outside code and tables, without the targets of links."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        is_fence = line.lstrip().startswith("```")
        is_code ^= is_fence
        if not is_code and not is_fence and not line.startswith("    ") and not line.lstrip().startswith("|"):
            yield number, re.sub(r"\]\([^)]*\)", "]", line)


@pytest.mark.parametrize("page", PAGES)
def test_prose_has_short_lines(page: str) -> None:
    assert [number for number, line in prose((ROOT / page).read_text()) if len(line) > MAX_LINE] == []


@pytest.mark.parametrize("page", PAGES)
def test_pages_use_the_words_of_the_field(page: str) -> None:
    lines = enumerate((ROOT / page).read_text().splitlines(), 1)
    assert [(number, word[0]) for number, line in lines if (word := _NOT_OURS.search(_NAMES.sub("", line)))] == []
