"""What the executor keeps per running request: its tokens and its sampling state."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltaserve.compute.executor.row_rules import WayToDraw, is_adjusted
from deltaserve.control.sched.plan import RowOpen
from deltaserve.core.errors import StateError
from deltaserve.core.ids import StepIndex
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import token_len

_UINT32_LE = np.dtype("<u4")


class DecodeRun:
    """Rows that draw one token in step after step, and nobody on the host looks at them."""

    def __init__(self, step: StepIndex) -> None:
        self.step = step
        """The last one that was launched."""


class Row:
    """Tokens known so far (prompt and output) and what was drawn last."""

    def __init__(self, opened: RowOpen, max_context_len: int, vocab_size: int) -> None:
        self.sampling: SamplingParams = opened.sampling
        self.prompt_len = opened.prompt_len
        self.num_known = token_len(opened.tokens)
        if self.num_known > max_context_len:
            raise StateError(f"row of {self.num_known} tokens, context is {max_context_len}")
        self._tokens: npt.NDArray[np.int64] = np.zeros(max_context_len + 1, np.int64)
        self._tokens[: self.num_known] = np.frombuffer(opened.tokens, _UINT32_LE)
        self._last: tuple[StepIndex, int] | None = None
        self._on_device: StepIndex | None = None
        self._run: DecodeRun | None = None
        self._has_run = False
        self.way: WayToDraw | None = WayToDraw.of(opened.sampling, vocab_size)
        """How a recorded step draws for it; None: it cannot."""
        self.is_adjusted = is_adjusted(opened.sampling)
        """Whether a recorded step changes its logits before it draws."""
        self.num_counted = 0
        """First tokens of it that the device counts (resident_adjustments.py), when it has done what it was given; 0:
        what it has of the row's biases and tokens is not known."""
        self._history: History | None = None
        self.vocab_size = vocab_size

    def tokens(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Known tokens of positions [start, end), fewer where they are not known yet."""
        return self._tokens[start : min(end, self.num_known)]

    def known(self) -> npt.NDArray[np.int64]:
        """The known tokens [n], a view."""
        return self._tokens[: self.num_known]

    def give(self, start: int, tokens: npt.NDArray[np.int64]) -> None:
        """Tokens of positions [start, start + len) are these; later ones are not known any more."""
        end = start + len(tokens)
        if start > self.num_known and self._has_run:  # what was drawn meanwhile is asked for by nobody
            self.num_known = start
        if start > self.num_known:
            raise StateError(f"tokens from {start} on, but only {self.num_known} are known")
        if end <= self.num_known and (self._tokens[start:end] == tokens).all():
            return
        if start < self.num_known:
            self._history, self.num_counted = None, 0
        self._tokens[start:end] = tokens
        self._count(tokens, start)
        self.num_known = end

    def draw(self, step: StepIndex, position: int, token: int) -> None:
        """`token` was drawn in `step` for `position`, by the host."""
        self._on_device = self._run = None
        self._learn(step, position, token)

    def leave_unread(self, step: StepIndex) -> None:
        """A token is drawn in `step`, and stands in the device's memory only."""
        self._on_device, self._run, self._history = step, None, None

    def join(self, run: DecodeRun) -> None:
        """Tokens are drawn in every step of the run from now on, and stand in the device's memory only. The host learns
        those of a row with penalties, which it may have to draw for later, by `read`, and no others."""
        self._run, self._has_run = run, not self.sampling.needs_history
        self._history = None  # made anew of what is known, should the host ask for it: each count here is a launch

    def leave(self, run: DecodeRun) -> None:
        """The last step of the run was the row's last one in it."""
        if self._run is run:
            self._on_device, self._run = run.step, None

    def read(self, step: StepIndex, position: int, token: int | None) -> None:
        """`token` was drawn in `step`, which left it unread. None: its logits were not finite; the next step may be
        under way all the same and draws behind a token 0, as `drawn_in` says."""
        self._learn(step, position, 0 if token is None else token)

    def is_on_device(self, step: StepIndex) -> bool:
        """Whether the token that the device drew for the row last is that of `step`."""
        return step == (self._on_device if self._run is None else self._run.step)

    def drawn_in(self, step: StepIndex) -> int:
        """The token drawn in `step`; 0 when its logits were not finite: such a row's results are dropped."""
        if self._last is None or self._last[0] != step:
            return 0
        return self._last[1]

    def _learn(self, step: StepIndex, position: int, token: int) -> None:
        if (position == self.num_known or self._has_run) and self._history is None:
            self._tokens[position] = token  # the common case of `give`, at a tenth of its time
            self.num_known = position + 1
        else:
            self.give(position, np.array([token], np.int64))
        self._last = (step, token)

    def history(self, device: torch.device) -> "History":
        """Counts for penalties, made when first asked for."""
        if self._history is None:
            self._history = History(self.vocab_size, device)
            known = self._tokens[: self.num_known]
            self._history.add(known[: self.prompt_len], is_output=False)
            self._history.add(known[self.prompt_len :], is_output=True)
        return self._history

    def _count(self, tokens: npt.NDArray[np.int64], start: int) -> None:
        if self._history is not None:
            self._history.add(tokens, is_output=start >= self.prompt_len)


class History:
    """Which tokens a row has seen, and how often it produced each."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.seen: Tensor = torch.zeros(vocab_size, dtype=torch.bool, device=device)  # [V] prompt or output
        self.output_counts: Tensor = torch.zeros(vocab_size, device=device)  # [V] float32

    def add(self, tokens: npt.NDArray[np.int64], *, is_output: bool) -> None:
        ids = torch.from_numpy(tokens.copy()).to(self.seen.device)
        self.seen[ids] = True
        if is_output:
            self.output_counts.index_add_(0, ids, torch.ones(len(ids), device=self.seen.device))
