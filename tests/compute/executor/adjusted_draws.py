"""Draws for rows with penalties, biases and least lengths, one after the other: the sampler's, and those of recorded
steps, with some between that the host makes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deltaserve.compute.executor.resident_adjustments import AdjustedRow
from deltaserve.compute.executor.resident_draws import MakeDraws, RowDraws, TorchDraws
from deltaserve.compute.executor.resident_rows import DecodingRows, ResidentRows
from deltaserve.compute.executor.row_rules import BANNED_LOGIT, LARGEST_BIAS, DrawKind, WayToDraw, packed_rules
from deltaserve.compute.executor.row_state import Row
from deltaserve.compute.executor.sampler import SampleRow, apply_rules, sample
from deltaserve.compute.executor.step_recorder import StepRecorder
from deltaserve.compute.memory.page_table import PageTable
from deltaserve.control.sched.plan import RowOpen
from deltaserve.core.ids import RowId, StepIndex
from deltaserve.core.sampling import SamplingParams
from deltaserve.core.tokens import pack_u32

PENALTIES: dict[str, float] = {"repetition_penalty": 1.3, "frequency_penalty": 0.37, "presence_penalty": -0.21}
NEEDS: tuple[dict[str, Any], ...] = (
    {},
    PENALTIES,
    {"frequency_penalty": 1.9},
    {"repetition_penalty": 0.6},
    {"logit_bias": ((1, 2.5), (3, -100.0), (0, 0.125))},
    {"min_tokens": 4, "stop_token_ids": (2, 5)},
    {**PENALTIES, "logit_bias": ((2, 3.0), (7, 1.1)), "min_tokens": 3, "stop_token_ids": (2, 4)},
)
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.1, "top_p": 0.9},
    {"temperature": 0.9, "top_k": 6, "min_p": 0.01},
)
PROMPT_LEN = 5


def rules_of_all_kinds() -> list[SamplingParams]:
    """One row for each need and way to draw."""
    changes = [{**needs, **way} for needs in NEEDS for way in WAYS]
    return [SamplingParams(max_tokens=99, seed=seed, **of) for seed, of in enumerate(changes)]


class Rows(NamedTuple):
    """A row for each of some rules, behind the same prompt."""

    rules: Sequence[SamplingParams]
    rows: Sequence[Row]
    vocab_size: int

    @classmethod
    def of(cls, rules: Sequence[SamplingParams], vocab_size: int) -> "Rows":
        tokens = pack_u32([1, 2, 2, 8, 3])
        opened = [RowOpen(RowId(line), params, tokens, PROMPT_LEN) for line, params in enumerate(rules)]
        return cls(rules, [Row(of, 200, vocab_size) for of in opened], vocab_size)

    def logits(self, step: int, dtype: torch.dtype) -> Tensor:
        """Such that tokens come again, and with ties. Of many tokens hardly one but the first is drawn: sums that are
        added up in another order may take the next one where they lie close."""
        made = torch.Generator().manual_seed(step % 3)
        logits = torch.randn(len(self.rules), self.vocab_size, generator=made) * 2
        logits[:, :9] += 3.0 if self.vocab_size < 1000 else 20.0
        logits[::4] = logits[::4].round()
        return logits.to(dtype)

    def drawn_by_sampler(self, step: int, dtype: torch.dtype, device: str) -> list[int]:
        """What the host draws in this step. The rows do not learn it."""
        of_host = [
            SampleRow(row.sampling, step, row.history(torch.device(device)) if row.sampling.needs_history else None)
            for row in self.rows
        ]
        return [draw.token for draw in sample(self.logits(step, dtype).to(device).float(), of_host)]

    def learn(self, step: int, tokens: Sequence[int]) -> None:
        for row, token in zip(self.rows, tokens, strict=True):
            row.draw(StepIndex(step), PROMPT_LEN + step, token)


class Resident:
    """The same rows as the device keeps them, on lines the other way round, and what draws for them."""

    def __init__(self, rows: Rows, make: MakeDraws, device: str) -> None:
        count = len(rows.rows)
        self.of_host = rows
        self.device = device
        self.rows = ResidentRows(PageTable(1, count, 1), 1, count, torch.device(device))
        self.lines = torch.arange(count, device=device).flip(0)
        for place, row in enumerate(rows.rows):
            assert row.way is not None
            packed = packed_rules(row.sampling, PROMPT_LEN, row.way, rows.vocab_size)
            self.rows.open(RowId(count - 1 - place), packed)
        self.draws = torch.zeros((2, count), dtype=torch.int64, device=device)
        self.drawing = make(self.rows, count, rows.vocab_size, DrawKind(WayToDraw.LIMITED, is_adjusted=True))

    def prepare(self, step: int, last: Sequence[int]) -> None:
        """`last`: the token of each row that the step computes."""
        rows, start = self.of_host.rows, PROMPT_LEN + step - 1
        lines = tuple(RowId(line) for line in reversed(range(len(rows))))
        of_lines = zip(lines, rows, strict=True)
        adjusted = tuple(AdjustedRow(line, row, start) for line, row in of_lines if row.is_adjusted)
        given = dict(zip(lines, last, strict=True))
        self.rows.prepare(DecodingRows(lines, np.full(len(rows), start), given, (), 16, adjusted))

    def draw(self, step: int, logits: Tensor) -> list[int]:
        padding = torch.full((len(logits), 3), 1e4, dtype=logits.dtype)  # rows that fill up a share
        self.drawing.draw(torch.cat((logits, padding), 1).to(self.device), self.lines, self.draws)
        for row in self.of_host.rows:
            row.num_counted = PROMPT_LEN + step
        self.rows.advance()
        return self.draws[0].tolist()


def check_draws(make: MakeDraws, vocab_size: int, dtype: torch.dtype, device: str, num_steps: int) -> None:
    """Check step after step. In some the host draws alone, and after one the device is told all anew."""
    by_host = Rows.of(rules_of_all_kinds(), vocab_size)
    resident = Resident(Rows.of(by_host.rules, vocab_size), make, device)
    last = [3] * len(by_host.rules)
    for step in range(num_steps):
        want = by_host.drawn_by_sampler(step, dtype, device)
        if step % 5 != 3:
            resident.prepare(step, last)
            got = resident.draw(step, by_host.logits(step, dtype))
            assert resident.draws[1].all(), f"step {step}: logits are not finite"
            wrong = [by_host.rules[place] for place in range(len(want)) if got[place] != want[place]]
            assert not wrong, f"step {step} on {device}: {len(wrong)} of {len(want)} rows, the first of {wrong[0]}"
        by_host.learn(step, want)
        resident.of_host.learn(step, want)
        last = want
        if step == 6:
            for row in resident.of_host.rows:
                row.num_counted = 0


Adjust = Callable[[Resident, Tensor], Tensor]
"""Logits [B, V] of a resident's rows, with nothing beside them -> adjusted ones."""


def adjusted_by_torch(resident: Resident, logits: Tensor) -> Tensor:
    of, rows, vocab_size = resident.drawing, resident.rows, logits.shape[1]
    assert isinstance(of, TorchDraws)
    rules, positions = rows.rules.index_select(0, resident.lines), rows.positions.index_select(0, resident.lines) + 1
    return of._adjusted(rows.adjustments.tables(vocab_size), logits.float(), resident.lines, rules, positions)


def adjusted_by_kernel(resident: Resident, logits: Tensor) -> Tensor:
    of: Any = resident.drawing
    found: Tensor = of._adjusting.adjusted(logits, resident.lines)[: len(logits)]
    return found


def check_bits(make: MakeDraws, adjust: Adjust, vocab_size: int, dtype: torch.dtype, device: str) -> None:
    """Check logits as they are before a draw, to the bit; banned ones are the least."""
    by_host = Rows.of(rules_of_all_kinds(), vocab_size)
    resident = Resident(Rows.of(by_host.rules, vocab_size), make, device)
    step, tokens = 3, (3, 4, 4)
    for place, drawn in enumerate(tokens):
        for rows in (by_host, resident.of_host):
            rows.learn(place, [drawn] * len(rows.rules))
    logits = by_host.logits(step, dtype).to(device)
    want = logits.float().clone()
    for place, row in enumerate(by_host.rows):
        history = row.history(torch.device(device)) if row.sampling.needs_history else None
        apply_rules(want[place], SampleRow(row.sampling, step, history))
    resident.prepare(step, [4] * len(by_host.rules))
    got = adjust(resident, logits)
    is_banned = want == -torch.inf
    assert is_banned.any() and (got[is_banned] == BANNED_LOGIT).all()
    off = ((got != want) & ~is_banned).any(1).nonzero()[:, 0].tolist()
    assert not off, f"on {device}: logits of {len(off)} rows, the first of {by_host.rules[off[0]]}"


def check_not_finite(make: MakeDraws, device: str = "cpu") -> None:
    by_host = Rows.of(rules_of_all_kinds(), 272)
    resident = Resident(by_host, make, device)
    logits = by_host.logits(0, torch.float32)
    for place, value in enumerate((float("nan"), float("inf"), float("-inf")) * 9):
        logits[place, place % 10] = value  # also tokens with a bias, or banned
    resident.prepare(0, [3] * len(logits))
    drawn = resident.draw(0, logits)
    assert resident.draws[1].tolist() == [0] * 27 + [1] * (len(logits) - 27)
    assert all(0 <= token < 272 for token in drawn)


def check_overflow(make: MakeDraws, device: str = "cpu") -> None:
    """Logits that a penalty makes infinite are finite before biases and bans, so that none becomes no number."""
    needs: tuple[dict[str, Any], ...] = (
        {"min_tokens": 4, "stop_token_ids": (2,)},
        {"logit_bias": ((2, -100.0),)},
        {"logit_bias": ((2, -LARGEST_BIAS),), "min_tokens": 4, "stop_token_ids": (3,)},
    )
    of_all = [{"repetition_penalty": 1e-4, **of} for of in needs]
    rules = [SamplingParams(max_tokens=9, seed=seed, temperature=0.0, **of) for seed, of in enumerate(of_all)]
    resident = Resident(Rows.of(rules, 272), make, device)
    logits = resident.of_host.logits(0, torch.float32)
    logits[:, 2], logits[:, 9] = 3e38, 1e7
    resident.prepare(0, [3] * len(rules))
    with np.errstate(over="ignore"):  # kernels are interpreted by numpy
        assert resident.draw(0, logits) == [9, 2, 2]
    assert resident.draws[1].all()


class Replayed:
    """Draws by replays of those that are asked for first, which a recording makes once more."""

    def __init__(self, rows: ResidentRows, drawing: RowDraws, recorder: StepRecorder) -> None:
        self._rows, self._drawing, self._recorder = rows, drawing, recorder
        self._logits: Tensor | None = None
        self._replay: Callable[[], None] = lambda: None

    def draw(self, logits: Tensor, lines: Tensor, draws: Tensor) -> None:
        if self._logits is None:
            self._logits = kept = logits.clone()
            with self._rows.standing():
                self._replay = self._recorder.record(lambda: self._drawing.draw(kept, lines, draws))
        self._logits.copy_(logits)
        self._replay()


def replayed(make: MakeDraws, recorder: StepRecorder) -> MakeDraws:
    def made(rows: ResidentRows, num_rows: int, num_logits: int, kind: DrawKind) -> RowDraws:
        return Replayed(rows, make(rows, num_rows, num_logits, kind), recorder)

    return made
