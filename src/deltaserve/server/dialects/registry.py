"""The dialects that are served: those of core/branches.py."""

from typing import Any

from deltaserve.core.branches import DIALECTS as BRANCHES
from deltaserve.core.branches import Branch
from deltaserve.core.files.branch_code import load_branch
from deltaserve.server.dialect import Dialect


def _dialect(branch: Branch) -> Dialect[Any]:
    found = load_branch(branch).DIALECT
    assert isinstance(found, Dialect)
    return found


DIALECTS = tuple(_dialect(branch) for branch in BRANCHES.values())
