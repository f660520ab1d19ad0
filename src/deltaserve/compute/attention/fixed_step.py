"""The seam for decode steps of which nothing but the contents of buffers differs from one to the next: what the device
was told to compute for one of them is recorded, and repeated for another.

The device has the rows of a step, and so also makes its work list: the host says which rows read what together when
that changes, and nothing otherwise. Rows compute one position each, or a few: a token and guesses behind it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from deltaserve.compute.attention.attention import Batch, Shared, StepAttention, StepStates


@dataclass(frozen=True, slots=True)
class RowsOnDevice:
    """The rows of a step of B tokens, where the device reads them when it computes the step: at most B of them, whose
    tokens stand one row after the other, the first ones of the B."""

    lines: Tensor  # [B] int64: lines of the page tables; those beyond the step's rows name a line that nobody has
    num_rows: Tensor  # [1] int32: rows of the step, the first ones of `lines`
    num_stored: Tensor  # [1] int32: those whose recurrent states are stored: all, or none, see ResidentRows.standing
    positions: Tensor  # [lines] int64: the first position that a line's row computes next
    lens: Tensor  # [B] int64: positions that each of `lines` computes
    num_tokens: Tensor  # [1] int32: tokens of the step
    most_len: int
    """Positions of a row, at most: 1, or MAX_TILED_LEN."""
    tables: Sequence[Tensor]  # [lines, pages] int32 of each pool


@dataclass(frozen=True, slots=True)
class RowsToCome:
    """What the host knows of a step's rows before the device computes it."""

    lines: npt.NDArray[np.int64]  # [n]
    ends: npt.NDArray[np.int64]  # [n] keys of each row, with those that it computes
    lens: npt.NDArray[np.int64]  # [n] positions that it computes
    shared: tuple[Shared, ...]
    split_tokens: int

    @classmethod
    def of(cls, batch: Batch) -> "RowsToCome":
        columns = np.array([(query.line, query.q_end, query.q_len) for query in batch.queries], np.int64).reshape(-1, 3)
        return cls(columns[:, 0], columns[:, 1], columns[:, 2], batch.shared, batch.split_tokens)

    def positions(self) -> npt.NDArray[np.int64]:
        """[T] of its tokens, row after row"""
        return np.repeat(self.ends - self.lens.cumsum(), self.lens) + np.arange(self.lens.sum())


class FixedStep(Protocol):
    """Attention of one step of decoding rows after the other, by the same objects."""

    @property
    def attention(self) -> Sequence[StepAttention]:
        """What `AttentionBackend.begin_step` returns, for as many tokens as there is room for. Those that a step does
        not have write nothing, and attention gives 0 for them."""
        ...

    @property
    def states(self) -> Sequence[StepStates]:
        """What `AttentionBackend.begin_states` returns, for as many rows of one position each: those that a step does
        not have read zeros and store nothing."""
        ...

    @property
    def shared_tokens(self) -> int:
        """Positions that the step does not read again because of sharing."""
        ...

    def plan(self) -> None:
        """Have the device make the work list of the rows as it finds them then, and find their states. Recorded before
        `attention` and `states` are used."""
        ...

    def holds(self, ends: npt.NDArray[np.int64], lens: npt.NDArray[np.int64]) -> bool:
        """Whether there is room for rows with so many keys and positions, [n] each as of `RowsToCome`."""
        ...

    def share(self, rows: RowsToCome) -> bool:
        """Who reads what together in the steps from now on. False: it needs more room than there is, and nothing has
        changed."""
        ...

    def widened(self, rows: RowsToCome) -> "FixedStep":
        """One in its place, with its room and with room for as much work as `rows` have. So steps that need much of
        one thing and steps that need much of another fit in the same before long."""
        ...


class FixedStepBackend(ABC):
    """An AttentionBackend that has such steps."""

    @property
    @abstractmethod
    def max_keys(self) -> int:
        """Keys of a row, at most: what page tables have room for. The device does not check it."""

    @abstractmethod
    def fixed_step(self, on_device: RowsOnDevice, rows: RowsToCome) -> FixedStep:
        """With room for all tokens of `on_device`, and for as much work as `rows` have, at least. Of all page groups
        but that of a draft head, which is the last."""

    @abstractmethod
    def fixed_group(self, on_device: RowsOnDevice, rows: RowsToCome, group: int) -> FixedStep:
        """The same of the page group of this index alone, and of no states."""
