"""A step that was given to the device, whose results nobody has read yet (process/worker/launch_thread.py)."""

import time
from collections.abc import Sequence
from dataclasses import replace
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from deltaserve.compute.executor.row_state import Row
from deltaserve.control.sched.plan import ItemOutcome, ItemResult, PlanItem, Sampled, StepResult
from deltaserve.core.ids import RowId


class StepClock:
    """Steps follow each other on the device: one begins when it is launched, or when the one before has ended."""

    def __init__(self) -> None:
        self._ended_at = 0.0

    def end(self, launched_at: float) -> float:
        """A step has ended now. Returns its seconds."""
        now = time.perf_counter()
        seconds = now - max(launched_at, self._ended_at)
        self._ended_at = now
        return seconds


class DrawingItem(NamedTuple):
    """An item that draws one token, and its row: another request may have the row's number by then."""

    item: PlanItem
    row: Row

    @property
    def position(self) -> int:
        """Position of the token drawn."""
        return self.item.q_start + self.item.q_len


class DrawsOnHost(NamedTuple):
    """Draws on their way to the host; filled when `end` has come. `end` None: they are there."""

    values: Tensor  # [2, D] int64: tokens, and 1 where the logits are finite
    end: torch.cuda.Event | None

    @classmethod
    def of(cls, draws: Tensor | None, device: torch.device) -> "DrawsOnHost":
        """A copy of draws [2, D] on the device, which may be written over from then on. None: nothing is drawn."""
        found = torch.empty((2, 0), dtype=torch.int64) if draws is None else draws
        if device.type != "cuda":
            return cls(found.clone(), None)
        values = torch.empty(found.shape, dtype=torch.int64, pin_memory=True)
        values.copy_(found, non_blocking=True)
        end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        end.record(torch.cuda.current_stream(device))
        return cls(values, end)

    def read(self) -> Tensor:
        """`values`, when the step is over."""
        if self.end is not None:
            self.end.synchronize()
        return self.values


class Launched:
    """`wait` from any thread; all else from the thread that launches."""

    def __init__(
        self,
        result: StepResult,
        drawing: Sequence[DrawingItem],
        draws: DrawsOnHost,
        clock: StepClock,
        launched_at: float,
    ) -> None:
        """`result`: without what is drawn. `draws`: of `drawing`."""
        self._of_step = result
        self._drawing = drawing
        self._on_host = draws
        self._clock = clock
        self._launched_at = launched_at
        self._lock = Lock()
        self._tokens: Sequence[int | None] = ()
        """Tokens of `drawing`, when the step is over; None: its logits are not finite."""
        self._result: StepResult | None = None
        for one in drawing:
            one.row.leave_unread(result.step)

    @property
    def is_over(self) -> bool:
        """Whether somebody has waited for its end."""
        return self._result is not None

    def wait(self) -> StepResult:
        """When it returns, the pages that the step wrote may be read by anybody. Raises where the device is lost."""
        with self._lock:
            if self._result is None:
                self._result = self._read(self._on_host.read())
        return self._result

    def settle(self) -> None:
        """Rows learn what was drawn. The step is over."""
        for one, token in zip(self._drawing, self._tokens, strict=True):
            one.row.read(self._of_step.step, one.position, token)

    def _read(self, values: Tensor) -> StepResult:
        """`values`: see DrawsOnHost."""
        tokens, is_finite = values.tolist()
        self._tokens = [token if ok else None for token, ok in zip(tokens, is_finite, strict=True)]
        found = {one.item.row: token for one, token in zip(self._drawing, self._tokens, strict=True)}
        items = [drawn_result(item.row, found[item.row]) if item.row in found else item for item in self._of_step.items]
        return replace(self._of_step, items=tuple(items), seconds=self._clock.end(self._launched_at))


def drawn_result(row: RowId, token: int | None) -> ItemResult:
    """The answer to an item that drew one token; None: its logits are not finite."""
    return ItemResult(row, (), ItemOutcome.NOT_FINITE) if token is None else ItemResult(row, (Sampled(token),))


class AtOnce:
    """A step that was computed where it was to be launched: a `Launched` that is over, and whose rows know all."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result
