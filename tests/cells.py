"""Cells of a matrix, the further ones marked wide (pyproject.toml)."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def cells(cases: Iterable[tuple[Any, ...]], is_wide: Callable[..., bool]) -> list[object]:
    """`is_wide` takes the values of a case, which its id names."""
    return [
        pytest.param(*case, marks=pytest.mark.wide if is_wide(*case) else (), id="-".join(map(_name, case)))
        for case in cases
    ]


def _name(value: object) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)
