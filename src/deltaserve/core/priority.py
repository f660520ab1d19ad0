"""How much sooner than others a request is to be taken, as its client says: a whole number, 0 where it says nothing."""

MAX_PRIORITY = 8
"""Priorities are told apart from minus this to this; a number beyond counts as the nearest."""


def clipped(priority: int) -> int:
    """The priority that a number given by a client counts as."""
    return max(-MAX_PRIORITY, min(MAX_PRIORITY, priority))
