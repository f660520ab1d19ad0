"""NIXL's build goes by the version of CUDA that torch was built for, and so do messages. No build is loaded here but
the one that is installed.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from deltaserve.transports import gpu_trial
from deltaserve.transports.nixl import gpu_check, library

VERSION_FILES = {
    "a CUDA 13 torch": ("cuda: Optional[str] = '13.0'\ngit_version = 'x'\nhip: Optional[str] = None\n", 13),
    "a CUDA 12 torch": ("__version__ = '2.11.0+cu129'\ncuda: Optional[str] = '12.9'\n", 12),
    "an older one": ("cuda = '12.1'\n", 12),
    "for the CPU": ("cuda: Optional[str] = None\n", None),
    "for AMD": ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n", None),
    "nothing": ("", None),
}


@pytest.mark.parametrize(("text", "major"), VERSION_FILES.values(), ids=VERSION_FILES)
def test_cuda_of_torch_is_read_from_its_version_file(text: str, major: int | None) -> None:
    assert gpu_trial.cuda_major_in(text) == major


def test_torch_is_not_imported_to_know() -> None:
    code = "import sys, deltaserve.transports.nixl.kind as k; print(k.KIND.packages, 'torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.rstrip().endswith("False")


@pytest.mark.parametrize(
    ("major", "packages", "install"),
    [
        (None, ("nixl-cu12", "nixl-cu13"), "pip install nixl-cu12"),
        (12, ("nixl-cu12",), "pip install nixl-cu12, the build for torch's CUDA 12"),
        (13, ("nixl-cu13",), "pip install nixl-cu13, the build for torch's CUDA 13"),
    ],
)
def test_the_build_that_fits(major: int | None, packages: tuple[str, ...], install: str) -> None:
    assert library.fitting_packages(major) == packages
    assert library.how_to_install(major) == install


@pytest.mark.parametrize(
    ("major", "installed", "loaded"),
    [
        (None, ["nixl_cu12"], "nixl_cu12"),
        (None, ["nixl_cu13"], "nixl_cu13"),
        (None, ["nixl_cu12", "nixl_cu13"], "nixl_cu12"),
        (12, ["nixl_cu12", "nixl_cu13"], "nixl_cu12"),
        (13, ["nixl_cu12", "nixl_cu13"], "nixl_cu13"),
    ],
)
def test_the_build_that_fits_is_loaded(
    major: int | None, installed: list[str], loaded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages of these names in a folder of their own, which say who they are."""
    for name in installed:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "_bindings.py").write_text("WHO = __name__\n")
    code = (
        "import deltaserve.transports.nixl.library as library\n"
        f"library.cuda_major = lambda: {major}\n"
        "print(library.load_bindings().WHO, library.runtime_in_use())"
    )
    path = [str(tmp_path), *filter(None, sys.path)]
    monkeypatch.setenv("PYTHONPATH", ":".join(path))
    if "nixl_cu12" not in installed:  # this environment has it
        code = f"import sys; sys.path = [p for p in sys.path if 'site-packages' not in p]\n{code}"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert told == [f"{loaded}._bindings", f"libcudart.so.{loaded[-2:]}"]


def test_a_build_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "cuda_major", lambda: 99)
    with pytest.raises(ModuleNotFoundError, match="nixl_cu99"):
        library.load_bindings()


def test_a_runtime_that_ucx_asks_for_and_does_not_find_is_named() -> None:
    assert gpu_check.lacking("libc.so.6") is None
    said = gpu_check.lacking("libcudart.so.99")
    assert said is not None and said.startswith("UCX's part for GPUs asks for libcudart.so.99, which is not found")
    assert "nvidia-cuda-runtime-cu99" in said
