"""Decoding rows as the device keeps them between steps: where each stands, what it drew last, its pages and its rules.

A step that was recorded reads and advances them, so the host tells the device what changed and nothing else: rows that
take part for the first time, other rows than in the step before, new pages. That is one copy from pinned memory and a
launch for each kind of change; where the same rows go on, neither.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltaserve.compute.attention.attention import Shared
from deltaserve.compute.attention.fixed_step import RowsOnDevice, RowsToCome
from deltaserve.compute.executor.resident_adjustments import AdjustedRow, ResidentAdjustments
from deltaserve.compute.executor.row_rules import idle_rules
from deltaserve.compute.memory.host_arrays import on_device
from deltaserve.compute.memory.page_table import PageTable
from deltaserve.compute.memory.workspace import Workspace
from deltaserve.control.sched.plan import PageUpdate
from deltaserve.core.ids import PoolId, RowId

_UNKNOWN = -1
"""A position that no row has: it is told."""
_MOST_UPDATES = 4096
"""Updates of pages that are remembered for the device; with more it is told whole tables."""
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DecodingRows:
    """The rows of a decode step, one position each."""

    rows: tuple[RowId, ...]
    starts: Int64s  # [n] the position that each computes
    given: Mapping[RowId, int]
    """Input tokens that the host gives. That of another row is what the device drew for it last."""
    shared: tuple[Shared, ...]
    split_tokens: int
    adjusted: tuple[AdjustedRow, ...] = ()
    """Those of them whose logits are changed before a draw; () where the device knows what changes them."""

    def to_come(self) -> RowsToCome:
        lens = np.ones(len(self.rows), np.int64)
        return RowsToCome(np.array(self.rows, np.int64), self.starts + 1, lens, self.shared, self.split_tokens)


class _LineChange(NamedTuple):
    """New values of lines of a tensor on the device."""

    target: Tensor
    lines: Int64s  # [n]
    values: Int64s  # [n] or [n, width]


class ResidentRows:
    """For one thread. Whatever it tells the device holds for what the device is given from then on."""

    def __init__(self, tables: PageTable, num_pools: int, max_rows: int, device: torch.device) -> None:
        """`tables`: the host's, of lines 0 .. max_rows - 1. The device has one line more, which is nobody's."""
        self._of_host = [tables.table(PoolId(pool)) for pool in range(num_pools)]
        self._device = device
        self._max_rows, num_lines = max_rows, max_rows + 1
        self.last_drawn = torch.zeros(num_lines, dtype=torch.int64, device=device)  # [lines]
        self.positions = torch.zeros(num_lines, dtype=torch.int64, device=device)  # [lines] computed next
        self.rules = torch.from_numpy(idle_rules()).repeat(num_lines, 1).to(device)  # [lines, NUM_RULES]
        self._lines = torch.full((max_rows,), max_rows, dtype=torch.int64, device=device)  # of the step
        self._num_rows = torch.zeros(1, dtype=torch.int32, device=device)
        self.num_stored = torch.zeros_like(self._num_rows)  # as `RowsOnDevice.num_stored`
        self._lens = torch.ones_like(self._lines)
        self.adjustments = ResidentAdjustments(num_lines, device)
        self._tables = tuple(
            torch.zeros((num_lines, table.shape[1]), dtype=torch.int32, device=device) for table in self._of_host
        )
        self._scratch = Workspace(device)
        self._rows: tuple[RowId, ...] = ()
        """Rows of the last step that was told of."""
        self._index = np.zeros(0, np.int64)  # `_rows` as an array
        self._next = np.zeros(num_lines, np.int64)  # `positions`, once the device has done what it was given
        self._rules_of_host = np.tile(idle_rules(), (num_lines, 1))  # what `rules` are then
        self._new_rules: set[RowId] = set()
        self._new_pages: list[PageUpdate] = []
        self._knows_pages = True
        """Whether the device has all pages but the new ones."""

    def on_device(self, num_rows: int) -> RowsOnDevice:
        """Where the device finds the rows of a step of at most so many."""
        return RowsOnDevice(
            lines=self._lines[:num_rows],
            num_rows=self._num_rows,
            num_stored=self.num_stored,
            positions=self.positions,
            lens=self._lens[:num_rows],
            num_tokens=self._num_rows,
            most_len=1,
            tables=self._tables,
        )

    def float_logits(self, num_logits: int) -> Tensor:
        """[max_rows, num_logits] float32 with any content, the same memory for all recorded steps: only one of them is
        computed at a time. As large as it gets from the first on, since a step keeps what it was recorded with."""
        return self._scratch.take("logits", (self._max_rows, num_logits), torch.float32)

    def free_scratch(self) -> None:
        """No recorded step is left."""
        self._scratch.clear()

    def open(self, row: RowId, rules: Int64s) -> None:
        """Another request has the row; `rules` [NUM_RULES]."""
        self._rules_of_host[row] = rules
        self._new_rules.add(row)

    def write_pages(self, updates: Iterable[PageUpdate]) -> None:
        """The host's tables have new pages. The device is told before the next recorded step, which may never come."""
        if not self._knows_pages:
            return
        self._new_pages.extend(updates)
        if len(self._new_pages) > _MOST_UPDATES:
            self._forget_pages()

    def prepare(self, step: DecodingRows) -> None:
        """Tell the device what it needs to know for this step."""
        if step.rows != self._rows:
            self._rows, self._index = step.rows, np.array(step.rows, np.int64)
            lines = np.full(self._max_rows, self._max_rows, np.int64)
            lines[: len(self._index)] = self._index
            self._tell([*self._changes(step), _LineChange(self._lines, np.arange(self._max_rows), lines)])
            self._num_rows.fill_(len(step.rows))
            self.num_stored.fill_(len(step.rows))
        elif changes := self._changes(step):
            self._tell(changes)
        if step.adjusted:
            self.adjustments.bring_up(step.adjusted)

    def go_on(self) -> Int64s:
        """The step has the rows of the one before, each one position on. Returns [n] keys of each of them."""
        self.tell_pages()
        ends: Int64s = self._next[self._index] + 1
        return ends

    def tell_pages(self) -> None:
        """Tell the device of new pages."""
        if self._has_new_pages:
            self._tell(self._page_changes())

    def advance(self) -> None:
        """The device was given a step, in which each row draws a token."""
        self._next[self._index] += 1

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Within, the device may compute the step once or more, and its rows stay where they are: positions and last
        tokens are put back, no recurrent state is stored, which would take in the token each time, nor is that
        counted."""
        kept = [(tensor, tensor.clone()) for tensor in (self.positions, self.last_drawn)]
        self.num_stored.zero_()
        try:
            yield
        finally:
            for tensor, values in kept:
                tensor.copy_(values)
            self.num_stored.copy_(self._num_rows)

    def forget(self) -> None:
        """A step failed: what the device has of it, or was told before it, is not known. It is told all of it anew."""
        self._rows, self._index = (), np.zeros(0, np.int64)
        self._next.fill(_UNKNOWN)
        self._new_rules = set(map(RowId, range(self._max_rows)))
        self._forget_pages()

    def _forget_pages(self) -> None:
        """The device is told all of them anew."""
        self._new_pages, self._knows_pages = [], False

    def _changes(self, step: DecodingRows) -> list[_LineChange]:
        changes = []
        if not np.array_equal(self._next[self._index], step.starts):
            self._next[self._index] = step.starts
            changes.append(_LineChange(self.positions, self._index, step.starts))
        if step.given:
            rows, tokens = (np.array(list(part), np.int64) for part in (step.given, step.given.values()))
            changes.append(_LineChange(self.last_drawn, rows, tokens))
        if self._new_rules:
            lines = np.array(list(self._new_rules), np.int64)
            changes.append(_LineChange(self.rules, lines, self._rules_of_host[lines]))
            self._new_rules = set()
        if self._has_new_pages:
            changes += self._page_changes()
        return changes

    @property
    def _has_new_pages(self) -> bool:
        return bool(self._new_pages) or not self._knows_pages

    def _page_changes(self) -> list[_LineChange]:
        """As the tables are now: what was written more than once has the same value each time."""
        changes = []
        for pool, table in enumerate(self._of_host):
            if not self._knows_pages:
                places = np.arange(table.size)
                changes.append(_LineChange(self._tables[pool].view(-1), places, table.reshape(-1).astype(np.int64)))
                continue
            updates = [update for update in self._new_pages if update.pool == pool]
            if updates:
                width = table.shape[1]
                firsts = [update.row * width + update.first_index for update in updates]
                spans = [np.arange(first, first + len(of.pages)) for first, of in zip(firsts, updates, strict=True)]
                places = np.concatenate(spans)
                changes.append(
                    _LineChange(self._tables[pool].view(-1), places, table.reshape(-1)[places].astype(np.int64))
                )
        self._new_pages, self._knows_pages = [], True
        return changes

    def _tell(self, changes: list[_LineChange]) -> None:
        packed = np.concatenate([part.reshape(-1) for change in changes for part in (change.lines, change.values)])
        told, start = on_device(packed, self._device), 0
        for target, lines, values in changes:
            end = start + len(lines)
            of_lines = told[end : end + values.size].view(values.shape).to(target.dtype)
            target.index_copy_(0, told[start:end], of_lines)
            start = end + values.size
