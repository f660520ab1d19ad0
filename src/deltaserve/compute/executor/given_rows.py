"""Rows of a recorded step of which the host tells all: where each stands, how many positions it computes, and its
tokens. One copy for each step; what shares pages is told beside it where anything does.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from deltaserve.compute.attention.attention import StepAttention, StepStates
from deltaserve.compute.attention.fixed_step import FixedStep, RowsOnDevice, RowsToCome
from deltaserve.compute.attention.scratch_limits import MAX_TILED_LEN
from deltaserve.compute.executor.resident_rows import Int64s, ResidentRows
from deltaserve.compute.memory.host_arrays import write_over
from deltaserve.core.errors import StateError

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
        self._room = room
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

    def tell(self, rows: RowsToCome, tokens: Int64s) -> None:
        """Tell the device of the step to come: `tokens` [T] of its rows."""
        num_rows, num_tokens = len(rows.lines), len(tokens)
        assert num_rows <= self._room and num_tokens <= self._room, f"{num_rows} rows, {num_tokens} of {self._room}"
        packed = np.zeros(self._memory.shape, np.int64)
        packed[_LINES] = self._nobody
        for field, values in ((_LINES, rows.lines), (_STARTS, rows.ends - rows.lens), (_LENS, rows.lens)):
            packed[field, :num_rows] = values
        packed[_TOKENS, :num_tokens] = tokens
        packed[_POSITIONS, :num_tokens] = rows.positions()
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

    def __init__(self, resident: ResidentRows, room: int, make: MakeFixedStep, max_keys: int) -> None:
        """`make`, `max_keys`: see FixedStepBackend."""
        self.rows = GivenRows(resident, room)
        self._make = make
        self._max_keys = max_keys
        self._fixed: FixedStep | None = None
        self._may_share = False
        """Whether what the device knows of shared runs may be more than nothing."""

    @property
    def attention(self) -> Sequence[StepAttention]:
        assert self._fixed is not None
        return self._fixed.attention

    @property
    def states(self) -> Sequence[StepStates]:
        assert self._fixed is not None
        return self._fixed.states

    def has_room(self, rows: RowsToCome) -> bool:
        """Whether there is room for the step to come; the device is told what its rows share. Raises StateError where
        a row is longer than page tables are: the device would write what the next row's line says."""
        if int(rows.ends.max(initial=0)) > self._max_keys:
            raise StateError(f"a row of {rows.ends.max()} positions, in page tables for {self._max_keys}")
        fixed = self._fixed
        if fixed is None or not fixed.holds(rows.ends, rows.lens):
            return False
        if rows.shared or self._may_share:
            self._may_share = True
            if not fixed.share(rows):
                return False
            self._may_share = bool(rows.shared)
        return True

    def make_room(self, rows: RowsToCome) -> None:
        """Have room for the step to come, too. What was recorded before is of no use."""
        fixed = self._fixed
        self._fixed = self._make(self.rows.on_device, rows) if fixed is None else fixed.widened(rows)
        self._may_share = bool(rows.shared)

    def plan(self) -> None:
        """Have the device make the work list. Recorded before `attention` and `states` are used."""
        assert self._fixed is not None
        self.rows.place()
        self._fixed.plan()
