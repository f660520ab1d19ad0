"""Compiles the native library beside its sources: `python -m deltaserve.compute.native.compile_library [--output F]`.

Uses the standard library only and is run by setup.py before anything else is installed. Where nothing can compile, it
says so and succeeds: everything works without the library, by torch alone.

A kernel file is compiled once for each instruction set, with the compiler's flags for it, so that vector types have
their real width everywhere in it. Such a file holds no inline function of a C++ header: the linker keeps one copy of
those, perhaps the one that only some machines can run.
"""

import argparse
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
LIBRARY_NAME = "libdeltaserve_native.so"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra")
AVX512_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c")
KERNEL_FLAGS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "x86_64": {
        "generic": (),
        "avx2": ("-mavx2", "-mfma", "-mf16c"),
        "avx512": AVX512_FLAGS,
        "avx512_vnni": (*AVX512_FLAGS, "-mavx512vnni"),
        "avx512_bf16": (*AVX512_FLAGS, "-mavx512bf16"),
        "amx_bf16": (*AVX512_FLAGS, "-mavx512bf16", "-DDELTASERVE_TILES"),
    },
    "aarch64": {"generic": ()},
}
"""Machine -> instruction set -> flags. cpu.cpp says which of them a machine can run."""
LEFT_OUT: Mapping[str, Sequence[str]] = {
    "attention_kernel": ("avx512_vnni",),
    "blocks_kernel": ("avx512_bf16", "amx_bf16"),
    "delta_rule_kernel": ("avx512_vnni", "avx512_bf16", "amx_bf16"),
    "product_kernel": ("avx512_vnni",),
    "step_ops_kernel": ("avx512_vnni", "amx_bf16"),
}
"""Kernel file -> instruction sets that bring nothing for it; of a file that is not here each brings something."""
EMULATED_TILES = "-DDELTASERVE_EMULATED_TILES"
"""A flag for tests: amx_bf16 runs wherever avx512_bf16 does (tiles.h)."""


class CannotCompile(Exception):
    """What is missing, or what the compiler said."""


def sources_digest() -> str | None:
    """Digest of all that the library is made of; None where the sources are not installed."""
    files = sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"), Path(__file__)])
    if not any(file.suffix == ".cpp" for file in files):
        return None
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:32]


def find_compiler() -> list[str]:
    """$CXX or the usual names. Raises CannotCompile."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]) is not None:
            return command
    raise CannotCompile(f"no C++ compiler: {' '.join(named) or 'c++, g++ or clang++'} not found")


def compile_library(target: Path, extra_flags: Sequence[str] = (), uncalled: Collection[str] = ()) -> None:
    """`target` appears at once, complete. `uncalled`: instruction sets that nobody chooses in this library; in their
    place stand kernels of another, which are compiled anyway. Raises CannotCompile."""
    machine = platform.machine()
    kernel_flags = KERNEL_FLAGS.get(machine)
    if kernel_flags is None or not sys.platform.startswith("linux"):
        raise CannotCompile(f"no kernels for {sys.platform} on {machine}")
    compiler = find_compiler()
    flags = [*FLAGS, *extra_flags, f'-DDELTASERVE_SOURCES="{sources_digest()}"']
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".compile-") as folder:
        jobs: list[list[str]] = []
        aliases: list[str] = []
        for source in sorted(SOURCES.glob("*.cpp")):
            if not source.stem.endswith("_kernel"):
                jobs.append([str(source), "-o", f"{folder}/{source.stem}.o"])
                continue
            sets = [name for name in kernel_flags if name not in LEFT_OUT.get(source.stem, ())]
            compiled = [name for name in sets if name not in uncalled] or sets
            for name in compiled:
                own = [f"-DDELTASERVE_ISA={name}", *kernel_flags[name]]
                jobs.append([*own, str(source), "-o", f"{folder}/{source.stem}.{name}.o"])
            kernels = source.stem.removesuffix("_kernel")
            aliases += [_alias(kernels, name, compiled[0]) for name in sets if name not in compiled]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda job: _run([*compiler, *flags, "-c", *job]), jobs))
        objects = [job[-1] for job in jobs]
        made = f"{folder}/{LIBRARY_NAME}"
        _run([*compiler, *flags, "-shared", *objects, *aliases, "-o", made])
        os.replace(made, target)


def _alias(kernels: str, name: str, other: str) -> str:
    """The linker's flag by which the kernels of one set are those of another."""
    symbols = (f"{kernels}_{isa}" for isa in (name, other))
    return "-Wl,--defsym=" + "=".join(f"_ZN10deltaserve{len(symbol)}{symbol}E" for symbol in symbols)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CannotCompile(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        raise CannotCompile(f"{shlex.join(command)}:\n{done.stderr[-4000:]}")


def is_current(target: Path) -> bool:
    """Made of these very sources."""
    digest = sources_digest()
    return digest is not None and target.exists() and digest.encode() in target.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=SOURCES / LIBRARY_NAME)
    target = parser.parse_args().output
    if is_current(target):
        print(f"native library: {target} is current")
        return
    try:
        compile_library(target)
    except CannotCompile as error:
        print(f"native library: not compiled, torch serves in its place. {error}")
        return
    print(f"native library: compiled {target}")


if __name__ == "__main__":
    main()
