"""The benchmark of a GPU: its loads and arithmetic, how it ends where it cannot run, and every part on a CPU."""

import json
import subprocess
import sys
from argparse import ArgumentTypeError
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks import bench_gpu, bench_gpu_pages
from benchmarks.bench_agents import LENGTHS
from benchmarks.bench_gpu import (
    BUDGET_S,
    LIMITS_S,
    PARTS,
    PartResult,
    Run,
    missing_modules,
    run_part,
    run_parts,
    shown,
    table,
    wanted_parts,
)
from benchmarks.bench_gpu_engine import StepTime, StepTimes
from benchmarks.bench_gpu_http import refused
from benchmarks.bench_gpu_loads import FULL, SMALL, agents_sessions, alike, conversations, g1, shared_prefixes
from benchmarks.bench_gpu_model import SHAPES
from benchmarks.bench_gpu_pages import PagesFailed, measured
from deltaserve.commands.load.load_client import Measurement
from deltaserve.commands.load.record import RequestRecord
from tests.patience import PATIENCE_S

VOCAB = SHAPES["0.6b"].vocab_size
FAILED = PartResult("http", 1.0, "the server did not get ready", [{"name": "a", "value": 1.5, "unit": "ms", "bar": ""}])


def test_g1_is_the_load_of_the_published_figure() -> None:
    asks = g1(FULL, VOCAB)
    assert sum(ask.output_len for ask in asks) == 133_966
    assert sum(len(ask.prompt) for ask in asks) == 142_827


def test_g1_shifted_has_the_same_lengths_and_no_page_in_common() -> None:
    first, second = g1(FULL, VOCAB), g1(FULL, VOCAB, shift=1)
    assert [(len(a.prompt), a.output_len) for a in first] == [(len(a.prompt), a.output_len) for a in second]
    assert not {a.prompt[:64] for a in first} & {a.prompt[:64] for a in second}


def test_shared_prefixes_are_shared_by_groups() -> None:
    asks = shared_prefixes(FULL, VOCAB, 7)
    assert len(asks) == FULL.num_groups * FULL.per_group
    assert len({ask.prompt[: FULL.shared_len] for ask in asks}) == FULL.num_groups
    assert len({ask.prompt for ask in asks}) == len(asks)
    assert {len(ask.prompt) for ask in asks} == {FULL.shared_len + FULL.own_len}


def test_requests_fit_their_model() -> None:
    for sizes, shape in ((FULL, SHAPES["0.6b"]), (SMALL, SHAPES["tiny"])):
        asks = [*g1(sizes, shape.vocab_size), *shared_prefixes(sizes, shape.vocab_size, 1)]
        asks += alike(2, sizes.lone_prompt, sizes.one_output, shape.vocab_size, 1)
        assert all(max(ask.prompt) < shape.vocab_size for ask in asks)
        assert all(len(ask.prompt) + ask.output_len <= sizes.context_len for ask in asks)


def test_conversations_are_single_turns() -> None:
    (ask,) = alike(1, 3, 5, VOCAB, 1)
    (conversation,) = conversations([ask])
    assert [(turn.tokens, turn.output_len) for turn in conversation.turns] == [(ask.prompt, 5)]


@pytest.mark.parametrize(("name", "billions"), [("0.6b", 0.596), ("8b", 8.19)])
def test_shapes_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    assert SHAPES[name].num_values / 1e9 == pytest.approx(billions, rel=0.001)


def test_step_times_are_those_of_the_steps_with_most_rows() -> None:
    times = StepTimes([StepTime(1, False, 0.5, 0.5, 0.0)])
    for number in range(5):
        times.add(StepTime(64, True, 0.002, 0.001, 1.0 + 0.004 * number))
    times.add(StepTime(63, True, 0.9, 0.9, 9.0))
    assert times.medians_ms() == pytest.approx(
        {"rows": 64, "on the stream": 2, "host in launch": 1, "from step to step": 4}
    )


def test_a_refusal_is_told_from_another_failure() -> None:
    def record(error: str | None) -> RequestRecord:
        return RequestRecord(0, 0, 0.0, 10, (), 0.75, 0, 0, None, 0, error)

    errors = [None, "ServerError: HTTP 429: the estimated wait is 602.2 s", "ReadTimeout: ", "ServerError: HTTP 500: x"]
    assert refused(Measurement(tuple(map(record, errors)), 1.0)) == 1


def test_the_table_names_what_failed_and_keeps_its_figures() -> None:
    text = table({"card": "H100"}, [FAILED])
    assert "| a | 1.5 ms |  |" in text
    assert "| **http** | failed: the server did not get ready | |" in text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(14494.4, "tokens/s", "14,494 tokens/s"), (0.28, "ms", "0.28 ms"), ("4 of 4", "", "4 of 4"), (256, "", "256")],
)
def test_values_are_shown_with_their_units(value: float | str, unit: str, text: str) -> None:
    assert shown({"name": "x", "value": value, "unit": unit, "bar": ""}) == text


def test_parts_run_in_one_order() -> None:
    assert wanted_parts("http, card") == ["card", "http"]
    with pytest.raises(ArgumentTypeError, match="no part is called speed"):
        wanted_parts("card,speed")


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    command = [sys.executable, "-m", "benchmarks.bench_gpu"]
    environment = {**bench_gpu._environment(), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "sees no CUDA device here" in done.stderr


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_gpu, "NEEDED", ("torch", "no_such_package"))
    assert missing_modules(["card"]) == ["no_such_package"]
    assert bench_gpu.main(["--parts", "card"]) == 2
    assert "not installed: no_such_package" in capsys.readouterr().err


def test_a_part_that_fails_is_named_with_its_cause_and_the_next_one_runs(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text("{}")  # taken for a model that was made already
    failed, done = run_parts(["engine", "card"], Run("cpu", "small", tmp_path), PATIENCE_S)
    assert failed.problem is not None
    assert "model.safetensors" in failed.problem
    assert (done.problem, len(done.figures)) == (None, 2)


def test_a_part_without_time_is_left_out(tmp_path: Path) -> None:
    (left_out,) = run_parts(["card"], Run("cpu", "small", tmp_path), 0.0)
    assert left_out.problem == "left out: the time is up"


def test_the_budget_holds_the_most_valuable_parts_and_what_is_left_out_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert PARTS[:5] == ("card", "recall", "pages", "engine", "http")
    assert sum(LIMITS_S[part] for part in PARTS[:5]) <= BUDGET_S
    results = run_parts(["agents", "big"], Run("cpu", "small", tmp_path), 0.0)
    assert "left out, as the time was up: --parts agents,big" in capsys.readouterr().err
    assert "| **big** | left out: the time is up | |" in table({}, results)


def test_pages_go_from_one_process_to_another(tmp_path: Path) -> None:
    """Fails where the reader has other bytes than the writer."""
    result = run_part("pages", Run("cpu", "small", tmp_path), PATIENCE_S)
    assert result.problem is None
    runs = [figure["name"].removeprefix("pages of another worker, runs of ") for figure in result.figures]
    assert runs == ["64 KiB", "256 KiB", "1024 KiB", "4096 KiB", "16384 KiB"]
    assert all(figure["value"] > 0 for figure in result.figures)


def test_a_reader_with_other_bytes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gpu_pages, "_send", lambda transport, copies: None)
    with pytest.raises(PagesFailed, match="other bytes than the writer, runs of 65536"):
        list(measured("cpu", 1 << 17, 1))


def test_agents_are_those_of_bench_agents() -> None:
    sessions = agents_sessions(FULL, VOCAB, 7)
    assert len(sessions) == FULL.agents.max_concurrency
    assert (*LENGTHS, 64) == tuple(asdict(FULL.agents).values())
    longest = max(sum(len(turn.tokens) + turn.output_len for turn in session.turns) for session in sessions)
    assert longest == 1800 + 10 * (200 + 12) <= FULL.context_len


def test_a_part_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    result = run_part("card", Run("cpu", "small", tmp_path), 0.01)
    assert result.problem is not None
    assert result.problem.startswith("not over after")


def test_the_engine_answers_without_http(tmp_path: Path) -> None:
    result = run_part("engine", Run("cpu", "small", tmp_path), PATIENCE_S)
    assert result.problem is None
    found = {figure["name"]: figure["value"] for figure in result.figures}
    assert found["G1 in process: output tokens"] == sum(ask.output_len for ask in g1(SMALL, 512))
    assert found["one at a time: decode steps, rows"] == 1
    assert found[f"{SMALL.num_many} at once: decode steps, rows"] == SMALL.num_many


@pytest.mark.slow
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    parts = [part for part in PARTS if part != "attention" and (part != "tests" or not torch.cuda.is_available())]
    report = tmp_path / "report.json"
    code = bench_gpu.main(
        ["--device", "cpu", "--parts", ",".join(parts), "--budget-seconds", "3600", "--json", str(report)]
    )
    told = json.loads(report.read_text())["parts"]
    assert [part for part in told if part["problem"] is not None] == []
    assert code == 0
    found = {figure["name"]: figure["value"] for part in told for figure in part["figures"]}
    assert found["failed"] == 0
    assert found["cold burst: refused"] == 0
    assert found["pages of another worker, runs of 64 KiB"] > 0
    assert found["agents unified: requests"] > 0
    assert found["agents unified: prompts by prefill"].startswith("0 of ")
    told = found["agents P/D, all by prefill: prompts by prefill"].split(" of ")
    assert told[0] == told[1]
    assert 1 <= float(found["agents P/D, all by prefill: bytes moved over bytes of the delta"]) < 1.1
    assert found["agents P/D, all by prefill: bytes back to prefill"].replace(",", "").isdigit()
    assert found["G1 over HTTP: output tokens"] == sum(ask.output_len for ask in g1(SMALL, 512))
    assert found["recall-micro unified: right answers"] == found["recall-micro P/D: right answers"] == "4 of 4"
