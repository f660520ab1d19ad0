"""Each branch can be deleted, and one more costs a folder and a line.

A branch is a folder (or file) that one line of core/branches.py names. Nothing else in src knows its name; without the
folder and the line everything imports, the laws hold, and a server answers.
"""

import ast
import filecmp
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from deltaserve.core import branches
from deltaserve.core.branches import Branch
from tests.e2e.questions import RECALL_MODEL, ask_about
from tests.e2e.server import Api, Process, wait_until
from tests.ports import free_port

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
TABLE = Path("src/deltaserve/core/branches.py")

KINDS: dict[str, Mapping[str, Branch]] = {"TRANSPORTS": branches.TRANSPORTS}


class Case(NamedTuple):
    """A branch of a kind."""

    kind: str
    name: str
    module: str

    @property
    def folder(self) -> Path:
        """Its own folder, below the root of the repository."""
        return Path("src", *self.module.split(".")[:-1])


CASES = [Case(kind, name, branch.module) for kind, table in KINDS.items() for name, branch in table.items()]

ORDINARY_WORDS = {"local"}
"""Names that mean other things as well: looked for are strings that are the name, and the folder's path."""
EXCEPTIONS = {
    ("local", "deltaserve/control/engine/status.py"): "a state of a request, computed on this worker alone",
    ("mooncake", "deltaserve/settings/flags/foreign.py"): "a flag of another server",
}
"""Where a branch's name stands all the same, and why. May only shrink."""


def by_name(case: Case) -> str:
    return case.name


# ---------------------------------------------------------------- nobody else knows its name


def words_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of all strings and identifiers; comments are none."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for field, value in ast.iter_fields(node):
            if isinstance(value, str) and field not in ("type_comment", "kind"):
                yield line, value


def mentions(case: Case, tree: ast.AST) -> list[int]:
    """Lines on which the branch is named."""
    if case.name in ORDINARY_WORDS:
        path = case.module.rpartition(".")[0]
        texts = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value == case.name}
        return [*sorted(texts), *(line for line, text in words_of(tree) if f"{text}.".startswith(f"{path}."))]
    return [line for line, text in words_of(tree) if re.search(case.name, text, re.IGNORECASE)]


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_a_branch_is_named_in_its_own_folder_and_in_its_line(case: Case) -> None:
    found = {
        path.relative_to(SRC).as_posix(): lines
        for path in sorted(SRC.rglob("*.py"))
        if not path.is_relative_to(ROOT / case.folder) and path != ROOT / TABLE
        if (lines := mentions(case, ast.parse(path.read_text())))
    }
    allowed = {file for name, file in EXCEPTIONS if name == case.name}
    assert {file: lines for file, lines in found.items() if file not in allowed} == {}
    assert allowed <= found.keys(), "an exception that is none any more"


def test_names_are_found() -> None:
    source = "import deltaserve.transports.tin.kind\nx = 'say tin'\nTinThing = 1\n# tin"
    tin = Case("TRANSPORTS", "tin", "deltaserve.transports.tin.kind")
    assert set(mentions(tin, ast.parse(source))) == {1, 2, 3}
    local = Case("TRANSPORTS", "local", "deltaserve.transports.local.kind")
    source = "from deltaserve.transports.local.kind import KIND\nx = 'local'\ny = 'a local word'\nlocal = 1"
    assert {1, 2} <= set(mentions(local, ast.parse(source)))
    assert 3 not in mentions(local, ast.parse(source))


# ---------------------------------------------------------------- the tree without it


def copied(to: Path) -> Path:
    """What there is to import and to test, with the compiled library."""
    for part in ("src", "tests", "pyproject.toml"):
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, to / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, to / part)
    return to


def without(case: Case, to: Path) -> Path:
    """A copy without the branch's folder and its line."""
    copied(to)
    shutil.rmtree(to / case.folder)
    text = (to / TABLE).read_text()
    lines = text.splitlines(keepends=True)
    (entry,) = (
        (key.lineno, value.end_lineno or value.lineno)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == case.name
        if isinstance(value, ast.Call) and case.module in ast.unparse(value)
    )
    (to / TABLE).write_text("".join([*lines[: entry[0] - 1], *lines[entry[1] :]]))
    return to


def python(tree: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *argv],
        cwd=tree,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{tree / 'src'}:{tree}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


IMPORT_ALL = """
import importlib, pathlib, sys
import deltaserve
root = pathlib.Path(deltaserve.__file__).parent
assert root.is_relative_to(pathlib.Path.cwd()), root
for path in sorted(root.rglob("*.py")):
    name = ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
    if name.endswith("__main__"):
        continue
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:  # libraries that this machine lacks
        assert (error.name or "").partition(".")[0] in ("triton", "flashinfer", "matplotlib", "nixl_cu12"), error
print("all imported")
"""


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_without_a_branch_everything_imports_and_the_laws_hold(case: Case, tmp_path: Path) -> None:
    tree = without(case, tmp_path)
    imported = python(tree, "-c", IMPORT_ALL)
    assert imported.stdout.endswith("all imported\n"), imported.stderr
    laws = ("tests/test_architecture.py", "tests/test_security_ast.py")
    held = python(tree, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *laws)
    assert held.returncode == 0, held.stdout


def answer_of(tree: Path, folder: Path, *flags: str) -> str:
    """What a server of that tree says at its start. Raises AssertionError unless it answers a question rightly."""
    (asked,) = ask_about(1, 1, 8, seed=1)
    port = free_port()
    path = f"PYTHONPATH={tree / 'src'}:{tree}"
    argv = ("serve", str(RECALL_MODEL), "--port", str(port), "--page-size", "16", "--num-pages", "512", *flags)
    process = Process(folder, *argv, wrap=("env", path))
    api = Api(f"http://127.0.0.1:{port}", RECALL_MODEL.name)
    try:
        wait_until(api.is_ready, "readiness", process)
        assert api.complete(asked.prompt, len(asked.answer)).tokens == asked.answer
        assert process.end() == 0, process.log()
        return process.log()
    finally:
        api.http.close()
        process.kill()


TRANSPORTS = [case for case in CASES if case.kind == "TRANSPORTS"]


@pytest.mark.parametrize("case", TRANSPORTS, ids=by_name)
def test_without_a_transport_pages_move_by_the_next_one(case: Case, tmp_path: Path) -> None:
    left = [other for other in branches.TRANSPORTS if other != case.name]
    said = answer_of(without(case, tmp_path / "tree"), tmp_path / "run")
    assert f"pages move by {left[0]}" in said


# ---------------------------------------------------------------- one more


CONFORMS = """
from deltaserve.core.ids import Boot, PeerName
from deltaserve.transports.registry import TransportOptions, transport_kind
from tests.transports import worlds
from tests.transports.conformance import CHECKS

kind = transport_kind("tin")
worlds.LocalTransport = lambda folder: kind.make(PeerName("p"), Boot(1), TransportOptions(folder=str(folder)))
for check in CHECKS:
    world = worlds.LocalWorld()
    check(world)
    world.close()
print(f"conforms: {len(CHECKS)} checks")
"""


def with_tin(to: Path) -> Path:
    """A copy with a further transport: the code of one that there is, under another name. What is counted is what it
    takes to add it."""
    copied(to)
    package = to / "src" / "deltaserve" / "transports"
    shutil.copytree(package / "local", package / "tin", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (package / "tin").glob("*.py"):
        text = path.read_text().replace("deltaserve.transports.local", "deltaserve.transports.tin")
        path.write_text(text.replace('"local"', '"tin"'))
    table = (to / TABLE).read_text()
    line = '        "tin": Branch("deltaserve.transports.tin.kind"),\n'
    (to / TABLE).write_text(table.replace('        "nixl":', f'{line}        "nixl":', 1))
    return to


def test_a_transport_costs_a_folder_and_a_line(tmp_path: Path) -> None:
    """It conforms, is in --help, and moves the pages of a server that is asked for it."""
    tree = with_tin(tmp_path / "tree")
    compared = filecmp.dircmp(SRC / "deltaserve" / "transports", tree / "src" / "deltaserve" / "transports")
    assert compared.right_only == ["tin"]
    changed = [path for path in SRC.rglob("*.py") if path.read_text() != (tree / path.relative_to(ROOT)).read_text()]
    assert changed == [ROOT / TABLE]
    assert len((tree / TABLE).read_text().splitlines()) == len((ROOT / TABLE).read_text().splitlines()) + 1
    conforms = python(tree, "-c", CONFORMS)
    assert re.fullmatch(r"conforms: \d\d checks\n", conforms.stdout), conforms.stderr
    told = python(tree, "-m", "deltaserve", "serve", "--help-all").stdout
    assert "--disaggregation-transfer-backend auto|local|tin|nixl|mooncake" in told
    said = answer_of(tree, tmp_path / "run", "--disaggregation-transfer-backend", "tin")
    assert "pages move by tin" in said
