"""Steps with prompts in recorded pieces, on a CPU: whole models against the same steps without, to the bit."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import pytest
import torch
from torch import Tensor

from deltaserve.compute.executor.recordable_models import most_piece_tokens, token_bucket, token_buckets
from deltaserve.compute.executor.scratch import pieces_bytes
from deltaserve.compute.layers.dense import DenseWeights
from deltaserve.compute.layers.step_ops import TorchOps
from deltaserve.compute.layers.stretches import OwnStretches, Standing
from deltaserve.model.checkpoint_config import load_spec
from deltaserve.settings.resolve import StepSizes
from tests.cells import cells
from tests.compute.attention.step_tape import StepTape, TorchTape
from tests.compute.attention.triton_process import KernelProcess, needs_triton, run_in
from tests.compute.executor.in_pieces import AllExperts, PieceDriver, PlainDriver, assert_same, told, triton_ops_of
from tests.compute.executor.replaying import Repeating, with_parts
from tests.compute.executor.test_launched import RULES, LaunchingDriver, outputs, rules
from tests.compute.executor.test_model_drafter import DraftingDriver
from tests.compute.executor.world import extend, random_tokens
from tests.fixtures.families import FAMILIES


def pieces_of(driver: PieceDriver) -> Any:
    return driver.executor._pieces


@pytest.mark.parametrize(
    ("name",), cells([(name,) for name in FAMILIES], lambda name: name in ("qwen3", "minimax_m2", "qwen3_5_moe"))
)
def test_steps_in_pieces_compute_what_they_do_without(tiny_models: Path, name: str) -> None:
    """Log-probabilities of all tokens, and bytes of all pages and states. What a replay leaves for another does not
    lie where a third one computes."""
    tape = TorchTape()
    driver = PieceDriver(tiny_models / name, tape)
    assert_same(told(driver), told(PlainDriver(tiny_models / name)))
    assert not pieces_of(driver).recordings.has_failed
    assert tape.num_replayed > tape.num_recorded > 0


class LaunchingPlain(LaunchingDriver, PlainDriver):
    """Launches steps ahead."""

    def __init__(self, path: Path) -> None:
        self.launched = []
        PlainDriver.__init__(self, path)


class LaunchingPieces(LaunchingDriver, PieceDriver):
    """And in pieces."""

    def __init__(self, path: Path, recorder: TorchTape) -> None:
        self.launched = []
        PieceDriver.__init__(self, path, recorder)


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_pieces_are_launched_ahead(tiny_models: Path, name: str) -> None:
    """Beside rows whose tokens nobody has read yet."""
    sampling, tape = [rules(seed, **changes) for seed, changes in enumerate(RULES.values())], TorchTape()
    want = outputs(LaunchingPlain(tiny_models / name), sampling)
    assert outputs(LaunchingPieces(tiny_models / name, tape), sampling) == want
    assert tape.num_replayed > tape.num_recorded > 0


def test_a_step_that_records_says_that_its_time_is_not_typical(tiny_models: Path) -> None:
    driver = PieceDriver(tiny_models / "llama", TorchTape())
    prompt = random_tokens(100, 1)
    driver.open(0, prompt)
    ends = (0, 40, 80, 81, 90, 100)
    results = [driver.step([extend(0, prompt, start, end)]) for start, end in pairwise(ends)]
    assert [result.is_typical for result in results] == [False, True, False, True, True]


def test_last_stretches_of_all_that_may_draw_are_recorded_with_the_first_pieces(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later step that reads as many waits for no recording. One more tells of its own last stretch."""
    driver, prompt = PieceDriver(tiny_models / "llama", TorchTape()), random_tokens(200, 1)
    monkeypatch.setattr(pieces_of(driver), "_usual_ends", token_buckets(64))
    driver.open(0, prompt)
    found: list[tuple[int, bool, list[int]]] = []
    for end, wants_all in ((90, False), (120, False), (122, True), (162, True), (182, False)):
        start = 0 if not found else found[-1][0]
        result = driver.step([replace(extend(0, prompt, start, end), wants_prompt_logprobs=wants_all)])
        found.append((end, result.is_typical, sorted(pieces_of(driver)._ended)))
    assert [typical for _, typical, _ in found] == [False, False, True, False, True]
    assert [ended for _, _, ended in found] == [[32, 64]] * 5


def buffers(driver: PieceDriver) -> list[Tensor]:
    whole = pieces_of(driver)._layout.whole
    standing = [part for x, meeting, waiting in whole.standings for part in (x, *meeting, *waiting)]
    return [whole.ids.t(), *whole.mets, *standing, *(part for turn in whole.turns for part in turn)]


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize("wants_all", [True, False])
@torch.inference_mode()
def test_nothing_is_left_of_the_step_before(tiny_models: Path, name: str, wants_all: bool) -> None:
    """Not where there are fewer tokens, either: rows in vain are numbers, whatever stood there. Also where only the
    last token is computed to the end."""
    prompt, results = random_tokens(160, 1), []
    for driver in (PlainDriver(tiny_models / name), PieceDriver(tiny_models / name, TorchTape())):
        driver.open(0, prompt)
        driver.step([extend(0, prompt, 0, 60)])
        if isinstance(driver, PieceDriver):
            for tensor in buffers(driver):
                tensor.fill_(5 if tensor.dtype is torch.int64 else float("nan"))
        results.append(driver.step([replace(extend(0, prompt, 60, 160), wants_prompt_logprobs=wants_all)]).items)
        if isinstance(driver, PieceDriver):
            assert all(tensor[: 128 if wants_all else 32].isfinite().all() for tensor in buffers(driver))
    assert results[0] == results[1]


class ExpertsOfSteps(AllExperts):
    """Keeps which experts the rows of each product choose."""

    def __init__(self) -> None:
        AllExperts.__init__(self, TorchOps())
        self.chosen: list[Tensor] = []

    def __call__(self, x: Tensor, chosen: Tensor, gains: Tensor, experts: Any) -> Tensor:
        self.chosen.append(chosen)
        return AllExperts.__call__(self, x, chosen, gains, experts)


@torch.inference_mode()
def test_rows_in_vain_of_the_last_stretch_choose_no_other_experts(tiny_models: Path) -> None:
    driver, experts = PieceDriver(tiny_models / "qwen3_moe", Repeating()), ExpertsOfSteps()
    driver.executor._decoder._ops.grouped = experts
    prompt = random_tokens(100, 1)
    driver.open(0, prompt)
    driver.step([replace(extend(0, prompt, 0, 100), wants_prompt_logprobs=False)])
    assert len(experts.chosen[-1]) == 32
    assert (experts.chosen[-1] == experts.chosen[-1][0]).all()


@torch.inference_mode()
def test_queries_keys_and_values_are_gone_while_the_feed_forward_part_computes(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the residual stream before it: a step's memory is largest there."""
    standing: list[ReferenceType[Tensor]] = []
    num_alive: list[int] = []
    prepared, compute = OwnStretches._prepared, DenseWeights.compute

    def noted(*args: Any) -> Standing:
        found = prepared(*args)
        standing[:] = [ref(tensor) for tensor in (found.x, *found.meeting, *found.waiting)]
        return found

    def counted(*args: Any) -> Tensor:
        num_alive.append(sum(tensor() is not None for tensor in standing))
        return compute(*args)

    monkeypatch.setattr(OwnStretches, "_prepared", noted)
    monkeypatch.setattr(DenseWeights, "compute", counted)
    driver, prompt = PlainDriver(tiny_models / "qwen3"), random_tokens(100, 1)
    driver.open(0, prompt)
    driver.step([extend(0, prompt, 0, 100)])
    assert num_alive
    assert not any(num_alive)


def test_what_a_recording_allocated_is_gone_when_another_is_replayed() -> None:
    """So that tests see what a piece leaves in memory that another one uses."""
    tape, numbers, found = TorchTape(), torch.arange(3.0), []
    kept = torch.zeros(3)
    first = tape.record(lambda: found.append(numbers * 2))
    second = tape.record(partial(_put_next, numbers, kept))
    numbers += 1
    first()
    assert found[0].tolist() == [2, 4, 6]
    second()
    assert found[0].isnan().all()
    assert kept.tolist() == [2, 3, 4]
    assert numbers.tolist() == [1, 2, 3]


def _put_next(numbers: Tensor, kept: Tensor) -> None:
    kept.copy_(numbers + 1)


# ---------------------------------------------------------------- which steps


def test_numbers_of_tokens() -> None:
    most = token_bucket(2048)
    buckets = [token_bucket(number) for number in range(1, most + 1)]
    assert sorted(set(buckets), reverse=True) == token_buckets(most)
    assert most == 2048
    assert len(token_buckets(most)) == 32
    for number, bucket in enumerate(buckets, 1):
        assert 0 <= bucket - number < 32 or bucket - number <= number / 8
        assert token_bucket(bucket) == bucket


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "qwen3_next"])
def test_a_large_model_has_no_long_steps_in_pieces(tiny_models: Path, name: str) -> None:
    spec = load_spec(tiny_models / name)
    assert most_piece_tokens(spec, 100_000) == 2048
    assert most_piece_tokens(spec, 300) == 320
    wide = replace(spec, hidden_size=1 << 17)
    assert most_piece_tokens(wide, 100_000) in range(32, 2048, 32)
    assert most_piece_tokens(replace(spec, hidden_size=1 << 34), 100_000) == 32


class Uncounted(PieceDriver):
    """Counts the rows of experts on the host."""

    make_ops = staticmethod(lambda *_: TorchOps())


def test_experts_counted_on_the_host_are_no_pieces(tiny_models: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    driver = Uncounted(tiny_models / "qwen3_moe", TorchTape())
    assert driver.executor.piece_tokens is None
    lines = [record.message for record in caplog.records if record.message.startswith("CUDA graphs")]
    assert lines == ["CUDA graphs: none of this model's steps (the rows of its experts are counted on the host)"]


def test_a_line_says_what_is_recorded(tiny_models: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    driver = PieceDriver(tiny_models / "llama", TorchTape())
    assert driver.executor.piece_tokens == 128
    lines = [record.message for record in caplog.records if record.message.startswith("CUDA graphs")]
    assert lines == [
        "CUDA graphs: none of decode steps (its attention backend has no such steps)",
        "CUDA graphs: of all other steps of up to 128 tokens, in pieces between attention",
    ]


# ---------------------------------------------------------------- what fails


class Failing(TorchTape):
    """The recording of this number ends with an error, behind what it computed."""

    def __init__(self, number: int) -> None:
        TorchTape.__init__(self)
        self._number = number

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        replay = TorchTape.record(self, run)
        if self.num_recorded == self._number:
            raise RuntimeError("operation not permitted when stream is capturing\nand a page more")
        return replay


@pytest.mark.parametrize(
    ("number", "what"),
    [(1, "96 tokens"), (2, "96 tokens"), (4, "96 tokens"), (5, "64 tokens"), (8, "64 tokens")],
)
def test_where_a_recording_fails_steps_go_on_without(
    tiny_models: Path, number: int, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The first of all, one in the middle, a last stretch, and likewise in a later step."""
    tape = Failing(number)
    driver = PieceDriver(tiny_models / "llama", tape)
    assert_same(told(driver), told(PlainDriver(tiny_models / "llama")))
    assert tape.num_recorded == number
    pieces = pieces_of(driver)
    assert not (pieces._layout or pieces._begun or pieces._ended)
    warnings = [record.message for record in caplog.records if record.message.startswith("CUDA graphs")]
    assert warnings == [
        f"CUDA graphs: no pieces from now on; to record {what} ends with "
        "RuntimeError: operation not permitted when stream is capturing"
    ]


def test_a_last_stretch_that_fails_alone_is_told(tiny_models: Path, caplog: pytest.LogCaptureFixture) -> None:
    tape, prompt = Failing(5), random_tokens(180, 1)
    driver = PieceDriver(tiny_models / "llama", tape)
    driver.open(0, prompt)
    driver.step([replace(extend(0, prompt, 0, 90), wants_prompt_logprobs=False)])
    driver.step([extend(0, prompt, 90, 180)])
    assert tape.num_recorded == 5
    assert "to record the last stretch of 96 tokens ends with" in caplog.text


def test_buffers_that_cannot_be_had_leave_steps_as_they_are(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = PieceDriver(tiny_models / "llama", TorchTape())
    monkeypatch.setattr(pieces_of(driver), "_laid_out", lambda: [][1])
    assert_same(told(driver), told(PlainDriver(tiny_models / "llama")))
    assert caplog.text.count("no pieces from now on") == 1


class DraftingPieces(DraftingDriver):
    """Would be in pieces."""

    graph_rows = 4
    piece_tokens = 128

    def recorder(self, device: torch.device) -> TorchTape:
        return TorchTape()


def test_steps_of_a_model_with_a_draft_head_are_in_no_pieces(
    tiny_models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert DraftingPieces(tiny_models, "llama_eagle3").executor.piece_tokens is None
    assert caplog.messages[-1] == (
        "CUDA graphs: none of other steps (its draft head reads what pieces of later layers overwrite)"
    )


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_buffers_take_no_more_than_is_counted(tiny_models: Path, name: str) -> None:
    """What stands between pieces, once for all layers and numbers of tokens."""
    driver = PieceDriver(tiny_models / name, TorchTape())
    pieces_of(driver)._layout = pieces_of(driver)._laid_out()
    taken = {tensor.data_ptr(): tensor.nbytes for tensor in buffers(driver)}
    sizes = StepSizes("cuda", max_rows=28, step_len=100, context_len=512, split_tokens=32, page_size=16)
    spec = driver.executor._decoder.spec
    of_pieces = len(token_buckets(128)) * (len(spec.layers) + 1) * (100 << 10)
    assert 0 < sum(taken.values()) <= (pieces_bytes(spec, sizes) - of_pieces) / 2


# ---------------------------------------------------------------- by Triton's kernels


class TritonPlain(PlainDriver):
    attention = "triton"
    make_ops = triton_ops_of("cpu")


class TritonPieces(PieceDriver):
    """Decode steps are recorded, too."""

    attention = "triton"
    make_ops = triton_ops_of("cpu")
    piece_tokens = 64


def check_kernels(folder: Path) -> None:
    tape = StepTape()
    driver = TritonPieces(folder, tape)
    assert steps_of_kernels(driver) == steps_of_kernels(TritonPlain(folder))
    assert tape.num_replayed > tape.num_recorded > 0
    assert not pieces_of(driver).recordings.has_failed


def steps_of_kernels(driver: PlainDriver) -> Sequence[object]:
    """Chunks, mixed steps and decode steps in turn, as many experts' rows in each that blocks are as tall."""
    prompts, items = [random_tokens(length, length) for length in (37, 20)], []
    for row, prompt in enumerate(prompts):
        driver.open(row, prompt)
    items.append(driver.step([extend(0, prompts[0], 0, 30)]).items)
    items.append(driver.step([extend(0, prompts[0], 30, 37)]).items)
    items.append(driver.step([driver.decode(0, 37), extend(1, prompts[1], 0, 20)]).items)
    items.append(driver.step([driver.decode(0, 38), driver.decode(1, 20)]).items)
    items.append(driver.step([driver.decode(0, 39), driver.decode(1, 21)]).items)
    return items


@needs_triton
@pytest.mark.parametrize(
    ("name", "layers"),
    cells(
        [("llama", (0, 1)), ("qwen3_moe", (0, 1)), ("gpt_oss", (0, 1)), ("qwen3_5_text", (0, 1))],
        lambda name, _: name in ("gpt_oss", "qwen3_5_text"),
    ),
)
def test_pieces_by_kernels(process: KernelProcess, tiny_models: Path, tmp_path: Path, name: str, layers: Any) -> None:
    """Experts all at once are in them, too. Decode steps between them are recorded whole, from the same memory."""
    run_in(process, check_kernels, with_parts(tiny_models / name, tmp_path, layers))
