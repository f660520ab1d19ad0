"""Which build of NIXL fits: there is one for each major version of CUDA, and UCX in it asks for that version's runtime.

With another one than torch's, UCX takes memory of a GPU for the host's, and registers none. A torch for the CPU alone
has no version: there any build moves the host's memory.
"""

import re
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_BUILDS = ("nixl-cu12", "nixl-cu13")
_CUDA = re.compile(r"^cuda\b.*=\s*['\"](\d+)", re.MULTILINE)
"""In torch/version.py: cuda: Optional[str] = '13.0'"""


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
    found = _CUDA.search(text)
    return None if found is None else int(found[1])


def fitting_packages(major: int | None) -> tuple[str, ...]:
    """Packages of which one is enough, beside a torch of that version of CUDA."""
    return _BUILDS if major is None else (f"nixl-cu{major}",)


def how_to_install(major: int | None) -> str:
    wanted = fitting_packages(major)[0]
    return f"pip install {wanted}" + ("" if major is None else f", the build for torch's CUDA {major}")


def load_bindings() -> Any:
    """The library. Raises whatever it raises that is missing, broken, or of another version."""
    modules = [package.replace("-", "_") for package in fitting_packages(cuda_major())]
    there = next((name for name in modules if find_spec(name) is not None), modules[0])
    return import_module(f"{there}._bindings")
