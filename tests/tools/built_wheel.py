"""Wheels of this source tree: one that `pip wheel .` makes, and what scripts/wheel makes of a release."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "deltaserve/compute/native/libdeltaserve_native.so"
PACKED = "deltaserve/packed/models/recall-micro"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
_SYMBOLS = re.compile(rb"\b(GLIBC|GLIBCXX|CXXABI|GCC)_(\d+(?:\.\d+)*)\b")


def copy_tree(target: Path) -> None:
    """The files of the repository, because setuptools writes beside the sources."""
    for name in repository_files():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name)


def repository_files() -> Iterator[str]:
    """Tracked or new, and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    return (name for name in filter(None, listed.decode().split("\0")) if (ROOT / name).is_file())


def quick_wheel(folder: Path) -> Path:
    """`pip wheel .` with the library that is compiled here and the setuptools that is installed here."""
    copy_tree(folder / "tree")
    shutil.copy(ROOT / "src" / LIBRARY, folder / "tree" / "src" / LIBRARY)
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(folder / "tree")]
    subprocess.run(build, check=True)
    (made,) = folder.glob("deltaserve-*.whl")
    return made


def names_in(wheel: Path) -> set[str]:
    with ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def text_in(wheel: Path, suffix: str) -> str:
    """The one file of this end."""
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(suffix))
        return archive.read(name).decode()


def needed_versions(library: bytes) -> dict[str, tuple[int, ...]]:
    """GLIBC, GLIBCXX, CXXABI and GCC |-> the newest version that a symbol is taken from."""
    found: dict[str, tuple[int, ...]] = {}
    for kind, number in _SYMBOLS.findall(library):
        version = tuple(map(int, number.split(b".")))
        found[kind.decode()] = max(version, found.get(kind.decode(), ()))
    return found
