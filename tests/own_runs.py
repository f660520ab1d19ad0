"""Runs of pytest that a test looks at from outside."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]


def run_of(folder: Path, files: Mapping[str, str], *options: str) -> "subprocess.CompletedProcess[str]":
    """A run over these files, by name, which are written to the folder and may import deltaserve and tests."""
    for name, text in files.items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis"]
    return subprocess.run(
        [*command, *options, "--rootdir", str(folder)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
    )
