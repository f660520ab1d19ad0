"""Steps that verify guesses, and the passes of the head that makes them, recorded and replayed on a CPU: against each
step by itself, to the bit."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from deltaserve.compute.executor.launched import AtOnce
from deltaserve.compute.executor.step_recorder import StepRecorder
from tests.cells import cells
from tests.compute.attention.step_tape import StepTape
from tests.compute.attention.triton_process import KernelProcess, needs_triton, run_in
from tests.compute.executor.replayed_drafts import (
    DECODING,
    EagerDrafts,
    RecordedDrafts,
    RecordedGuesses,
    answers,
    verify_together,
)
from tests.compute.executor.replaying import EagerDriver, as_on_a_gpu, with_parts
from tests.compute.executor.test_launched import LaunchingDriver, prompt_item, rules
from tests.compute.executor.world import Driver, random_tokens
from tests.compute.layers.dense_heads import HEADS, drafting
from tests.fixtures.tiny_models import EAGLE3_HEAD


def check_replays(
    eager: Driver, recorded: Callable[[StepRecorder], Driver], right: Sequence[Sequence[int]], shares: Sequence[bool]
) -> None:
    want = verify_together(eager, right)
    for shares_runs in shares:
        tape = StepTape()
        driver = recorded(tape)
        got = verify_together(driver, right, shares_runs)
        assert got.results == want.results
        assert all(torch.equal(*pages) for pages in zip(got.pages, want.pages, strict=True))
        assert tape.num_recorded <= 10
        steps = driver.executor._recorded
        assert steps is not None and not steps.recordings.has_failed
        assert tape.num_replayed >= len(DECODING)


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


def check_head(tiny_models: Path, name: str) -> None:
    right = answers(Driver(drafting(tiny_models, name)[0]))
    with nullcontext() if name == EAGLE3_HEAD else as_on_a_gpu("cpu"):
        eager = EagerDrafts(tiny_models, name)
        check_replays(eager, lambda tape: RecordedDrafts(tiny_models, name, tape), right, (True,))


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
