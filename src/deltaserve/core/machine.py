"""State machines as tables: everything that may happen stands in one mapping, and nothing else may."""

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from deltaserve.core.errors import StateError

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)

Table = Mapping[S, Mapping[E, S]]
"""state |-> event |-> next state. A missing cell is illegal."""


def advance(table: Table[S, E], state: S, event: E, what: str) -> S:
    """The next state. Raises StateError naming `what`, event and state when the table has no such cell."""
    target = table[state].get(event)
    if target is None:
        raise StateError(f"{what}: {event.value} while {state.value}")
    return target
