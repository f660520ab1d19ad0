"""Decode steps as CUDA graphs: what they compute when they are replayed is what the same calls compute."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
import torch

from deltaserve.compute.executor.step_recorder import GraphRecorder
from deltaserve.core.layout.dtype import DType
from tests.compute.attention.attention_world import Shape
from tests.compute.attention.fixed_states_checks import check_fixed_states
from tests.compute.attention.test_fixed_step import LENS, check_recorded
from tests.compute.attention.triton_process import needs_triton
from tests.compute.executor.replayed_drafts import (
    DECODING,
    NUM_VERIFYING,
    EagerDrafts,
    RecordedDrafts,
    Replays,
    answers,
    verify_together,
)
from tests.compute.executor.replaying import EagerDriver, Repeating, ReplayingDriver, decode_together
from tests.compute.layers.dense_heads import HEADS
from tests.gpu.unwaiting import check_launch_waits_for_nothing

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"), needs_triton]
SHAPE = Shape(16, 64, 1, 2, 4, 64, DType.BFLOAT16, DType.BFLOAT16, "cuda", uses_triton=True)


@pytest.fixture
def recorder() -> GraphRecorder:
    return GraphRecorder(torch.device("cuda"))


@pytest.mark.parametrize("window_len", [None, 70])
@pytest.mark.parametrize("kv_dtype", [DType.BFLOAT16, DType.FP8_E4M3])
def test_attention_of_other_steps(recorder: GraphRecorder, kv_dtype: DType, window_len: int | None) -> None:
    check_recorded(replace(SHAPE, kv_dtype=kv_dtype, window_len=window_len), recorder)


LATENTS = replace(SHAPE, kv_heads=1, group_size=16, head_dim=576, latent_dim=512)


def test_attention_over_latents(recorder: GraphRecorder) -> None:
    check_recorded(LATENTS, recorder)


@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, window_len=70), LATENTS], ids=["full", "window", "latents"])
def test_attention_of_rows_of_a_few_positions(recorder: GraphRecorder, shape: Shape) -> None:
    """As guesses are verified."""
    check_recorded(shape, recorder, None, LENS)


EXPERTS = ("qwen3_moe", "minimax_m2", "deepseek_v3", "gpt_oss")


@pytest.mark.parametrize("ssm", [DType.FLOAT32, DType.BFLOAT16])
def test_recurrent_states_of_other_steps(recorder: GraphRecorder, ssm: DType) -> None:
    check_fixed_states("cuda", recorder, ssm)


@pytest.mark.parametrize("name", ["llama", "llama_bf16", "qwen3", "gemma3_text", "qwen3_5_text", *EXPERTS])
def test_replays_compute_what_their_calls_compute(tiny_models: Path, name: str) -> None:
    """Products of as many rows, so to the bit. Launched ahead, whether rows share what they read or not."""
    want = decode_together(ReplayingDriver(tiny_models / name, Repeating(), "cuda"))
    for shares in (True, False):
        recorder = GraphRecorder(torch.device("cuda"))  # a pool belongs to one executor's graphs
        got = decode_together(ReplayingDriver(tiny_models / name, recorder, "cuda"), shares)
        assert got.tokens == want.tokens
        assert all(torch.equal(*pages) for pages in zip(got.pages, want.pages, strict=True))


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text", *EXPERTS])
def test_tokens_are_those_of_steps_without_graphs(tiny_models: Path, recorder: GraphRecorder, name: str) -> None:
    replaying = decode_together(ReplayingDriver(tiny_models / name, recorder, "cuda"))
    assert replaying.tokens == decode_together(EagerDriver(tiny_models / name, "cuda")).tokens


@pytest.mark.parametrize("name", HEADS)
def test_replays_verify_and_guess_as_their_calls_do(tiny_models: Path, recorder: GraphRecorder, name: str) -> None:
    """Products of as many rows, so to the bit: what is drawn, guesses, pages of the model and of the head."""
    calling, driver = (RecordedDrafts(tiny_models, name, by, "cuda") for by in (Repeating(), recorder))
    right = answers(RecordedDrafts(tiny_models, name, Repeating(), "cuda"))
    want, replays = verify_together(calling, right), Replays()
    with replays.counted():
        got = verify_together(driver, right)
    recorded = driver.executor._recorded
    assert recorded is not None and not recorded.recordings.has_failed, "see the warning that begins with CUDA graphs"
    assert replays.num_verifying == (0 if driver.executor._decoder.spec.recurrent else NUM_VERIFYING)
    assert replays.num_passes >= len(DECODING)
    for step, (ours, theirs) in enumerate(zip(got.results, want.results, strict=True)):
        assert ours == theirs, f"step {step}"
    assert all(torch.equal(*pages) for pages in zip(got.pages, want.pages, strict=True))


@pytest.mark.parametrize("name", HEADS)
def test_rows_with_guesses_draw_what_they_do_without_graphs(
    tiny_models: Path, recorder: GraphRecorder, name: str
) -> None:
    right = answers(EagerDrafts(tiny_models, name, "cuda"))
    want = verify_together(EagerDrafts(tiny_models, name, "cuda"), right)
    got = verify_together(RecordedDrafts(tiny_models, name, recorder, "cuda"), right)
    for step, (ours, theirs) in enumerate(zip(got.results, want.results, strict=True)):
        assert [one.drawn for one in ours] == [one.drawn for one in theirs], f"step {step}"


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text", *EXPERTS])
def test_a_replay_waits_for_nothing(tiny_models: Path, recorder: GraphRecorder, name: str) -> None:
    driver = ReplayingDriver(tiny_models / name, recorder, "cuda")
    check_launch_waits_for_nothing(driver)
    assert driver.executor._recorded is not None
    assert not driver.executor._recorded.recordings.has_failed


def test_a_capture_that_fails_leaves_the_stream_as_it_was(recorder: GraphRecorder) -> None:
    before, numbers = torch.cuda.current_stream(), torch.arange(8, device="cuda")
    with pytest.raises(RuntimeError):
        recorder.record(lambda: print(numbers.sum().item()))
    assert torch.cuda.current_stream() == before
    assert int((numbers + 1).sum()) == 36
    found: list[torch.Tensor] = []
    recorder.record(lambda: found.append(numbers + 2))()
    assert int(found[-1].sum()) == 44, "another can be recorded"


def test_graphs_that_are_garbage_do_not_end_a_capture(recorder: GraphRecorder) -> None:
    """Python's collector would free them in the middle of it: CUDA permits no such call then."""
    numbers, found = torch.arange(8, device="cuda"), torch.zeros(8, device="cuda", dtype=torch.int64)

    def double() -> None:
        for _ in range(2000):  # containers enough for the collector to begin
            _ = [[], {}]
        kept: list[list[int]] = [[] for _ in range(5000)]
        found.copy_(numbers * 2)
        assert len(kept) == 5000

    for _ in range(5):
        cycle: list[object] = [recorder.record(double)]
        cycle.append(cycle)
        del cycle
        replay = recorder.record(double)
    replay()
    assert found.tolist() == [2 * number for number in range(8)]


def test_other_threads_may_use_the_device_meanwhile(recorder: GraphRecorder) -> None:
    ends, numbers, found = Event(), torch.arange(8, device="cuda"), torch.zeros(8, device="cuda")

    def double() -> None:
        found.copy_(numbers * 2)

    def use_device() -> int:
        count = 0
        while not ends.is_set():
            torch.ones(1 + count * 1000, device="cuda").sum().item()
            count += 1
        return count

    with ThreadPoolExecutor(1) as threads:
        using = threads.submit(use_device)
        try:
            replays = [recorder.record(double) for _ in range(20)]
        finally:
            ends.set()
        assert using.result()
    numbers += 1
    replays[-1]()
    assert found.tolist() == [2 * (number + 1) for number in range(8)]
