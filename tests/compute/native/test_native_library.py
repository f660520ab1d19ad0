"""The library is made of this tree's sources, runs what this machine can, and says why where it cannot be had."""

import shutil
from pathlib import Path

import pytest

from deltaserve.compute.native import compile_library
from deltaserve.compute.native.compile_library import CannotCompile, is_current, sources_digest
from deltaserve.compute.native.native_library import NativeLibrary, NativeUnavailable
from tests.compute.native.native_build import compiled_library


def test_it_runs_the_general_path_everywhere_and_knows_its_sources() -> None:
    library = compiled_library()
    assert library.instruction_sets[0].name == "generic"
    assert library.functions.ds_isa_name(len(compile_library.KERNEL_FLAGS["x86_64"])) is None
    assert library.functions.ds_isa_name(-1) is None


def test_without_a_compiler_the_reason_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CannotCompile, match="no C\\+\\+ compiler"):
        compile_library.compile_library(tmp_path / "x.so")
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(CannotCompile, match="no-such-compiler"):
        compile_library.compile_library(tmp_path / "x.so")
    assert not list(tmp_path.iterdir())


def test_what_the_compiler_says_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.cpp").write_text("this is not C++")
    monkeypatch.setattr(compile_library, "SOURCES", tmp_path)
    try:
        compile_library.find_compiler()
    except CannotCompile as error:
        pytest.skip(str(error))
    with pytest.raises(CannotCompile, match="error"):
        compile_library.compile_library(tmp_path / "x.so")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.cpp"]


def test_a_missing_a_broken_and_a_stale_library_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NativeUnavailable, match="not compiled"):
        NativeLibrary(tmp_path / "none.so")
    (tmp_path / "broken.so").write_bytes(b"no library")
    with pytest.raises(NativeUnavailable, match="does not load"):
        NativeLibrary(tmp_path / "broken.so")
    made = Path(compiled_library().functions._name)
    assert is_current(made)
    sources = tmp_path / "sources"
    shutil.copytree(compile_library.SOURCES, sources)
    (sources / "cpu.cpp").write_text("// changed")
    monkeypatch.setattr(compile_library, "SOURCES", sources)
    assert not is_current(made)
    with pytest.raises(NativeUnavailable, match="other sources"):
        NativeLibrary(made)


def test_without_sources_any_library_that_is_installed_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Path(compiled_library().functions._name)
    monkeypatch.setattr(compile_library, "SOURCES", tmp_path)
    assert sources_digest() is None
    assert NativeLibrary(made).instruction_sets
