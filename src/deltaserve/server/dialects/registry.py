"""The dialects that are served: those of core/branches.py."""

from importlib import import_module
from typing import Any

from deltaserve.core.branches import DIALECTS as BRANCHES
from deltaserve.server.dialect import Dialect


def _dialect(module: str) -> Dialect[Any]:
    found = import_module(module).DIALECT
    assert isinstance(found, Dialect)
    return found


DIALECTS = tuple(_dialect(branch.module) for branch in BRANCHES.values())
