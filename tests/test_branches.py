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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import pytest

from deltaserve.core import branches
from deltaserve.core.branches import Branch
from tests.e2e.questions import RECALL_MODEL, ask_about
from tests.e2e.server import Api, Process, wait_until
from tests.fixtures.families import FAMILIES as SERVED
from tests.fixtures.tiny_gguf import Kind, write_gguf
from tests.fixtures.tiny_models import VARIANTS
from tests.fixtures.tiny_quantised import write_fp8_blocks
from tests.forks import Forks
from tests.patience import PATIENCE_S
from tests.ports import free_port

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
TABLE = Path("src/deltaserve/core/branches.py")

KINDS: dict[str, Mapping[str, Branch]] = {
    "TRANSPORTS": branches.TRANSPORTS,
    "FAMILIES": branches.FAMILIES,
    "ATTENTION": branches.ATTENTION,
    "FORMATS": branches.FORMATS,
    "DRAFTS": branches.DRAFTS,
    "DIALECTS": branches.DIALECTS,
    "ANSWERS": branches.ANSWERS,
    "CLUSTERS": branches.CLUSTERS,
}
TRUNK = {"torch", "safetensors"}
"""The attention backend that runs anywhere, and that others are compared with when they are opened; the format whose
files a quantised folder and a draft head have, too."""


ONE_FILE = {"FAMILIES", "DRAFTS", "DIALECTS", "ANSWERS"}
"""Kinds whose branches are a file, not a folder."""


class Case(NamedTuple):
    """A branch of a kind."""

    kind: str
    name: str
    module: str

    @property
    def paths(self) -> list[Path]:
        """Its own folder, below the root of the repository; or its file; of a format all files of its name."""
        file = Path("src", *self.module.split(".")).with_suffix(".py")
        if self.kind == "FORMATS":
            return [path.relative_to(ROOT) for path in sorted(SRC.rglob(f"{self.name}_*.py"))]
        return [file if self.kind in ONE_FILE else file.parent]


CASES = [
    Case(kind, name, branch.module)
    for kind, table in KINDS.items()
    for name, branch in table.items()
    if name not in TRUNK
]

FAMILIES = [case for case in CASES if case.kind == "FAMILIES"]
FORMATS = [case for case in CASES if case.kind == "FORMATS"]
DRAFTS = [case for case in CASES if case.kind == "DRAFTS"]

ORDINARY_WORDS = {"local", "llama", "native", "quantised", "ray", "triton", *branches.DRAFTS, *branches.DIALECTS}
"""Names that mean other things as well: looked for are strings that are the name, and the folder's path."""
_FAMILIES_IN_GGUF = ("model/family.py", *(f"model/families/{name}.py" for name in ("gemma3", "llama", "qwen3")))
_MODEL_MAY_BE = (
    *("cli/dispatch.py", "commands/chat/command.py", "commands/doctor/doctor.py", "launch/compose.py"),
    *("launch/lacking.py", "model/other_layouts.py", "settings/config.py", "settings/flags/flag_help.py"),
)
EXCEPTIONS = {
    ("llama", "deltaserve/server/text/gguf_text.py"): "a kind of tokenizer in GGUF files of many families",
    ("gpt_oss", "deltaserve/settings/flags/foreign.py"): "values of other servers' flags",
    ("local", "deltaserve/control/engine/status.py"): "a state of a request, computed on this worker alone",
    ("mooncake", "deltaserve/settings/flags/foreign.py"): "a flag of another server",
    ("mooncake", "deltaserve/commands/bench/command.py"): "a format of recorded traffic, from the same project",
    ("mooncake", "deltaserve/commands/load/mooncake_trace.py"): "that format",
    ("flashinfer", "deltaserve/settings/flags/foreign.py"): "flags of another server",
    **{("gguf", f"deltaserve/{file}"): "how such files hold a family" for file in _FAMILIES_IN_GGUF},
    **{("gguf", f"deltaserve/{file}"): "help and errors say what MODEL may be" for file in _MODEL_MAY_BE},
    ("chat", "deltaserve/cli/dispatch.py"): "a command",
    ("responses", "deltaserve/server/openapi.py"): "a word of OpenAPI",
    ("chat", "deltaserve/commands/demo/chat.py"): "that command, from within the demo",
    ("gguf", "deltaserve/commands/demo/model.py"): "the demo's model is such a file",
    ("gguf", "deltaserve/settings/flags/foreign.py"): "flags of other servers",
    ("gguf", "deltaserve/settings/flags/foreign_values.py"): "values of other servers' flags",
}
"""Where a branch's name stands all the same, and why. May only shrink."""


def by_name(case: Case) -> str:
    return case.name


# ---------------------------------------------------------------- nobody else knows its name


class Words(NamedTuple):
    """(line, text) of a file; comments are none."""

    all: tuple[tuple[int, str], ...]
    """Strings and identifiers."""
    named: tuple[tuple[int, str], ...]
    """Without docstrings: they name models and formats as examples of what is published."""
    constants: tuple[tuple[int, str], ...]
    """Whole strings."""


@cache
def words_of(tree: ast.Module) -> Words:
    nodes = list(ast.walk(tree))
    docs = {node.value for node in nodes if isinstance(node, ast.Expr)}
    words = [
        (node, (getattr(node, "lineno", 0), value))
        for node in nodes
        for field, value in ast.iter_fields(node)
        if isinstance(value, str) and field not in ("type_comment", "kind")
    ]
    return Words(
        all=tuple(word for _, word in words),
        named=tuple(word for node, word in words if node not in docs),
        constants=tuple(word for node, word in words if isinstance(node, ast.Constant)),
    )


def mentions(case: Case, tree: ast.Module) -> list[int]:
    """Lines on which the branch is named."""
    if case.name in ORDINARY_WORDS or case.kind == "ANSWERS":  # formats are often called like families of models
        own = [".".join(path.with_suffix("").parts[1:]) for path in case.paths]
        paths = tuple(f"{path}." for path in own)
        return [
            *sorted({line for line, text in words_of(tree).constants if text == case.name}),
            *(line for line, text in words_of(tree).all if f"{text}.".startswith(paths)),
        ]
    if case.kind == "FAMILIES":
        return [line for line, text in words_of(tree).named if case.name in families_in(text)]
    words = words_of(tree).named if case.kind == "FORMATS" else words_of(tree).all
    return [line for line, text in words if case.name in text.lower()]


_LONGEST_FIRST = sorted((case.name for case in FAMILIES), key=len, reverse=True)
_FAMILY = re.compile("|".join(name.replace("_", "[-_ .]?") for name in _LONGEST_FIRST), re.IGNORECASE)


@cache
def families_in(text: str) -> set[str]:
    """Families named in it: `Qwen3.5` is qwen3_5, not qwen3."""
    found = {re.sub("[-_ .]", "", name).lower() for name in _FAMILY.findall(text)}
    return {name for name in _LONGEST_FIRST if name.replace("_", "") in found}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_a_branch_is_named_in_its_own_folder_and_in_its_line(case: Case) -> None:
    namesakes = [own for other in CASES if other.name == case.name for own in other.paths]
    found = {
        path.relative_to(SRC).as_posix(): lines
        for path in sorted(SRC.rglob("*.py"))
        if not any(path.is_relative_to(ROOT / own) for own in namesakes) and path != ROOT / TABLE
        if (lines := mentions(case, parsed(path)))
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
    (qwen3,) = (case for case in FAMILIES if case.name == "qwen3")
    source = "import deltaserve.model.families.qwen3\nx = 'Qwen3.5'\ny = 'a Qwen3 model'\n'Qwen3'\nQwen3MoE = 1"
    assert mentions(qwen3, ast.parse(source)) == [1, 3]


# ---------------------------------------------------------------- the tree without it


def copied(to: Path, *parts: str) -> Path:
    """What there is to import, with what is compiled of it: half of a first start is compiling; and `parts`."""
    unfinished = shutil.ignore_patterns("*.pyc.*")
    for part in ("src", *parts):
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, to / part, ignore=unfinished)
        else:
            shutil.copy(source, to / part)
    return to


TESTS = ("tests", "pyproject.toml")
"""Parts of a copy that is tested."""


def without(cases: Iterable[Case], to: Path, *parts: str) -> Path:
    """A copy without these branches' folders and lines."""
    copied(to, *parts)
    for case in cases:
        delete(case, to)
    return to


def delete(case: Case, to: Path) -> None:
    """The branch and its line, from a copy."""
    for path in case.paths:
        if (to / path).is_dir():
            shutil.rmtree(to / path)
        else:
            (to / path).unlink()
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


def python(tree: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-B", *argv],  # tables of one size and second pass for one when compiled
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
        library, _, _ = (error.name or "").partition(".")
        assert library in ("triton", "flashinfer", "matplotlib", "nixl_cu12", "ray", "dynamo"), error
print("all imported")
"""


LIBRARIES = (
    *("torch", "transformers", "triton", "opentelemetry.exporter.otlp.proto.http.trace_exporter", "nixl_cu12._api"),
    *("gguf", "safetensors", "tokenizers", "llguidance", "numpy", "msgspec", "zmq.asyncio", "zmq.auth.thread"),
    *("starlette.applications", "uvicorn.protocols.http.h11_impl", "uvloop", "httpx", "pydantic.main", "yaml"),
    *("prometheus_client.parser", "rich.console", "xxhash", "jinja2", "psutil"),
)
"""What the sources import."""


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    made = Forks.of(LIBRARIES)
    yield made
    made.close()


def forked(forks: Forks, tree: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As `python -c text` in that tree."""
    program = tree / "program.py"
    program.write_text(text)
    return forks.run(tree, program, *arguments, limit_s=PATIENCE_S)


def check_imports(forks: Forks, tree: Path) -> None:
    """Everything imports."""
    imported = forked(forks, tree, IMPORT_ALL)
    assert imported.stdout.endswith("all imported\n"), imported.stderr


def check_tree(forks: Forks, tree: Path) -> None:
    """Everything imports, the laws hold."""
    check_imports(forks, tree)
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
ATTENTION = [case for case in CASES if case.kind == "ATTENTION"]
FOLDERS = list(zip_longest(TRANSPORTS, ATTENTION))
"""A branch of either kind at a time: neither knows of the other."""


def by_names(cases: Sequence[Case | None]) -> str:
    return "-".join(case.name for case in cases if case is not None)


@pytest.mark.parametrize("cases", FOLDERS, ids=by_names)
def test_without_a_transport_and_an_attention_backend_the_next_ones_serve(
    forks: Forks, cases: Sequence[Case | None], tmp_path: Path
) -> None:
    gone = [case for case in cases if case is not None]
    tree = without(gone, tmp_path / "tree")
    check_imports(forks, tree)
    left = {kind: [name for name in KINDS[kind] if name not in {case.name for case in gone}] for kind in KINDS}
    said = python(tree, "-m", "deltaserve", "serve", "--help-all").stdout
    assert f"--attention-backend {'|'.join(('auto', *left['ATTENTION']))}" in said
    assert f"--disaggregation-transfer-backend {'|'.join(('auto', *left['TRANSPORTS']))}" in said
    assert f"pages move by {left['TRANSPORTS'][0]}" in answer_of(tree, tmp_path / "run")


OF_RECALL_MODEL = "qwen3"
FAMILIES_LEFT = """
import importlib, pathlib, sys
from deltaserve.core.branches import FAMILIES
from deltaserve.core.errors import ConfigError
from deltaserve.model.checkpoint_config import load_spec

source = pathlib.Path("src")
for path in sorted((source / "deltaserve" / "model").rglob("*.py")):
    importlib.import_module(".".join(path.relative_to(source).with_suffix("").parts))
for path in sys.argv[1:]:
    folder = pathlib.Path(path)
    try:
        print(folder.name, load_spec(folder).family)
    except ConfigError as error:
        print(folder.name, "refused:", error)
"""


@pytest.mark.parametrize("case", FAMILIES, ids=by_name)
def test_without_a_family_the_others_are_read(forks: Forks, case: Case, tmp_path: Path, tiny_models: Path) -> None:
    """Every family can go: what two have in common stands in files of its own (family.py, hybrid_fields.py). That no
    other code knows one is shown above, so that what imports torch is imported once, below."""
    tree = without([case], tmp_path)
    kinds = ((entry.name, family) for entry in FAMILIES for family in import_module(entry.module).FAMILIES)
    folders = {family.model_type: name for name, family in kinds if family.model_type in SERVED}
    assert {*folders.values()} == {entry.name for entry in FAMILIES}
    told = forked(forks, tree, FAMILIES_LEFT, *(str(tiny_models / name) for name in folders))
    said = dict(line.split(" ", 1) for line in told.stdout.splitlines())
    assert said.keys() == folders.keys(), told.stderr
    for name, entry in folders.items():
        if entry == case.name:
            assert re.match(r"refused: config.json: architecture '\w+' is not supported; supported: ", said[name])
        else:
            assert said[name] == name


ANSWERS = [case for case in CASES if case.kind == "ANSWERS"]
FORMATS_LEFT = "from deltaserve.server.text.answers.answer_choice import FORMATS; print(*FORMATS)"


def test_without_a_format_of_answers_the_others_are_there(forks: Forks, tmp_path: Path) -> None:
    """That no other code knows one is shown above; a server without any answers below."""
    tree = copied(tmp_path)
    for case in ANSWERS:
        delete(case, tree)
        told = forked(forks, tree, FORMATS_LEFT)
        assert told.stdout.split() == [name for name in branches.ANSWERS if name != case.name], told.stderr
        for path in (*case.paths, TABLE):
            shutil.copy(ROOT / path, tree / path)


LEFT = {("TRANSPORTS", "local"), ("FAMILIES", OF_RECALL_MODEL)}
"""With what the trunk has of other kinds: what it takes to serve the recall model."""
DELETED = [case for case in CASES if (case.kind, case.name) not in LEFT and case.kind != "DIALECTS"]
"""Dialects: tests/server/test_dialects.py."""


@pytest.mark.parametrize("kind", ["FAMILIES", "ANSWERS", "DRAFTS", "FORMATS"])
def test_without_a_kind_of_branches_everything_imports(forks: Forks, kind: str, tmp_path: Path) -> None:
    """That no other code knows a branch is shown above; that a server answers below."""
    check_imports(forks, without([case for case in DELETED if case.kind == kind], tmp_path))


def test_the_trunk_alone_keeps_the_laws_and_answers(forks: Forks, tmp_path: Path) -> None:
    """Without all branches that can be left out at once; checkpoints in other formats are refused, a line each."""
    tree = without(DELETED, tmp_path / "tree", *TESTS)
    check_tree(forks, tree)
    said = answer_of(tree, tmp_path / "run", "--speculative-algorithm", "off")
    assert "pages move by local" in said
    asked = python(tree, "-m", "deltaserve", "serve", str(RECALL_MODEL), "--speculative-algorithm", "NGRAM")
    assert (asked.returncode, asked.stderr) == (2, "deltaserve: --speculative-algorithm 'NGRAM': must be off\n")
    file, _ = write_gguf(VARIANTS[OF_RECALL_MODEL], tmp_path / "gguf", Kind.Q8_0)
    quantised, _ = write_fp8_blocks(VARIANTS[OF_RECALL_MODEL], tmp_path, (64, 64))
    told = forked(forks, tree, FAMILIES_LEFT, str(file), str(quantised))
    refusals = dict(line.split(" ", 1) for line in told.stdout.splitlines())
    assert refusals[file.name].startswith("refused: config.json: "), told.stderr
    assert refusals[quantised.name].startswith("refused: config.json: weights that are quantised")


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
COMPUTES = """
import torch
from deltaserve.compute.attention.attention_choice import make_attention
from deltaserve.compute.attention.opening import self_test_error
from deltaserve.compute.memory.kv_pool import KvPool
from deltaserve.compute.memory.page_table import PageTable
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.spec import CacheSpec, PageGroup

pool = KvPool(CacheSpec(16, (PageGroup("kv", 1, 2, 64, DType.FLOAT32),)), (4,), torch.device("cpu"))
made = []
def make(*place):
    made.append(type(make_attention("tin", None, *place)).__module__)
    return make_attention("tin", None, *place)
print(self_test_error(pool.page_arenas[0], 8, torch.float32, make), *made)
"""


class Origin(NamedTuple):
    """A branch whose code is added under another name."""

    table: str
    package: Path
    folder: str
    name: str


ORIGINS = (
    Origin("TRANSPORTS", Path("src/deltaserve/transports"), "local", "local"),
    Origin("ATTENTION", Path("src/deltaserve/compute/attention"), "reference", "torch"),
)


def add_tin(tree: Path, origin: Origin) -> None:
    """A further branch: the code of one that there is. What is counted is what it takes to add it."""
    package = tree / origin.package
    shutil.copytree(package / origin.folder, package / "tin", ignore=shutil.ignore_patterns("__pycache__"))
    module = ".".join(origin.package.parts[1:])
    for path in (package / "tin").glob("*.py"):
        text = path.read_text().replace(f"{module}.{origin.folder}", f"{module}.tin")
        path.write_text(text.replace(f'"{origin.name}"', '"tin"'))
    text = (tree / TABLE).read_text()
    start = text.index("        ", text.index(f"\n{origin.table}:"))
    (tree / TABLE).write_text(f'{text[:start]}        "tin": Branch("{module}.tin.kind"),\n{text[start:]}')
    assert filecmp.dircmp(ROOT / origin.package, package).right_only == ["tin"]


def test_a_transport_and_an_attention_backend_cost_a_folder_and_a_line_each(tmp_path: Path) -> None:
    """One conforms, the other computes what the reference does; both are in --help, and a server that is asked for them
    answers."""
    tree = copied(tmp_path / "tree", *TESTS)
    for origin in ORIGINS:
        add_tin(tree, origin)
    changed = [path for path in SRC.rglob("*.py") if path.read_text() != (tree / path.relative_to(ROOT)).read_text()]
    assert changed == [ROOT / TABLE]
    assert len((tree / TABLE).read_text().splitlines()) == len((ROOT / TABLE).read_text().splitlines()) + len(ORIGINS)

    conforms = python(tree, "-c", CONFORMS)
    assert re.fullmatch(r"conforms: \d\d checks\n", conforms.stdout), conforms.stderr
    computes = python(tree, "-c", COMPUTES)
    assert computes.stdout == "0.0 deltaserve.compute.attention.tin.torch_attention\n", computes.stderr
    told = python(tree, "-m", "deltaserve", "serve", "--help-all").stdout
    assert "--disaggregation-transfer-backend auto|tin|local|nixl|mooncake" in told
    assert "--attention-backend auto|tin|native|triton|torch|flashinfer" in told
    flags = ("--disaggregation-transfer-backend", "tin", "--attention-backend", "tin")
    assert "pages move by tin" in answer_of(tree, tmp_path / "run", *flags)
