"""Steps that verify guesses, and the passes of the head that makes them, recorded and replayed on a CPU: against each
step by itself, to the bit."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deltaserve.compute.executor.head_graphs import HeadGraphs
from deltaserve.compute.executor.head_passes import Guesses, HeadPass, RowPiece
from deltaserve.compute.executor.launched import AtOnce
from deltaserve.compute.executor.recordings import Recordings
from deltaserve.compute.executor.resident_rows import ResidentRows
from deltaserve.compute.executor.step_recorder import StepRecorder
from deltaserve.compute.memory.page_table import PageTable
from deltaserve.core.ids import RowId
from tests.cells import cells
from tests.compute.attention.step_tape import StepTape
from tests.compute.attention.triton_process import KernelProcess, needs_triton, run_in
from tests.compute.executor.replayed_drafts import (
    DECODING,
    NUM_VERIFYING,
    EagerDrafts,
    RecordedDrafts,
    RecordedGuesses,
    Replays,
    Verified,
    answers,
    verify_together,
)
from tests.compute.executor.replaying import EagerDriver, as_on_a_gpu, with_parts
from tests.compute.executor.test_launched import LaunchingDriver, prompt_item, rules
from tests.compute.executor.test_step_graphs import Counting, Rooms
from tests.compute.executor.world import Driver, random_tokens
from tests.compute.layers.dense_heads import HEADS, drafting
from tests.fixtures.tiny_models import EAGLE3_HEAD


def check_replays(
    eager: Driver, recorded: Callable[[StepRecorder], Driver], right: Sequence[Sequence[int]], shares: Sequence[bool]
) -> Verified:
    """Returns what it comes to without recordings."""
    want = verify_together(eager, right)
    for shares_runs in shares:
        tape, replays = StepTape(), Replays()
        driver = recorded(tape)
        with replays.counted():
            got = verify_together(driver, right, shares_runs)
        check_same(got, want)
        assert tape.num_recorded <= 10
        steps = driver.executor._recorded
        assert steps is not None and not steps.recordings.has_failed
        waits = bool(driver.executor._decoder.spec.recurrent)
        assert replays.num_verifying == (0 if waits else NUM_VERIFYING)
        assert (replays.num_passes >= len(DECODING)) is (driver.executor._guessing is not None)
    return want


def check_same(got: Verified, want: Verified) -> None:
    assert got.results == want.results
    assert all(torch.equal(*pages) for pages in zip(got.pages, want.pages, strict=True))


def check_guesses(folder: Path) -> None:
    right = answers(Driver(folder))
    check_replays(EagerDriver(folder), lambda tape: RecordedGuesses(folder, tape), right, (True, False))


@needs_triton
@pytest.mark.parametrize(("name", "layers"), [("llama", (0,)), ("gemma3_text", (0, 2))])
def test_replays_verify_guesses_as_steps_do(
    process: KernelProcess, tiny_models: Path, tmp_path: Path, name: str, layers: Sequence[int]
) -> None:
    """Whoever makes them; over windows, too."""
    run_in(process, check_guesses, with_parts(tiny_models / name, tmp_path, layers))


class FailingTape(StepTape):
    """Its fifth recording fails behind its run: that of a pass whose features a replay has left, see `GUESSED`."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        if self.num_recorded == 4:
            run()
            raise RuntimeError("out of memory")
        return StepTape.record(self, run)


def check_failure(tiny_models: Path, name: str, right: Sequence[Sequence[int]], want: Verified) -> None:
    """In the middle of guesses: they go on from what the passes before have left."""
    driver = RecordedDrafts(tiny_models, name, FailingTape())
    replays = Replays()
    with replays.counted():
        check_same(verify_together(driver, right), want)
    assert driver.executor._recorded is not None and driver.executor._recorded.recordings.has_failed
    assert replays.num_verifying == 1 and replays.num_passes > 1


def check_head(tiny_models: Path, name: str) -> None:
    right = answers(Driver(drafting(tiny_models, name)[0]))
    with nullcontext() if name == EAGLE3_HEAD else as_on_a_gpu("cpu"):
        eager = EagerDrafts(tiny_models, name)
        want = check_replays(eager, lambda tape: RecordedDrafts(tiny_models, name, tape), right, (True,))
        if name == EAGLE3_HEAD:
            check_failure(tiny_models, name, right, want)


@needs_triton
@pytest.mark.parametrize("name", cells(((name,) for name in HEADS), lambda name: name != EAGLE3_HEAD))
def test_replays_of_heads_guess_as_their_passes_do(process: KernelProcess, tiny_models: Path, name: str) -> None:
    """Entries that the head keeps of each token are the same, too."""
    run_in(process, check_head, tiny_models, name)


class LaunchedDrafts(LaunchingDriver, RecordedDrafts):
    """Has a head, and is given each step ahead of the results of the one before."""

    def __init__(self, tiny_models: Path, name: str, recorder: StepRecorder) -> None:
        self.launched = []
        RecordedDrafts.__init__(self, tiny_models, name, recorder)


def check_nothing_stays_unread(tiny_models: Path) -> None:
    tape = StepTape()
    driver, prompt = LaunchedDrafts(tiny_models, EAGLE3_HEAD, tape), random_tokens(3, 1)
    driver.open(0, prompt, rules(1, frequency_penalty=0.5))
    driver.step([prompt_item(0, prompt)])
    driver.step([driver.decode(0, 3)])
    assert all(type(launched) is AtOnce and launched.wait().items[0].drawn for launched in driver.launched)
    steps = driver.executor._recorded
    assert steps is not None and tape.num_recorded and not steps.drawing._buckets


@needs_triton
def test_a_head_reads_what_rows_draw_at_once(process: KernelProcess, tiny_models: Path) -> None:
    """Whether it is asked for guesses or not: no step draws on the device alone."""
    run_in(process, check_nothing_stays_unread, tiny_models)


def test_a_pass_that_asks_behind_most_of_its_tokens_is_launched() -> None:
    """Where what is left of a prompt is one token: no recording has room for so many."""
    rows = ResidentRows(PageTable(1, 4, 9), 1, 4, torch.device("cpu"))
    head: Any = SimpleNamespace(feature_size=1, dtype=torch.float32)
    launched, attention, recorder = Launched(), Rooms(), Counting()
    graphs = HeadGraphs(head, (attention, 0, rows), 8, Recordings(recorder), launched)
    pieces = [RowPiece(RowId(row), 5, np.zeros(length, np.int64)) for row, length in enumerate((1, 1, 2))]
    of = HeadPass(pieces, torch.zeros(4, 1), (0, 1, 2), 16, 0.0)
    assert graphs.run(of) is launched.found
    assert not attention.made and not recorder.num_asked


class Launched:
    """In place of passes that are launched."""

    found = Guesses((1, 2, 3), (1.0, 1.0, 1.0), torch.zeros(3, 1))

    def run(self, of: HeadPass) -> Guesses:
        return self.found
