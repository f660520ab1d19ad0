"""The ranges of pyproject.toml are true at both ends: the floors are what constraints-lowest.txt pins and
scripts/test-lowest tests, and constraints.txt, which everything else tests, lies in the ranges."""

import ast
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SERVING = [Requirement(text) for text in PROJECT["dependencies"]]
TESTED_EXTRAS = [
    Requirement(text) for name in ("nixl", "verify", "uvloop") for text in PROJECT["optional-dependencies"][name]
]
ON_GPU_MACHINES = {"torch"}
"""Their floor is what a GPU machine ran: no build of it for CPUs can be installed for scripts/test-lowest."""
NOT_FOR_SERVING = {
    "transformers",
    "nixl-cu12",
    "nixl-cu13",
    "triton",
    "pytest",
    "hypothesis",
    "mypy",
    "ruff",
    "openai",
    "matplotlib",
}


def pins(file: str) -> dict[str, Version]:
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, _, version in (line.partition("==") for line in lines)}


def floor(requirement: Requirement) -> Version:
    (only,) = (one for one in requirement.specifier if one.operator == ">=")
    return Version(only.version)


@pytest.mark.parametrize("requirement", [*SERVING, *TESTED_EXTRAS], ids=lambda r: r.name)
def test_the_floor_is_the_version_tested_as_the_lowest(requirement: Requirement) -> None:
    lowest = pins("constraints-lowest.txt")[canonicalize_name(requirement.name)]
    wanted = floor(requirement)
    assert lowest >= wanted
    is_floor = lowest.release[: len(wanted.release)] == wanted.release
    assert is_floor or requirement.name in ON_GPU_MACHINES, "the tested version is newer than the floor"


@pytest.mark.parametrize("requirement", [*SERVING, *TESTED_EXTRAS], ids=lambda r: r.name)
def test_the_pinned_version_is_allowed(requirement: Requirement) -> None:
    assert requirement.specifier.contains(pins("constraints.txt")[canonicalize_name(requirement.name)])


def test_serving_brings_nothing_that_it_does_not_need() -> None:
    assert not NOT_FOR_SERVING & {canonicalize_name(requirement.name) for requirement in SERVING}


def test_every_extra_is_used() -> None:
    extras = set(PROJECT["optional-dependencies"])
    assert extras == {
        "verify",
        "demo",
        "nixl",
        "cuda12",
        "cuda13",
        "mooncake",
        "plot",
        "uvloop",
        "otel",
        "ray",
        "dynamo",
        "triton",
        "flashinfer",
        "deploy",
        "docs",
        "test",
        "dev",
    }


def test_only_the_references_of_verify_import_transformers() -> None:
    src = ROOT / "src" / "deltaserve"
    importing = set()
    for file in src.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "transformers" for name in names):
                importing.add(str(file.relative_to(src)))
    halves = {f"commands/verify/{name}.py" for name in ("gguf_reference", "safetensors_reference")}
    assert importing == {"commands/verify/reference.py", *halves}
