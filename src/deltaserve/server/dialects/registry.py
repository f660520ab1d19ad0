"""The dialects that are served: a line for each, in the order of the API's description."""

from importlib import import_module
from typing import Any

from deltaserve.server.dialect import Dialect

NAMES = (
    "completions",
    "chat",
    "generate",
)
"""Names of modules beside this one."""


def _dialect(name: str) -> Dialect[Any]:
    found = import_module(f"{__package__}.{name}").DIALECT
    assert isinstance(found, Dialect)
    return found


DIALECTS = tuple(map(_dialect, NAMES))
