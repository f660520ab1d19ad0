"""No way from data to code: the sources, tests included, hold none of the calls that have shipped remote execution."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "tests", "scripts", "benchmarks", "tools")

FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
FORBIDDEN_CALLS = {
    "eval": "runs text",
    "exec": "runs text",
    "compile": "runs text",
    "torch.load": "unpickles; safetensors only",
    "torch.jit.load": "runs code from a file",
    "torch.hub.load": "runs code from the network",
    "yaml.load": "use yaml.safe_load",
    "yaml.load_all": "use yaml.safe_load",
    "yaml.full_load": "use yaml.safe_load",
    "yaml.unsafe_load": "use yaml.safe_load",
    "jinja2.Environment": "use ImmutableSandboxedEnvironment",
    "jinja2.Template": "use ImmutableSandboxedEnvironment",
    "jinja2.environment.Environment": "use ImmutableSandboxedEnvironment",
    "os.system": "use subprocess with a list",
    "os.popen": "use subprocess with a list",
    "concurrent.futures.ProcessPoolExecutor": "pickles between processes",
    "torch.distributed.broadcast_object_list": "pickles between ranks",
    "torch.distributed.all_gather_object": "pickles between ranks",
}
FORBIDDEN_METHODS = {"send_pyobj", "recv_pyobj", "load_module", "exec_module"}
FORBIDDEN_KEYWORDS = {"shell", "allow_pickle", "trust_remote_code"}
"""Keyword arguments that may only be the literal False."""
FORBIDDEN_MODULES_IN_SRC = {"multiprocessing"}
"""Its queues and pipes pickle; between our processes only wire messages travel. Its shared_memory is data only."""


def breaches(tree: ast.Module, in_src: bool) -> Iterator[str]:
    """Each forbidden import and call of a file, with its line. Names are resolved through the file's imports."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        for bound, full in imported_names(node):
            aliases[bound] = full
            yield from import_breaches(full, in_src, node)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from call_breaches(node, aliases)


def imported_names(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0], alias.name.split(".")[0])
            if "." in alias.name:
                yield alias.name, alias.name
    elif isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def import_breaches(name: str, in_src: bool, node: ast.AST) -> Iterator[str]:
    root = name.split(".")[0]
    line = node.lineno if isinstance(node, ast.stmt) else 0
    if root in FORBIDDEN_MODULES:
        yield f"{line}: imports {name}"
    if in_src and root in FORBIDDEN_MODULES_IN_SRC and "shared_memory" not in name:
        yield f"{line}: imports {name}"


def call_breaches(call: ast.Call, aliases: dict[str, str]) -> Iterator[str]:
    name = full_name(call.func, aliases)
    if name in FORBIDDEN_CALLS:
        yield f"{call.lineno}: calls {name}: {FORBIDDEN_CALLS[name]}"
    if isinstance(call.func, ast.Attribute) and call.func.attr in FORBIDDEN_METHODS:
        yield f"{call.lineno}: calls .{call.func.attr}()"
    for keyword in call.keywords:
        is_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        if keyword.arg in FORBIDDEN_KEYWORDS and not is_false:
            yield f"{call.lineno}: {keyword.arg}= must be False"


def full_name(node: ast.expr, aliases: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        base = full_name(node.value, aliases)
        return f"{base}.{node.attr}" if base else ""
    return ""


def test_sources_hold_no_way_from_data_to_code() -> None:
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            hits = breaches(ast.parse(path.read_text()), folder == "src")
            found += [f"{path.relative_to(ROOT)}:{hit}" for hit in hits]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads as parse",
        "import torch as t\nt.load('x')",
        "from torch import load\nload('x')",
        "import yaml\nyaml.load(text)",
        "from jinja2 import Environment\nEnvironment()",
        "import jinja2\njinja2.Template(text)",
        "eval(text)",
        "import subprocess\nsubprocess.run(text, shell=True)",
        "import numpy as np\nnp.load(path, allow_pickle=flag)",
        "AutoConfig.from_pretrained(path, trust_remote_code=True)",
        "socket.send_pyobj(x)",
        "import multiprocessing",
    ],
)
def test_rule_bites(source: str) -> None:
    assert list(breaches(ast.parse(source), in_src=True))


@pytest.mark.parametrize(
    "source",
    [
        "import yaml\nyaml.safe_load(text)",
        "model.eval()",
        "import re\nre.compile(text)",
        "from jinja2.sandbox import ImmutableSandboxedEnvironment\nImmutableSandboxedEnvironment()",
        "from multiprocessing import shared_memory",
        "AutoConfig.from_pretrained(path, trust_remote_code=False)",
        "import torch\ntorch.compile(model)",
    ],
)
def test_rule_leaves_safe_code_alone(source: str) -> None:
    assert not list(breaches(ast.parse(source), in_src=True))
