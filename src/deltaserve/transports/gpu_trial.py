"""Whether a way to move bytes takes memory of a GPU here: tried in a process of its own, which may load torch."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_CUDA = re.compile(r"^cuda\b.*=\s*['\"](\d+)", re.MULTILINE)
"""In torch/version.py: cuda: Optional[str] = '13.0'"""
_LIMIT_S = 120.0
"""Torch is imported, and a kernel compiled."""


@cache
def cuda_major() -> int | None:
    """Major version of the CUDA that torch was built for, without importing torch; None: it is for the CPU, or not
    there."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    try:
        text = (Path(torch.origin).parent / "version.py").read_text()
    except OSError:
        return None
    return cuda_major_in(text)


def cuda_major_in(version_file: str) -> int | None:
    """The same, by what torch's version.py says."""
    found = _CUDA.search(version_file)
    return None if found is None else int(found[1])


def has_gpu() -> bool:
    """Whether there is a GPU that torch here could compute on."""
    return cuda_major() is not None and Path("/dev/nvidiactl").exists()


def gpu_problem(module: str, environment: Mapping[str, str], *arguments: str) -> str | None:
    """What `python -m MODULE ARGUMENTS` says that is wrong, in a line; None: nothing. It exits with 0 then."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            env={**os.environ, **environment},
        )
    except subprocess.TimeoutExpired:
        return f"it did not answer within {_LIMIT_S:.0f} s"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return None if done.returncode == 0 else (lines[-1] if lines else f"it ended with {done.returncode}")
