"""What scripts/wheel makes, installed into an environment with nothing else in it, serves on a machine without a
compiler: the library is in the wheel, and what serving does not need is not pulled."""

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from packaging.utils import parse_sdist_filename, parse_wheel_filename

from tests.compute.native.native_build import compiled_library
from tests.patience import PATIENCE_S
from tests.ports import free_port
from tests.tools.built_wheel import LIBRARY, PACKED, copy_tree, names_in

pytestmark = pytest.mark.slow

NOT_NEEDED = {"transformers", "nixl-cu12", "nixl-cu13", "triton", "uvloop", "pytest", "opentelemetry-sdk", "openai"}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with both files."""
    compiled_library()  # or there is no compiler, and the tests are skipped
    tree = tmp_path_factory.mktemp("release") / "tree"
    copy_tree(tree)
    subprocess.run([tree / "scripts" / "wheel"], env={**os.environ, "PYTHON": sys.executable}, check=True)
    return tree / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def venv(dist: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean environment with the wheel and what it asks for: torch's build for CPUs, where it can be had."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    of_install = {"VENV": str(folder), "PACKAGE": str(wheel), "EXTRAS": ""}
    without = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    make = dist.parent / "scripts" / "make-venv"
    subprocess.run([make], env={**without, **of_install}, check=True)
    return folder


def run(venv: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = bare_environment(venv)
    return subprocess.run(
        [str(venv / "bin" / words[0]), *words[1:]], cwd=folder, env=environment, capture_output=True, text=True
    )


def bare_environment(venv: Path) -> dict[str, str]:
    """No compiler, no other program, nothing of this tree."""
    return {"PATH": str(venv / "bin"), "HOME": str(venv), "PYTHONUNBUFFERED": "1"}


def test_an_index_takes_both(dist: Path, wheel: Path) -> None:
    """linux_x86_64 is the tag that none takes."""
    _, version, _, tags = parse_wheel_filename(wheel.name)
    assert all(tag.platform.startswith("manylinux_") for tag in tags), wheel.name
    oldest = min(tuple(map(int, tag.platform.split("_")[1:3])) for tag in tags)
    assert oldest <= (2, 28), "torch's wheels are for manylinux_2_28"
    (archive,) = dist.glob("*.tar.gz")
    assert parse_sdist_filename(archive.name) == ("deltaserve", version)


def test_the_archive_is_what_the_wheel_is_built_of(dist: Path, wheel: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"LICENSE", "setup.py", "constraints.txt", "deploy/images/Dockerfile.cpu"} <= names
    assert {f"src/{name}" for name in names_in(wheel) if name.endswith((".py", ".cpp", ".h"))} <= names
    assert not any(name.startswith(("tests", "tools", "benchmarks")) or name.endswith(".so") for name in names)


def test_it_is_installed_without_what_serving_does_not_need(venv: Path, tmp_path: Path) -> None:
    listed = json.loads(run(venv, tmp_path, "python", "-m", "pip", "list", "--format", "json").stdout)
    assert not NOT_NEEDED & {one["name"].lower() for one in listed}


def test_doctor_finds_no_obstacle_and_says_what_several_machines_need(venv: Path, tmp_path: Path) -> None:
    model = packed_model(venv)
    told = run(venv, tmp_path, "deltaserve", "doctor", str(model), "--port", str(free_port()))
    assert told.returncode == 0, told.stdout + told.stderr
    assert "pip install nixl-cu12" in told.stdout


def packed_model(venv: Path) -> Path:
    (site,) = (venv / "lib").glob("python3*/site-packages")
    assert (site / LIBRARY).is_file()
    return site / PACKED


@pytest.fixture
def served(venv: Path, tmp_path: Path) -> Iterator[str]:
    """`deltaserve serve` of the packed model; the URL."""
    port = free_port()
    command = [str(venv / "bin" / "deltaserve"), "serve", str(packed_model(venv)), "--page-size", "16"]
    options = ["--port", str(port), "--num-pages", "64", "--device", "cpu"]
    environment = bare_environment(venv)
    with subprocess.Popen([*command, *options], cwd=tmp_path, env=environment, stderr=subprocess.PIPE) as server:
        assert server.stderr is not None
        lines = iter(server.stderr.readline, b"")
        assert any(b"all processes are ready" in line for line in lines), "it ended"
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.stderr.read()


def test_the_packed_model_is_served(served: str) -> None:
    """The facts are a cycle: it is known what follows `ruga`."""
    facts = " rada ruga; tuto teva; buse make; teva rada; ruga buse; make tuto;? ruga"
    body = {"model": "recall-micro", "prompt": facts, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{served}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == " buse make tuto teva rada ruga"
