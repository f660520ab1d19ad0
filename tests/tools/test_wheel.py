"""What `pip wheel .` makes: what is in it, whom it asks for, and that the demo runs from it in an empty folder."""

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

from deltaserve.compute.native.compile_library import KERNEL_FLAGS
from tests.compute.native.native_build import compiled_library
from tests.patience import PATIENCE_S
from tests.tools.built_wheel import (
    LIBRARY,
    PACKED,
    PIP,
    ROOT,
    names_in,
    needed_versions,
    quick_wheel,
    repository_files,
    text_in,
)

NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
"""What manylinux_2_28 may ask of a machine; torch's wheels have that tag, so that nobody gains by an older one."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiled_library()
    return quick_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Metadata:
    """Validated as an index does that takes it."""
    return Metadata.from_email(text_in(wheel, ".dist-info/METADATA"), validate=True)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel alone, in a folder that a Python with our dependencies reads first."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(folder), str(wheel)], check=True)
    return folder


def environment(installed: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(installed), "PYTHONUNBUFFERED": "1"}


def test_it_holds_the_package_the_library_and_the_demos_model_and_nothing_else(wheel: Path) -> None:
    """No test, no tool, nothing of deploy/; one library; the licence."""
    source = {name.removeprefix("src/") for name in repository_files() if name.startswith("src/deltaserve/")}
    code = {name for name in source if not name.endswith(".md")}
    model = {f"{PACKED}/{file.name}" for file in (ROOT / "models" / "recall-micro").iterdir()}
    names = names_in(wheel)
    about = {name.partition(".dist-info/")[2] for name in names if ".dist-info/" in name}
    assert {name for name in names if ".dist-info/" not in name} == code | model | {LIBRARY}
    assert about == {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}


def test_it_is_of_any_python_and_of_one_platform(wheel: Path) -> None:
    _, _, _, tags = parse_wheel_filename(wheel.name)
    assert {(tag.interpreter, tag.abi) for tag in tags} == {("py3", "none")}
    assert all(tag.platform.startswith("linux_") for tag in tags)
    assert "Root-Is-Purelib: false" in text_in(wheel, ".dist-info/WHEEL")


def test_its_library_is_for_every_instruction_set_and_for_the_machines_that_torch_is_for(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        library = archive.read(LIBRARY)
    assert all(name.encode() in library for name in KERNEL_FLAGS[os.uname().machine])
    needed = needed_versions(library)
    assert needed.keys() == NEWEST.keys()
    assert all(version <= NEWEST[kind] for kind, version in needed.items()), needed


def test_what_indexes_ask_of_metadata(metadata: Metadata) -> None:
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.license_files == ["LICENSE"]
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description == (ROOT / "README.md").read_text()
    assert str(metadata.requires_python) == ">=3.11"


@pytest.mark.parametrize(
    ("extra", "package"),
    [("verify", "transformers"), ("nixl", "nixl-cu12"), ("cuda12", "deltaserve"), ("cuda13", "nixl-cu13")],
)
def test_what_only_an_extra_brings(metadata: Metadata, extra: str, package: str) -> None:
    asked = [one for one in metadata.requires_dist or [] if one.name == package]
    assert any(brings(one, extra) for one in asked)
    assert not any(brings(one, "") for one in asked)


def brings(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


@pytest.mark.slow
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
