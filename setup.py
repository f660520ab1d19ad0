"""What pyproject.toml cannot say: the native library is compiled and the demo's model is packed when a wheel is built.

The library knows no version of Python or torch, so one wheel of a platform serves all. It is not a setuptools
Extension: those bear the name of one Python, and are compiled with one set of flags.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("src/deltaserve/compute/native")
DEMO_MODEL = Path("models/recall-micro")


class CompileAndPack(build_py):  # type: ignore[misc]
    """The library is compiled beside its sources, from where package data takes it and an editable install uses it. The
    model stays in the tree, where README's commands name it; a wheel holds it below `deltaserve/packed`."""

    def run(self) -> None:
        _compile_library()
        super().run()
        if not self.editable_mode:
            packed = Path(self.build_lib, "deltaserve", "packed", DEMO_MODEL)
            shutil.copytree(DEMO_MODEL, packed, dirs_exist_ok=True)


def _compile_library() -> None:
    """It takes one to two minutes of two cores; `pip -v` and `python -m build` show these lines."""
    started = time.monotonic()
    compiler = subprocess.Popen([sys.executable, str(NATIVE / "compile_library.py")])
    while True:
        try:
            compiler.wait(10.0)
            return
        except subprocess.TimeoutExpired:
            print(f"compiling the native library: {time.monotonic() - started:.0f} s so far", flush=True)


class WithLibrary(Distribution):  # type: ignore[misc]
    """Of one platform: it is installed where such packages are, or no tool takes the library in it for one."""

    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):  # type: ignore[misc]
    """Of any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(distclass=WithLibrary, cmdclass={"build_py": CompileAndPack, "bdist_wheel": PlatformWheel})
