"""Compiles the native library when the package is built or installed; pyproject.toml says everything else.

The library knows no version of Python or torch, so one wheel of a platform serves all. It is not a setuptools
Extension: those bear the name of one Python, and are compiled with one set of flags.
"""

import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("src/deltaserve/native")


class CompileNative(build_py):  # type: ignore[misc]
    """Beside the sources, from where package data takes it; an editable install uses it there."""

    def run(self) -> None:
        subprocess.run([sys.executable, str(NATIVE / "compile_library.py")], check=False)
        super().run()


class PlatformWheel(bdist_wheel):  # type: ignore[misc]
    """Of any Python 3, but of one platform if it holds the library."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": CompileNative, "bdist_wheel": PlatformWheel})
