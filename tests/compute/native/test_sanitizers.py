"""Random batches and rows through the native library under AddressSanitizer and UBSan, on all instruction sets here and
on emulated tile registers."""

import subprocess
from pathlib import Path

import pytest

from deltaserve.compute.native.compile_library import (
    EMULATED_TILES,
    FLAGS,
    LIBRARY_NAME,
    SOURCES,
    CannotCompile,
    compile_library,
    find_compiler,
    sources_digest,
)
from tests.compute.native.native_build import (
    BUILDS,
    EMULATED_AMX,
    ISAS,
    compiled_library,
    sets_here,
)
from tests.fixtures.cached import made_once

# Of UBSan what the compiler checks in reasonable time: pointers that are null or not aligned cost it minutes.
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize=null,alignment,object-size,vptr")
CHECKED = (*SANITIZERS, "-fno-sanitize-recover=all", "-g1", "-Og")
DRIVERS = tuple(Path(__file__).parent / name for name in ("fuzz_attention.cpp", "fuzz_step_ops.cpp"))


UNLIMITED = ("sh", "-c", 'ulimit -S -d "$(ulimit -H -d)"; exec "$@"', "sh")
"""AddressSanitizer reserves more memory than tests may have (tests/conftest.py), and uses little of it."""


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*UNLIMITED, *command], capture_output=True, text=True, check=False)


def build(source: Path, made: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return run([*find_compiler(), *FLAGS, "-I", str(SOURCES), str(source), *more, "-o", str(made)])


@pytest.fixture(params=DRIVERS, ids=lambda driver: driver.stem)
def program(request: pytest.FixtureRequest) -> Path:
    """A driver linked with the library of this tree, compiled when a source, a flag or the compiler changed."""
    compiled_library()
    driver: Path = request.param
    return _programs() / driver.stem


def _programs() -> Path:
    """The folder of what the drivers are compiled to, and of the programs."""
    return made_once(BUILDS / "fuzz", [*_made_of(), bytes(SOURCES)], _make_programs)


def _make_programs(folder: Path) -> None:
    for driver in DRIVERS:
        compiled = folder / f"{driver.stem}.o"
        library = (str(SOURCES / LIBRARY_NAME), f"-Wl,-rpath,{SOURCES}")
        for built in (build(driver, compiled, "-c"), build(compiled, folder / driver.stem, *library)):
            assert not built.returncode, built.stderr


def test_against_plain_arithmetic(program: Path) -> None:
    done = run([str(program), "40"])
    assert (done.returncode, done.stdout) == (0, "40 batches\n"), done.stderr


@pytest.fixture(scope="module")
def checked_programs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The drivers with a library under the sanitizers, compiled when a source, a flag or the compiler changed. Skips
    where those do not build or run.

    The drivers' own code is that of the programs without sanitizers: what it compares with takes most of the time, and
    the limits of its arrays, which are the allocator's, are seen by the library's code."""
    compiled_library()
    folder = tmp_path_factory.mktemp("sanitizers")
    (folder / "nothing.cpp").write_text("int main() { return 0; }\n")
    try:
        built = build(folder / "nothing.cpp", folder / "nothing", *CHECKED)
    except CannotCompile as error:
        pytest.skip(str(error))
    if built.returncode or run([str(folder / "nothing")]).returncode:
        pytest.skip("programs with AddressSanitizer and UBSan do not build or run here")
    kept = made_once(BUILDS / "sanitizers", [*_made_of(), *map(str.encode, _unused())], _make_checked_programs)
    return [kept / driver.stem for driver in DRIVERS]


def _made_of() -> list[bytes]:
    digest = sources_digest()
    assert digest is not None
    version = run([*find_compiler(), "-v"]).stderr
    texts = (digest, version, *FLAGS, *CHECKED, Path(__file__).read_text(), *(path.read_text() for path in DRIVERS))
    return [text.encode() for text in texts]


def _unused() -> tuple[str, ...]:
    """Instruction sets of which the drivers call nothing here, though what they call may be of a less capable one."""
    here = sets_here()
    return tuple(name for name in ISAS if name not in here and not (name == "amx_bf16" and EMULATED_AMX in here))


def _make_checked_programs(folder: Path) -> None:
    compile_library(folder / LIBRARY_NAME, (*CHECKED, EMULATED_TILES), _unused())
    for driver in DRIVERS:
        beside = (f"-L{folder}", f"-l:{LIBRARY_NAME}", "-Wl,-rpath,$ORIGIN")
        built = build(_programs() / f"{driver.stem}.o", folder / driver.stem, *CHECKED, *beside)
        assert not built.returncode, built.stderr


def test_no_step_beyond_an_array(checked_programs: list[Path]) -> None:
    """Plain attention, which takes most of the time, has been compared with these batches above; emulated tiles also
    by tests/compute/attention/test_native_attention.py."""
    for program in checked_programs:
        done = run([str(program), "30", "0", "3"])
        assert (done.returncode, done.stdout) == (0, "30 batches\n"), done.stderr[-4000:]
