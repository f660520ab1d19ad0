"""Random batches and rows through the native library under AddressSanitizer and UBSan, on all instruction sets here and
on emulated tile registers."""

import subprocess
from pathlib import Path

import pytest

from deltaserve.native.compile_library import (
    EMULATED_TILES,
    FLAGS,
    LIBRARY_NAME,
    SOURCES,
    CannotCompile,
    compile_library,
    find_compiler,
)
from tests.native.native_build import compiled_library

# Of UBSan what the compiler checks in reasonable time: pointers that are null or not aligned cost it minutes.
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize=null,alignment,object-size,vptr")
CHECKED = (*SANITIZERS, "-fno-sanitize-recover=all", "-g1", "-O1")
DRIVERS = tuple(Path(__file__).parent / name for name in ("fuzz_attention.cpp", "fuzz_step_ops.cpp"))


UNLIMITED = ("sh", "-c", 'ulimit -S -d "$(ulimit -H -d)"; exec "$@"', "sh")
"""AddressSanitizer reserves more memory than tests may have (tests/conftest.py), and uses little of it."""


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*UNLIMITED, *command], capture_output=True, text=True, check=False)


def build(source: Path, program: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return run([*find_compiler(), *FLAGS, "-I", str(SOURCES), str(source), *more, "-o", str(program)])


@pytest.mark.parametrize("driver", DRIVERS, ids=lambda driver: driver.stem)
def test_against_plain_arithmetic(driver: Path, tmp_path: Path) -> None:
    compiled_library()
    library, program = SOURCES / LIBRARY_NAME, tmp_path / "fuzz"
    built = build(driver, program, str(library), f"-Wl,-rpath,{SOURCES}")
    assert not built.returncode, built.stderr
    done = run([str(program), "40"])
    assert (done.returncode, done.stdout) == (0, "40 batches\n"), done.stderr


@pytest.mark.timeout(3000)
def test_no_step_beyond_an_array(tmp_path: Path) -> None:
    (tmp_path / "nothing.cpp").write_text("int main() { return 0; }\n")
    try:
        built = build(tmp_path / "nothing.cpp", tmp_path / "nothing", *CHECKED)
    except CannotCompile as error:
        pytest.skip(str(error))
    if built.returncode or run([str(tmp_path / "nothing")]).returncode:
        pytest.skip("programs with AddressSanitizer and UBSan do not build or run here")
    compile_library(tmp_path / LIBRARY_NAME, (*CHECKED, EMULATED_TILES))
    for driver in DRIVERS:
        program = tmp_path / driver.stem
        built = build(driver, program, *CHECKED, str(tmp_path / LIBRARY_NAME), f"-Wl,-rpath,{tmp_path}")
        assert not built.returncode, built.stderr
        done = run([str(program), "30"])
        assert (done.returncode, done.stdout) == (0, "30 batches\n"), done.stderr[-4000:]
