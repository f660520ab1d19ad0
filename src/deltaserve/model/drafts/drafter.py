"""Who guesses on the host, and what it is asked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from deltaserve.core.ids import RowId


@dataclass(frozen=True, slots=True)
class DraftAsk:
    """A row whose next tokens are to be guessed."""

    row: RowId
    tokens: npt.NDArray[np.int64]  # [n]
    """All tokens that are known, those just drawn included."""
    count: int
    """Most guesses."""


class Drafter(Protocol):
    """Who guesses on the host. Called on the rank that draws, once for each step, behind the draws."""

    def propose(self, asked: Sequence[DraftAsk]) -> list[bytes]:
        """Packed ids for each, none where it knows nothing."""
        ...
