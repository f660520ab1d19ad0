"""Runs sglang.bench_serving without torchvision: `python -m tools.clients.run_sglang FLAGS`.

sglang imports torchvision for images, which no check here sends. Its builds on the package index are for CUDA: beside a
torch for CPUs they do not load. So sglang, unmodified, finds empty modules of that name.
"""

import runpy
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import datasets
import transformers

_ABSENT = "torchvision"


class _Empty(ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _EmptyModules(MetaPathFinder, Loader):
    """Finds `torchvision` and what is in it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == _ABSENT else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it."""


def main() -> None:
    """transformers and datasets use torchvision if there is one: they look, and remember, before it seems so."""
    assert not datasets.config.TORCHVISION_AVAILABLE
    assert not transformers.utils.is_torchvision_available()
    sys.meta_path.append(_EmptyModules())
    runpy.run_module("sglang.bench_serving", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
