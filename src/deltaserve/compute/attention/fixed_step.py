"""The seam for steps of which nothing but the contents of buffers differs from one to the next: what the device was
told to compute for one of them can be recorded, and repeated for another."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from deltaserve.compute.attention.attention import Batch, StepAttention


class FixedStep(Protocol):
    """Attention of one step of decoding rows after the other, by the same objects."""

    @property
    def attention(self) -> Sequence[StepAttention]:
        """What `AttentionBackend.begin_step` returns, for as many tokens as there is room for. Those that a step does
        not have write nothing, and attention gives 0 for them."""
        ...

    def fill(self, batch: Batch) -> bool:
        """Queries of one position each: the next step, for what the device is given from now on. Page tables are read
        now. False: it needs more room than there is, and nothing has changed."""
        ...


class FixedStepBackend(ABC):
    """An AttentionBackend that has such steps."""

    @abstractmethod
    def fixed_step(self, batch: Batch, num_rows: int) -> FixedStep:
        """Filled with `batch`, with room for so many rows and for as much work as it has, at least."""
