"""What the rounding of a computed position depends on."""

from enum import Enum


class Rounding(Enum):
    """Never on what else a step computes; and beside that:"""

    OF_QUERY = "query"
    """On how many positions of its request are computed with it. Faster: prompts have an arithmetic of their own."""
    OF_POSITION = "position"
    """On nothing but what comes before it: a prompt has the same bits in other chunks, behind a cached prefix and token
    by token."""
