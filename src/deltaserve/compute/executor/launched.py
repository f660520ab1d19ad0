"""A step that was given to the device, whose results nobody has read yet (process/worker/launch_thread.py)."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Lock

import torch
from torch import Tensor

from deltaserve.compute.executor.row_state import Row
from deltaserve.compute.executor.unread_draws import UnreadDraws
from deltaserve.control.sched.plan import ItemOutcome, PlanItem, Sampled, StepResult


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


@dataclass(frozen=True, slots=True)
class DrawingItem:
    """An item that draws one token, and its row: another request may have the row's number by then."""

    item: PlanItem
    row: Row

    @property
    def position(self) -> int:
        """Position of the token drawn."""
        return self.item.q_start + self.item.q_len


@dataclass(frozen=True, slots=True)
class _OnHost:
    """Draws on their way to the host; filled when `end` has come. `end` None: they are there."""

    tokens: Tensor  # [D] int64
    is_finite: Tensor  # [D] bool
    end: torch.cuda.Event | None

    @classmethod
    def of(cls, draws: UnreadDraws | None, device: torch.device) -> "_OnHost":
        if draws is None:
            draws = UnreadDraws(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool))
        if device.type != "cuda":
            return cls(*draws, None)
        found = [torch.empty(values.shape, dtype=values.dtype, pin_memory=True) for values in draws]
        for to, values in zip(found, draws, strict=True):
            to.copy_(values, non_blocking=True)
        end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        end.record(torch.cuda.current_stream(device))
        return cls(found[0], found[1], end)


class Launched:
    """`wait` from any thread; all else from the thread that launches."""

    def __init__(
        self,
        result: StepResult,
        drawing: Sequence[DrawingItem],
        draws: UnreadDraws | None,
        device: torch.device,
        clock: StepClock,
        launched_at: float,
    ) -> None:
        """`result`: without what is drawn. `draws`: of `drawing`; None: there is none."""
        self._of_step = result
        self._drawing = drawing
        self._on_host = _OnHost.of(draws, device)
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
                if self._on_host.end is not None:
                    self._on_host.end.synchronize()
                pairs = zip(self._on_host.tokens.tolist(), self._on_host.is_finite.tolist(), strict=True)
                self._tokens = [token if is_finite else None for token, is_finite in pairs]
                self._result = self._read()
        return self._result

    def settle(self) -> None:
        """Rows learn what was drawn. The step is over."""
        for one, token in zip(self._drawing, self._tokens, strict=True):
            one.row.read(self._of_step.step, one.position, token)

    def _read(self) -> StepResult:
        found = {one.item.row: token for one, token in zip(self._drawing, self._tokens, strict=True)}
        items = []
        for result in self._of_step.items:
            if result.row in found:
                token = found[result.row]
                drawn = () if token is None else (Sampled(token),)
                outcome = ItemOutcome.COMPUTED if drawn else ItemOutcome.NOT_FINITE
                result = replace(result, drawn=drawn, outcome=outcome)
            items.append(result)
        return replace(self._of_step, items=tuple(items), seconds=self._clock.end(self._launched_at))


class AtOnce:
    """A step that was computed where it was to be launched: a `Launched` that is over, and whose rows know all."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result
