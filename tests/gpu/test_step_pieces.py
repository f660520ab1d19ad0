"""Steps with prompts in pieces as CUDA graphs: what they compute, and how long they take to launch."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from deltaserve.compute.executor.step_recorder import GraphRecorder, StepRecorder
from deltaserve.control.sched.plan import StepResult
from tests.compute.attention.triton_process import needs_triton
from tests.compute.executor.in_pieces import PieceDriver, PlainDriver, Told, assert_same, told, triton_ops_of
from tests.compute.executor.replaying import Repeating
from tests.compute.executor.test_launched import RULES, LaunchingDriver, outputs, rules
from tests.compute.executor.world import distribution, extend, random_tokens
from tests.gpu.unwaiting import check_that_waits_for_nothing

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"), needs_triton]
NAMES = ("llama", "llama_bf16", "gemma3_text", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "qwen3_5_text")


class PlainOnCard(PlainDriver):
    attention = "triton"
    make_ops = triton_ops_of("cuda")

    def __init__(self, path: Path) -> None:
        PlainDriver.__init__(self, path, "cuda")


class PiecesOnCard(PieceDriver):
    attention = "triton"
    make_ops = triton_ops_of("cuda")

    def __init__(self, path: Path, recorder: StepRecorder | None = None) -> None:
        PieceDriver.__init__(self, path, recorder or GraphRecorder(torch.device("cuda")), "cuda")


class LaunchingPlain(LaunchingDriver, PlainOnCard):
    def __init__(self, path: Path) -> None:
        self.launched = []
        PlainOnCard.__init__(self, path)


class LaunchingPieces(LaunchingDriver, PiecesOnCard):
    def __init__(self, path: Path) -> None:
        self.launched = []
        PiecesOnCard.__init__(self, path)


def pieces_of(driver: PiecesOnCard | LaunchingPieces) -> Any:
    pieces = driver.executor._pieces
    assert pieces is not None
    assert not pieces.recordings.has_failed, "a recording failed: its reason is in the log"
    return pieces


@pytest.mark.parametrize("name", NAMES)
def test_replays_compute_what_their_calls_compute(tiny_models: Path, name: str) -> None:
    """Products of as many rows, so to the bit. Twice: the second time nothing is recorded any more."""
    driver = PiecesOnCard(tiny_models / name)
    assert_same(told(driver), told(PiecesOnCard(tiny_models / name, Repeating())))
    assert pieces_of(driver)._begun


@pytest.mark.parametrize("name", NAMES)
def test_results_are_those_of_steps_without_pieces(tiny_models: Path, name: str) -> None:
    """But for the order in which products of other numbers of rows add up."""
    got, want = told(PiecesOnCard(tiny_models / name)), told(PlainOnCard(tiny_models / name))
    tolerance = 0.2 if name == "llama_bf16" else 2e-2
    assert _worst(got, want) < tolerance


def _worst(got: Told, want: Told) -> float:
    """Largest difference of a log-probability, of all steps before rows draw different tokens."""
    worst = 0.0
    for mine, others in zip(got.items, want.items, strict=True):
        for one, other in zip(mine, others, strict=True):
            pairs = zip(one.prompt_logprobs, other.prompt_logprobs, strict=True)
            for a, b in [
                *pairs,
                *zip([d.logprobs for d in one.drawn], [d.logprobs for d in other.drawn], strict=False),
            ]:
                worst = max(worst, float((distribution(a) - distribution(b)).abs().max()))
        if [[d.token for d in item.drawn] for item in mine] != [[d.token for d in item.drawn] for item in others]:
            break
    return worst


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_tokens_of_steps_launched_ahead(tiny_models: Path, name: str) -> None:
    sampling = [rules(seed, **changes) for seed, changes in enumerate(RULES.values())]
    driver = LaunchingPieces(tiny_models / name)
    assert outputs(driver, sampling) == outputs(LaunchingPlain(tiny_models / name), sampling)
    assert pieces_of(driver)._begun


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_launch_waits_for_nothing(tiny_models: Path, name: str) -> None:
    """Once its number of tokens is recorded."""
    driver, prompts = LaunchingPieces(tiny_models / name), [random_tokens(length, length) for length in (90, 95)]
    driver.open(0, prompts[0], rules(1, temperature=0.8))
    driver.step([replace(extend(0, prompts[0], 0, 90), wants_prompt_logprobs=False)])
    driver.open(1, prompts[1], rules(2, temperature=0.8))
    plan = driver.planned([replace(extend(1, prompts[1], 0, 95), wants_prompt_logprobs=False)])
    check_that_waits_for_nothing(driver, plan)
    assert pieces_of(driver)._begun


class Waiting(GraphRecorder):
    """One of the pieces waits for the device, which ends its capture. Of what is recorded by itself none does."""

    num_replayed = 0

    def record_each(self, runs: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        if len(runs) > 1:
            return GraphRecorder.record_each(self, [runs[0], _wait, *runs[1:]])
        return [partial(self._counted, replay) for replay in GraphRecorder.record_each(self, runs)]

    def _counted(self, replay: Callable[[], None]) -> None:
        self.num_replayed += 1
        replay()


def _wait() -> None:
    torch.zeros(1, device="cuda").item()


def test_a_capture_that_fails_among_others_leaves_steps_as_they_are(
    tiny_models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = PiecesOnCard(tiny_models / "llama", Waiting(torch.device("cuda")))
    assert_same(told(driver), told(PlainOnCard(tiny_models / "llama")))
    assert caplog.text.count("no pieces from now on") == 1


def test_a_capture_that_fails_leaves_decode_steps_to_be_recorded(
    tiny_models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And memory that was kept can be given back."""
    recorder = Waiting(torch.device("cuda"))
    driver = PiecesOnCard(tiny_models / "llama", recorder)
    assert _one_row(driver) == _one_row(PlainOnCard(tiny_models / "llama"))
    assert caplog.text.count("from now on") == 1, "pieces alone end"
    assert recorder.num_replayed >= 3
    torch.cuda.empty_cache()


def _one_row(driver: PlainDriver) -> list[object]:
    """A prompt, and decode steps behind it."""
    prompt = random_tokens(40, 3)
    driver.open(0, prompt)
    items: list[object] = [driver.step([extend(0, prompt, 0, 40)]).items]
    return [*items, *(driver.step([driver.decode(0, 40 + number)]).items for number in range(3))]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "qwen3_next"])
def test_pieces_take_less_of_the_host(tiny_models: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Host time of a launch, and bytes of the recordings."""
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    driver = LaunchingPieces(tiny_models / name)
    in_pieces, plain = _launch_us(driver), _launch_us(LaunchingPlain(tiny_models / name))
    pieces, num_layers = pieces_of(driver), driver.executor._decoder.spec.num_layers
    num_recorded = len(pieces._begun) * num_layers + len(pieces._ended)
    taken = (free - torch.cuda.mem_get_info()[0]) >> 10
    with capsys.disabled():
        print(
            f"\n{name}, {num_layers} layers, 100 tokens: launched in {in_pieces:.0f} us in pieces, {plain:.0f} without"
        )
        print(f"{num_recorded} pieces; both drivers with their graphs take {taken} KiB")
    assert in_pieces < plain


def _launch_us(driver: LaunchingDriver) -> float:
    """Median of 20, each launched when the device has nothing to do."""
    times = []
    for turn in range(25):
        prompt = random_tokens(100, turn)
        driver.open(0, prompt, rules(turn, temperature=0.0), 112)
        chunk = replace(extend(0, prompt, 0, 100), wants_prompt_logprobs=False)
        plan = driver.planned([chunk], closes=[0] if turn else ())
        torch.cuda.synchronize()
        began = time.perf_counter()
        launched = driver.executor.launch(plan)
        times.append(1e6 * (time.perf_counter() - began))
        result: StepResult = launched.wait()
        assert result.items[0].drawn
        driver.free += driver.pages[0]
    return statistics.median(times[5:])
