"""Which build of NIXL fits: there is one for each major version of CUDA, and UCX in it asks for that version's runtime.

With another one than torch's, UCX takes memory of a GPU for the host's, and registers none. A torch for the CPU alone
has no version: there any build moves the host's memory.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from deltaserve.transports.gpu_trial import cuda_major

_BUILDS = ("nixl-cu12", "nixl-cu13")


def fitting_packages(major: int | None) -> tuple[str, ...]:
    """Packages of which one is enough, beside a torch of that version of CUDA."""
    return _BUILDS if major is None else (f"nixl-cu{major}",)


def how_to_install(major: int | None) -> str:
    wanted = fitting_packages(major)[0]
    return f"pip install {wanted}" + ("" if major is None else f", the build for torch's CUDA {major}")


def load_bindings() -> Any:
    """The library. Raises whatever it raises that is missing, broken, or of another version."""
    return import_module(f"{_module_in_use()}._bindings")


def runtime_in_use() -> str:
    """The library of CUDA that UCX's part for GPUs asks for."""
    return f"libcudart.so.{_module_in_use().removeprefix('nixl_cu')}"


def _module_in_use() -> str:
    modules = [package.replace("-", "_") for package in fitting_packages(cuda_major())]
    return next((name for name in modules if find_spec(name) is not None), modules[0])
