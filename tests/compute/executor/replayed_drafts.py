"""A driver with a draft head whose steps and passes are recorded, and a schedule of rows that verify guesses."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from deltaserve.compute.executor.given_graphs import GivenGraphs
from deltaserve.compute.executor.head_graphs import HeadGraphs
from deltaserve.compute.executor.head_passes import HeadPass
from deltaserve.compute.executor.inputs import StepInputs
from deltaserve.compute.executor.step_recorder import StepRecorder
from deltaserve.control.sched.plan import ItemResult, PlanItem, SharedRun, TokenValues
from deltaserve.core.ids import RowId
from deltaserve.core.lifetime import KEEP_LAST
from deltaserve.core.tokens import pack_u32
from tests.compute.executor.replaying import COMMON, RecordingDriver
from tests.compute.executor.test_launched import prompt_item, rules
from tests.compute.executor.test_model_drafter import DraftingDriver
from tests.compute.executor.world import Driver, drawn, random_tokens
from tests.compute.layers.dense_heads import NUM_GUESSES

PROMPT_LENS = (38, 43, 34, 20)
"""The last row shares nothing."""
DECODING: tuple[tuple[int, ...], ...] = ((0, 1, 2), (1, 3), (3, 0, 2, 1), (0,), (0, 1, 2, 3))
"""Rows of each step."""
GUESSED: tuple[tuple[tuple[int, int], ...], ...] = (
    ((3, 3), (1, 0), (0, 0)),
    ((2, 1), (3, 2)),
    ((0, 0), (3, 0), (2, 2), (1, 1)),
    ((0, 0),),
    ((3, 1), (3, 3), (2, 0), (3, 2)),
)
"""Guesses of each that are verified, and how many are right."""
NUM_VERIFYING = 4
"""Steps in which some row has guesses."""
ANSWER_LEN = 16
MAX_TOKENS = 16
"""Tokens of a recorded step, as many as the last one has."""
LEAST_LIKELY = 0.05
"""In each other step."""
TEMPERATURES = (0.0, 0.0, 0.7, 0.0)


class EagerDrafts(DraftingDriver):
    """Each kernel launched by itself."""

    attention = "triton"

    def __init__(self, tiny_models: Path, name: str, device: str = "cpu") -> None:
        """`name`: of a head."""
        DraftingDriver.__init__(self, tiny_models, name, device=device)


class RecordedDrafts(EagerDrafts):
    graph_rows = MAX_TOKENS

    def __init__(self, tiny_models: Path, name: str, recorder: StepRecorder, device: str = "cpu") -> None:
        self._recorder = recorder
        EagerDrafts.__init__(self, tiny_models, name, device)

    def recorder(self, device: torch.device) -> StepRecorder | None:
        return self._recorder


class RecordedGuesses(RecordingDriver):
    """Verifies guesses of anybody's."""

    graph_rows = MAX_TOKENS


class Replays:
    """Counts what is replayed."""

    def __init__(self) -> None:
        self.num_verifying = 0
        """Steps with guesses."""
        self.num_passes = 0
        """Passes of a head."""

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Within."""
        step, head_pass = GivenGraphs._prepared, HeadGraphs._prepared

        def of_step(graphs: GivenGraphs, inputs: StepInputs, number: int) -> Any:
            found = step(graphs, inputs, number)
            self.num_verifying += bool(inputs.batch.undecided)
            return found

        def of_pass(graphs: HeadGraphs, of: HeadPass, number: int) -> Any:
            found = head_pass(graphs, of, number)
            self.num_passes += 1
            return found

        with patch.object(GivenGraphs, "_prepared", of_step), patch.object(HeadGraphs, "_prepared", of_pass):
            yield


class Verified(NamedTuple):
    """What the schedule comes to."""

    results: list[tuple[ItemResult, ...]]
    """Results of each step."""
    pages: list[Tensor]
    """Bytes of each arena."""


def _prompts() -> list[list[int]]:
    first = random_tokens(PROMPT_LENS[0], 0)
    starts = [COMMON if 0 < row < 3 else 0 for row in range(len(PROMPT_LENS))]
    others = [
        first[:start] + random_tokens(length - start, row)
        for row, (start, length) in enumerate(zip(starts, PROMPT_LENS, strict=True))
    ]
    return [first, *others[1:]]


def answers(driver: Driver) -> list[list[int]]:
    """What the rows draw where nobody guesses: each draw follows from the text before it and its position."""
    texts = _prompts()
    for row, prompt in enumerate(texts):
        driver.open(row, prompt, rules(row, temperature=TEMPERATURES[row]), 128)
    items = [prompt_item(row, prompt) for row, prompt in enumerate(texts)]
    found = [[drawn(result)] for result in driver.step(items).items]
    for count in range(ANSWER_LEN):
        items = [driver.decode(row, length + count) for row, length in enumerate(PROMPT_LENS)]
        for result in driver.step(items).items:
            found[result.row].append(drawn(result))
    return found


def verify_together(driver: Driver, right: Sequence[Sequence[int]], shares: bool = True) -> Verified:
    """Rows start one after the other, on common pages where no state stands in the way, then go on by guesses. `right`:
    what they draw."""
    common = 0 if KEEP_LAST in driver.cache.pools else COMMON
    lens, results = [1] * len(PROMPT_LENS), list[tuple[ItemResult, ...]]()
    for row, prompt in enumerate(_prompts()):
        start = common if 0 < row < 3 else 0
        driver.open(row, prompt, rules(row, temperature=TEMPERATURES[row]), 128, 0 if start else None, start)
        item = prompt_item(row, prompt, start)
        results.append(driver.step([replace(item, wanted_drafts=NUM_GUESSES)]).items)
    for number, (rows, guessed) in enumerate(zip(DECODING, GUESSED, strict=True)):
        items = [_item(row, right[row], lens[row], *counts) for row, counts in zip(rows, guessed, strict=True)]
        readers = tuple(RowId(row) for row in rows if row < 3)
        driver.least_likely = LEAST_LIKELY * (number % 2)
        shared = [SharedRun(0, common, readers)] if shares and common and len(readers) > 1 else []
        found = driver.step(items, shared).items
        results.append(found)
        for result, (_, num_right) in zip(found, guessed, strict=True):
            assert len(result.drawn) == 1 + num_right, f"row {result.row} does not draw what it does without guesses"
            lens[result.row] += len(result.drawn)
    return Verified(results, [arena.bytes.cpu().clone() for arena in driver.executor.memory.kv.arenas])


def _item(row: int, right: Sequence[int], num_drawn: int, num_guesses: int, num_right: int) -> PlanItem:
    """The last token drawn, and guesses at those behind it."""
    guesses = list(right[num_drawn : num_drawn + num_guesses])
    if num_right < num_guesses:
        guesses[num_right] = (guesses[num_right] + 1) % 256
    inputs, start = TokenValues(pack_u32([right[num_drawn - 1], *guesses])), PROMPT_LENS[row] + num_drawn - 1
    wanted = NUM_GUESSES - row  # none of the last row
    return PlanItem(RowId(row), start, 1 + num_guesses, inputs, True, num_drafts=num_guesses, wanted_drafts=wanted)
