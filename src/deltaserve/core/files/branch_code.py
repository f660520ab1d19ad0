"""The code of a branch, imported when it is asked for."""

from importlib import import_module
from types import ModuleType
from typing import Any

from deltaserve.core.branches import Branch


def load_branch(branch: Branch) -> Any:
    """The module of its entry. Raises ImportError."""
    return import_module(branch.module)


def load_half(branch: Branch, purpose: str) -> ModuleType | None:
    """Its module for a purpose. None: it has nothing of its own for it. Raises ImportError."""
    name = branch.halves.get(purpose)
    return None if name is None else import_module(name)
