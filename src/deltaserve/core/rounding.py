"""What the rounding of a computed position depends on."""

from enum import Enum


class Rounding(Enum):
    """What the rounding of a position depends on; it is never what else a step computes."""

    OF_QUERY = "query"
    """Rounding depends on how many positions of the request are computed together. Faster: prompts have kernels of
    their own."""
    OF_POSITION = "position"
    """Rounding depends on nothing but what comes before the position: a prompt has the same bits in other chunks,
    behind a cached prefix and token by token."""
