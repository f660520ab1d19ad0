"""Steps before anybody waits for one: which they are, and that nothing is left of them."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from deltaserve.compute.executor import warm_up as warm_up_steps
from deltaserve.compute.executor.recordable_models import token_buckets
from deltaserve.compute.executor.recordings import bucket_of
from deltaserve.compute.executor.warm_up import WarmUp, warm_up
from deltaserve.control.sched.plan import ItemOutcome, ItemResult, StepPlan, StepResult
from deltaserve.core.ids import RowId
from tests.compute.attention.step_tape import StepTape, TorchTape
from tests.compute.attention.triton_process import KernelProcess, needs_triton, run_in
from tests.compute.executor.in_pieces import PieceDriver, PlainDriver, told
from tests.compute.executor.replayed_drafts import MAX_TOKENS, RecordedGuesses, answers, verify_together
from tests.compute.executor.replaying import EagerDriver, ReplayingDriver, decode_together, with_parts
from tests.compute.executor.world import Driver, check_generation

SIZES = WarmUp(
    num_pages=(40, 3),
    page_size=16,
    chunk_len=128,
    step_len=512,
    split_tokens=32,
    max_context_len=500,
    max_rows=40,
    graph_rows=36,
    piece_tokens=None,
    is_decoding=True,
)


def collected(sizes: WarmUp) -> list[StepPlan]:
    plans: list[StepPlan] = []

    def compute(plan: StepPlan) -> StepResult:
        plans.append(plan)
        return StepResult(plan.step, tuple(ItemResult(item.row) for item in plan.items))

    warm_up(compute, sizes, lambda text: None)
    return plans


def numbers_decoding(plans: list[StepPlan]) -> list[int]:
    return [len(plan.items) for plan in plans if plan.items and all(item.is_decode for item in plan.items)]


def test_every_number_of_rows_that_is_recorded_is_made_in_each_way_the_largest_first() -> None:
    found = numbers_decoding(collected(SIZES))
    assert found.pop(3) == 1, "one row whose logits are changed before a draw, while there is time for sure"
    made, others = found[:24], found[24:]
    assert others == [36, 32, 16, 8, 4, 2, 1], "those of the host"
    assert set(made) == {bucket_of(num_rows, 36) for num_rows in range(1, 37)}
    assert all(made.count(num_rows) == 3 for num_rows in made)
    assert made[::3] == [36, 32, 16, 8, 4, 2, 1, 24]


def test_steps_that_guess_have_every_number_of_tokens_once() -> None:
    """Rows are as many as there may be, each with as few guesses as make up the number."""
    plans = [plan for plan in collected(replace(SIZES, max_rows=10, num_drafts=2)) if plan.items]
    made = [plan for plan in plans if all(item.num_known == 1 for item in plan.items)]
    assert [plan.num_tokens for plan in made] == [30, 16, 8, 4, 2, 1, 24, 15, 12]
    assert [len(plan.items) for plan in made] == [10, 10, 8, 4, 2, 1, 10, 10, 10]
    assert [max(item.num_drafts for item in plan.items) for plan in made] == [2, 1, 0, 0, 0, 0, 2, 1, 1]
    for item in (item for plan in made for item in plan.items):
        assert item.wanted_drafts == 2 and item.q_start + item.q_len + 2 <= SIZES.max_context_len


def test_passes_behind_guesses_that_are_right_have_every_number_of_tokens() -> None:
    """Each row's tokens are known, and one that it draws comes to them."""
    plans = collected(replace(SIZES, max_rows=10, num_drafts=2))
    made = [plan for plan in plans if len(plan.items) == 10 and not any(item.num_drafts for item in plan.items)]
    assert [plan.num_tokens + 10 for plan in made if plan.num_tokens > 10] == [36, 32, 24]
    assert all(item.samples and item.wanted_drafts == 2 for plan in made for item in plan.items)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_rows_and_pages_are_those_that_there_are(num_drafts: int) -> None:
    for plan in collected(replace(SIZES, num_drafts=num_drafts)):
        for update in plan.pages:
            assert update.row < SIZES.max_rows
            assert max(update.pages) < SIZES.num_pages[update.pool]
            assert update.first_index + len(update.pages) <= -(-SIZES.max_context_len // SIZES.page_size)
        assert all(item.q_start + item.q_len <= SIZES.max_context_len for item in plan.items)
        assert plan.num_tokens <= SIZES.chunk_len + SIZES.max_rows


def test_no_row_is_left_open() -> None:
    opened: set[RowId] = set()
    for plan in collected(SIZES):
        assert opened.issuperset(plan.closes)
        opened.difference_update(plan.closes)
        assert opened.isdisjoint(row.row for row in plan.opens)
        opened.update(row.row for row in plan.opens)
        assert opened.issuperset(item.row for item in plan.items)
    assert not opened


def test_prompts_have_all_lengths_up_to_a_chunk() -> None:
    plans = collected(replace(SIZES, is_decoding=False))
    assert not numbers_decoding(plans)
    alone = [plan.items[0].q_len for plan in plans if len(plan.items) == 1]
    assert alone == [128, 16, 64, 32, 16]
    assert [len(plan.items) for plan in plans if len(plan.items) > 1] == [2]


def test_prompts_have_all_numbers_of_tokens_that_are_recorded_in_pieces() -> None:
    """The largest first, no longer than a chunk, behind those that are made in any case."""
    sizes = replace(SIZES, is_decoding=False, chunk_len=1024, max_context_len=900, piece_tokens=2048)
    alone = [plan.items[0].q_len for plan in collected(sizes) if len(plan.items) == 1]
    assert alone[:8] == [900, 16, 512, 256, 128, 64, 32, 16]
    assert alone[8:] == [length for length in token_buckets(2048) if length <= 900]


@pytest.mark.parametrize(
    ("changes", "lens"),
    [
        ({"piece_tokens": 320}, [1, 128, 128, 64]),
        ({"piece_tokens": 320, "is_decoding": False}, [1, 128, 128, 64]),
        ({"piece_tokens": 512, "is_decoding": False}, None),
        ({"piece_tokens": 96}, [1, 96]),
        ({"piece_tokens": 544, "max_rows": 40}, [*[1] * 33, 128, 128, 128, 128]),
        ({"piece_tokens": 576, "max_rows": 40}, None),
        ({"piece_tokens": 320, "max_rows": 3}, None),
    ],
)
def test_a_step_has_more_tokens_than_are_recorded_in_pieces_where_one_may(
    changes: dict[str, Any], lens: list[int] | None
) -> None:
    """With short queries and long ones, of as many prompts as it takes."""
    plans = [plan for plan in collected(replace(SIZES, **changes)) if plan.num_tokens == changes["piece_tokens"] + 1]
    assert [[item.q_len for item in plan.items] for plan in plans] == ([] if lens is None else [lens])


def test_pieces_end_with_their_time(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A row opens and closes; the step beside pieces is made all the same."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("deltaserve.compute.executor.warm_up.PIECES_BUDGET_S", 0.0)
    assert len(collected(replace(SIZES, piece_tokens=128))) == len(collected(SIZES)) + 2 + 3
    assert "CUDA graphs: pieces of 0 of 4 numbers of tokens made first" in caplog.text


def test_without_recording_one_decode_step_is_enough() -> None:
    assert set(numbers_decoding(collected(replace(SIZES, graph_rows=None)))) == {1}


def test_decode_steps_end_with_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltaserve.compute.executor.warm_up.DECODE_BUDGET_S", 0.0)
    plans = collected(SIZES)
    assert not numbers_decoding(plans)
    assert plans


def test_a_step_that_fails_is_told_and_the_others_are_made(caplog: pytest.LogCaptureFixture) -> None:
    num_made = 0

    def failing(plan: StepPlan) -> StepResult:
        nonlocal num_made
        num_made += bool(plan.items)
        outcome = ItemOutcome.FAILED if plan.num_tokens == 128 else ItemOutcome.COMPUTED
        return StepResult(plan.step, tuple(ItemResult(item.row, outcome=outcome) for item in plan.items))

    warm_up(failing, SIZES, lambda text: None)
    assert num_made > 24
    assert "a first step of 128 tokens failed" in caplog.text


def warm(driver: Driver, compute: Callable[[StepPlan], StepResult], **changes: Any) -> None:
    """Warm up an executor of the world's; its recorded steps have up to 4 rows. `changes`: of what is asked for."""
    arenas = driver.executor.memory.kv.arenas
    pools = tuple(min(arena.num_pages for arena in arenas) - 1 for _ in range(driver.cache.num_pools))
    sizes = replace(SIZES, num_pages=pools, chunk_len=40, max_context_len=48, max_rows=4, graph_rows=4)
    sizes = replace(sizes, split_tokens=driver.split_tokens)
    warm_up(compute, replace(sizes, **changes), lambda text: None)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5_text", "deepseek_v3", "qwen3_moe"])
def test_an_executor_that_is_warm_computes_what_it_did(tiny_models: Path, name: str) -> None:
    driver = Driver(tiny_models / name)
    warm(driver, driver.run)
    assert not driver.executor._rows
    check_generation(driver, tiny_models / name)


def check_first_requests(folder: Path) -> None:
    """A worker that is warm records nothing for them, but where logits are changed before a draw."""

    class Launching(ReplayingDriver):
        graph_rows = 4

    want = decode_together(EagerDriver(folder))
    tape = StepTape()
    driver = Launching(folder, tape)
    with patch.object(warm_up_steps, "DECODE_BUDGET_S", math.inf):  # kernels are interpreted: each step takes a second
        warm(driver, lambda plan: driver.executor.launch(plan).wait())
    num_warm = tape.num_recorded
    assert num_warm == 4 * 3 + 1  # 4, 2 and 1 rows, by each way to draw and for the host; one row with a penalty
    got = decode_together(driver)
    assert got.tokens == want.tokens
    assert tape.num_recorded == num_warm + 1
    assert got.num_untypical == 1


def check_first_guesses(folder: Path) -> None:
    right, tape = answers(Driver(folder)), StepTape()
    driver = RecordedGuesses(folder, tape)
    with patch.object(warm_up_steps, "DECODE_BUDGET_S", math.inf):
        warm(driver, driver.run, graph_rows=MAX_TOKENS, num_drafts=3)
    assert tape.num_recorded == 5  # of 16, 8, 4, 2 and 1 tokens
    verify_together(driver, right)
    assert tape.num_recorded == 5


@needs_triton
def test_what_was_recorded_serves_the_first_guesses(process: KernelProcess, tiny_models: Path, tmp_path: Path) -> None:
    run_in(process, check_first_guesses, with_parts(tiny_models / "llama", tmp_path, (0,)))


def test_pieces_that_were_recorded_serve_the_first_requests(tiny_models: Path) -> None:
    """But for last stretches of other numbers of tokens, which are pieces of one layer."""
    tape = TorchTape()
    driver = PieceDriver(tiny_models / "llama", tape)
    arenas = driver.executor.memory.kv.arenas
    pools = tuple(min(arena.num_pages for arena in arenas) - 1 for _ in range(driver.cache.num_pools))
    sizes = replace(
        SIZES, num_pages=pools, split_tokens=driver.split_tokens, max_rows=4, graph_rows=4, piece_tokens=128
    )
    warm_up(lambda plan: driver.executor.launch(plan).wait(), sizes, lambda text: None)
    num_warm = tape.num_recorded
    assert num_warm == 4 * 3 + 2  # 128, 96, 64 and 32 tokens; ends of 64 and 32
    assert told(driver).items == told(PlainDriver(tiny_models / "llama")).items
    assert tape.num_recorded == num_warm + 1  # of 107 tokens all are read


@needs_triton
def test_what_was_recorded_serves_the_first_requests(process: KernelProcess, tiny_models: Path, tmp_path: Path) -> None:
    run_in(process, check_first_requests, with_parts(tiny_models / "llama", tmp_path, (0,)))
