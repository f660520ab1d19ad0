"""What `pip wheel .` makes: it holds the demo's model, and both run from it in an empty folder."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.patience import PATIENCE_S
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
PACKED = Path("deltaserve/packed/models/recall-micro")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the tree, because setuptools writes beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "tree" / name).write_bytes((ROOT / name).read_bytes())
    for library in (ROOT / "src/deltaserve/compute/native").glob("*.so"):  # current here: need not be compiled again
        (folder / "tree/src/deltaserve/compute/native" / library.name).write_bytes(library.read_bytes())
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(folder / "tree")]
    subprocess.run(build, check=True, timeout=None)
    (made,) = folder.glob("deltaserve-*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel alone, in a folder that a Python with our dependencies reads first."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(folder), str(wheel)], check=True)
    return folder


def environment(installed: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(installed), "PYTHONUNBUFFERED": "1"}


def test_it_holds_the_model_and_is_of_any_python(wheel: Path) -> None:
    names = {name.split("/purelib/")[-1] for name in zipfile.ZipFile(wheel).namelist()}
    assert {f"{PACKED}/{file.name}" for file in (ROOT / "models" / "recall-micro").iterdir()} <= names
    assert wheel.name.split("-")[2:4] == ["py3", "none"]


def test_the_demo_runs_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deltaserve.cli.main", "demo", "--quick", "--no-talk"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(installed),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "right" in done.stdout


@pytest.fixture
def served(installed: Path, tmp_path: Path) -> Iterator[str]:
    """`deltaserve serve` of the packed model; the URL."""
    port = free_port()
    model = installed / PACKED
    command = [sys.executable, "-m", "deltaserve.cli.main", "serve", str(model), "--page-size", "16"]
    options = ["--port", str(port), "--num-pages", "64", "--device", "cpu"]
    with subprocess.Popen(
        [*command, *options], cwd=tmp_path, env=environment(installed), stderr=subprocess.PIPE
    ) as server:
        assert server.stderr is not None
        lines = iter(server.stderr.readline, b"")
        assert any(b"all processes are ready" in line for line in lines), "it ended"
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.stderr.read()


def test_the_packed_model_is_served(served: str) -> None:
    body = {"model": "recall-micro", "prompt": [3, 4, 5], "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{served}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 2
