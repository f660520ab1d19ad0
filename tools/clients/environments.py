"""Environments of clients, one folder each: made, brought up to date, and asked for versions."""

import json
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import assert_never

from tools.clients.catalogue import Client, Runtime
from tools.clients.serving import ROOT
from tools.clients.with_chromium import find_chromium

_CPU_TORCH = "https://download.pytorch.org/whl/cpu"


def missing_program(client: Client) -> str | None:
    """What the system would have to have for it, where it has not."""
    match client.runtime:
        case Runtime.PYTHON:
            return None
        case Runtime.NODE:
            return None if shutil.which("npm") else "npm"
        case Runtime.SYSTEM:
            return None if find_chromium() else "Chromium (Debian's chromium-headless-shell)"
        case _:
            assert_never(client.runtime)


@dataclass(frozen=True, slots=True)
class Environment:
    """One client's folder."""

    name: str
    client: Client
    folder: Path

    @property
    def _python(self) -> str:
        return sys.executable if self.client.runtime is Runtime.SYSTEM else str(self.folder / "bin" / "python")

    @property
    def program(self) -> list[str]:
        """The start of the command line that runs the checks."""
        if self.client.runtime is Runtime.NODE:
            return ["node", f"with_{self.name}.mjs"]
        return [self._python, "-m", f"tools.clients.with_{self.name.replace('-', '_')}"]

    @property
    def working_folder(self) -> Path:
        """Where it is run."""
        return self.folder if self.client.runtime is Runtime.NODE else ROOT

    def install(self) -> None:
        """The newest versions. Raises subprocess.CalledProcessError."""
        match self.client.runtime:
            case Runtime.PYTHON:
                self._install_python()
            case Runtime.NODE:
                self._install_node()
            case Runtime.SYSTEM:
                pass
            case _:
                assert_never(self.client.runtime)

    def versions(self) -> str:
        """As the table shows them."""
        shown = self.client.shown
        match self.client.runtime:
            case Runtime.PYTHON:
                code = f"from importlib.metadata import version; print(version({shown[0]!r}))"
                return _printed([self._python, "-c", code])
            case Runtime.NODE:
                files = [self.folder / "node_modules" / package / "package.json" for package in shown]
                numbers = [json.loads(file.read_text())["version"] for file in files]
                return ", ".join(f"{package} {number}" for package, number in zip(shown, numbers, strict=True))
            case Runtime.SYSTEM:
                return _printed([find_chromium() or "", "--version"]).split()[1]
            case _:
                assert_never(self.client.runtime)

    def _install_node(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(__file__).with_name(f"with_{self.name}.mjs"), self.folder)
        packages = [f"{package}@latest" for package in self.client.packages]
        subprocess.run(["npm", "install", "--silent", "--no-audit", *packages], check=True, cwd=self.folder)

    def _install_python(self) -> None:
        if not (self.folder / "bin" / "python").exists():
            venv.create(self.folder, with_pip=True)
        held = self.folder / "held.txt"
        torch = _held_torch()
        held.write_text("".join(f"{line}\n" for line in torch))
        index = ["--extra-index-url", _CPU_TORCH] if self._needs_index(torch) else []
        pip = [self._python, "-m", "pip", "install", "--quiet", "--upgrade", "-c", str(held), *index]
        subprocess.run([*pip, *self.client.packages], check=True)
        if self.client.bare:
            subprocess.run([*pip, "--no-deps", *self.client.bare], check=True)

    def _needs_index(self, torch: list[str]) -> bool:
        """Whether pip does not find the build of torch for CPUs where it looks by itself."""
        held = next((line.partition("==")[2] for line in torch if line.endswith("+cpu")), None)
        return held is not None and held not in _printed([self._python, "-m", "pip", "index", "versions", "torch"])


def _held_torch() -> list[str]:
    """The versions of this environment: on a machine without a GPU the builds for CPUs, which are gigabytes smaller."""
    held = []
    for package in ("torch", "triton"):
        try:
            held.append(f"{package}=={version(package)}")
        except PackageNotFoundError:
            continue
    return held


def _printed(argv: list[str]) -> str:
    return subprocess.run(argv, check=False, capture_output=True, text=True).stdout.strip()
