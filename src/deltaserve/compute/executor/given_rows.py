"""Rows of a recorded step of which the host tells all: where each stands, how many positions it computes, and its
tokens. One copy for each step; what shares pages is told beside it where anything does.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from deltaserve.compute.attention.attention import Batch, StepAttention, StepStates
from deltaserve.compute.attention.fixed_step import FixedStep, RowsOnDevice, RowsToCome
from deltaserve.compute.attention.scratch_limits import MAX_TILED_LEN
from deltaserve.compute.executor.resident_rows import Int64s, ResidentRows
from deltaserve.compute.memory.host_arrays import write_over

_LINES, _STARTS, _LENS, _TOKENS, _POSITIONS, _COUNTS, _NUM_FIELDS = range(7)
_ALIGNED = 2
"""Numbers to a multiple of which fields begin: kernels are compiled for addresses at 16 bytes."""
_LEAST_WIDTH = 3 * _ALIGNED
"""Three counts stand in a field."""

MakeFixedStep = Callable[[RowsOnDevice, RowsToCome], FixedStep]


class GivenRows:
    """At most `room` tokens, on the device; of fewer rows than that, or as many."""

    def __init__(self, resident: ResidentRows, room: int) -> None:
        """`resident`: whose page tables they read."""
        own = resident.on_device(1)
        self._nobody = len(own.positions) - 1
        width = max(_LEAST_WIDTH, -(-room // _ALIGNED) * _ALIGNED)
        self._memory = torch.zeros((_NUM_FIELDS, width), dtype=torch.int64, device=own.lines.device)
        self.tokens, self.positions = self._memory[_TOKENS, :room], self._memory[_POSITIONS, :room]  # [room]
        self._starts = self._memory[_STARTS, :room]
        counts = self._memory[_COUNTS].view(torch.int32)[:: 2 * _ALIGNED]
        self.on_device = RowsOnDevice(
            lines=self._memory[_LINES, :room],
            num_rows=counts[:1],
            num_stored=counts[1:2],
            positions=torch.zeros_like(own.positions),
            lens=self._memory[_LENS, :room],
            num_tokens=counts[2:3],
            most_len=MAX_TILED_LEN,
            tables=own.tables,
        )

    def tell(self, batch: Batch, tokens: Int64s) -> None:
        """Tell the device of the step to come: `tokens` [T] of its rows."""
        packed = np.zeros(self._memory.shape, np.int64)
        packed[_LINES] = self._nobody
        num_rows, num_tokens = len(batch.queries), len(tokens)
        for field, name in ((_LINES, "line"), (_STARTS, "q_start"), (_LENS, "q_len")):
            packed[field, :num_rows] = [getattr(query, name) for query in batch.queries]
        packed[_TOKENS, :num_tokens] = tokens
        packed[_POSITIONS, :num_tokens] = batch.positions() if num_tokens else 0
        counts = packed[_COUNTS].view(np.int32)[:: 2 * _ALIGNED]
        counts[:3] = num_rows, num_rows, num_tokens
        write_over(self._memory, packed)

    def place(self) -> None:
        """Have the device put its rows where the work list is made from."""
        self.on_device.positions.index_copy_(0, self.on_device.lines, self._starts)

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Within, no recurrent state is stored: see ResidentRows.standing."""
        rows = self.on_device
        rows.num_stored.zero_()
        try:
            yield
        finally:
            rows.num_stored.copy_(rows.num_rows)


class GivenStep:
    """Such rows and their attention."""

    def __init__(self, resident: ResidentRows, room: int, make: MakeFixedStep) -> None:
        """`make`: see FixedStepBackend."""
        self.rows = GivenRows(resident, room)
        self._make = make
        self._fixed: FixedStep | None = None
        self._has_shared = False

    @property
    def attention(self) -> Sequence[StepAttention]:
        assert self._fixed is not None
        return self._fixed.attention

    @property
    def states(self) -> Sequence[StepStates]:
        assert self._fixed is not None
        return self._fixed.states

    def prepare(self, batch: Batch, tokens: Int64s) -> bool:
        """Tell the device of the step to come: `tokens` [T] of its rows. False: it needs more room than there was, and
        what was recorded with it is of no use."""
        fits = self._fits(_to_come(batch))
        self.rows.tell(batch, tokens)
        return fits

    def _fits(self, rows: RowsToCome) -> bool:
        fixed, tells_shared = self._fixed, bool(rows.shared) or self._has_shared
        fits = fixed is not None and fixed.holds(rows.ends, rows.lens) and (not tells_shared or fixed.share(rows))
        if not fits:
            self._fixed = self._make(self.rows.on_device, rows)
        self._has_shared = bool(rows.shared)
        return fits

    def plan(self) -> None:
        """Have the device make the work list. Recorded before `attention` and `states` are used."""
        assert self._fixed is not None
        self.rows.place()
        self._fixed.plan()


def _to_come(batch: Batch) -> RowsToCome:
    columns = np.array([(query.line, query.q_end, query.q_len) for query in batch.queries], np.int64).reshape(-1, 3)
    return RowsToCome(columns[:, 0], columns[:, 1], columns[:, 2], batch.shared, batch.split_tokens)
