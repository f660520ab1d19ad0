"""`deltaserve bench --sweep`: one workload at several strengths."""

import argparse
import json
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from deltaserve.commands.bench.command import add_arguments, run
from deltaserve.commands.bench.sweep import Sweep, SweepKind
from deltaserve.commands.bench.sweep_chart import require_chart
from tests.commands.bench.answering_server import AnsweringServer, Manners, serving

RECALL = ("--workload", "recall", "--num-documents", "2", "--conversations-per-document", "3", "--num-turns", "1")
WORKLOAD = (*RECALL, "--num-facts", "8", "--num-noise", "0", "--answer-len", "4")


def parse(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench")
    add_arguments(parser)
    return parser.parse_args(options)


def rows_of(out: str, heading: str = "output tok/s") -> list[list[str]]:
    """Rows of the table with that heading."""
    lines = out.splitlines()
    (first,) = [index for index, line in enumerate(lines) if heading in line]
    return [line.split() for line in takewhile(lambda line: line[:10].strip().isdigit(), lines[first + 1 :])]


def test_each_concurrency_gets_prompts_of_its_own_and_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server, report = AnsweringServer(Manners()), tmp_path / "report.json"
    with serving(server) as url:
        options = ("--sweep", "concurrency=1,4", "--flush-cache", "--output-file", str(report))
        assert run(parse("--base-url", url, *WORKLOAD, *options)) == 0
    told = json.loads(report.read_text())
    assert [point["concurrency"] for point in told["points"]] == [1, 4]
    assert told["settings"]["sweep"] == "concurrency=1,4"
    summaries: list[dict[str, Any]] = [point["summary"] for point in told["points"]]
    assert [summary["answers_right"] for summary in summaries] == [6, 6]
    assert summaries[0]["peak_concurrency"] == 1
    assert summaries[1]["peak_concurrency"] <= 4
    assert server.flushes == 2
    measured = [tuple(body["prompt"]) for body in server.bodies[-12:]]
    first, second = set(measured[:6]), set(measured[6:])
    assert not first & second
    rows = rows_of(capsys.readouterr().out)
    assert [(row[0], row[-1]) for row in rows] == [("1", "6/6"), ("4", "6/6")]


def test_a_sweep_says_what_the_server_did_with_the_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(AnsweringServer(Manners(tells_timings=True))) as url:
        assert run(parse("--base-url", url, *WORKLOAD, "--sweep", "concurrency=1,2", "--warmup-requests", "1")) == 0
    out = capsys.readouterr().out
    assert [(row[0], row[-1]) for row in rows_of(out)] == [("1", "6/6"), ("2", "6/6")]
    for strength, row in zip(("1", "2"), rows_of(out, "by prefill"), strict=True):
        assert row == [strength, "50%", "50%", "50%", "50%", "3,000"]
    for strength, row in zip(("1", "2"), rows_of(out, "wait, prefill"), strict=True):
        assert row == [strength, "0%", "25%", "40", "90"]


def test_a_sweep_over_the_rate_keeps_the_limit_of_concurrency(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    with serving(AnsweringServer(Manners())) as url:
        options = ("--sweep", "rate=1000,2000", "--max-concurrency", "1", "--output-file", str(report))
        assert run(parse("--base-url", url, *WORKLOAD, *options)) == 0
    points = json.loads(report.read_text())["points"]
    assert [(point["rate"], point["summary"]["num_completed"]) for point in points] == [(1000, 6), (2000, 6)]
    assert all(point["summary"]["peak_concurrency"] == 1 for point in points)


def test_failures_have_a_column_and_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    manners = Manners(fail_from=1 + 6)  # the dialect, and the first strength
    with serving(AnsweringServer(manners)) as url:
        options = ("--sweep", "concurrency=1,2", "--warmup-requests", "0")
        assert run(parse("--base-url", url, *WORKLOAD, *options)) == 1
    told = capsys.readouterr()
    rows = rows_of(told.out)
    assert [row[-2] for row in rows] == ["0", "6"]
    assert rows[1][3:6] == ["-", "/", "-"]
    assert "6 x ServerError: the worker died" in told.err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--sweep", "rate=1", "--request-rate", "2"], "--request-rate 2.0 and a sweep over it: give one of them"),
        (["--sweep", "concurrency=1", "--max-concurrency", "2"], "--max-concurrency 2 and a sweep over it"),
        (["--sweep-png", "chart.png"], "--sweep-png draws what --sweep measures: give both"),
    ],
)
def test_options_that_make_no_sense_together(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(parse("--base-url", "http://127.0.0.1:9", *options)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in line


def test_a_chart_without_its_library_is_refused_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    options = ("--sweep", "concurrency=1", "--sweep-png", str(tmp_path / "chart.png"))
    assert run(parse("--base-url", "http://127.0.0.1:9", *options)) == 2
    assert capsys.readouterr().err == (
        "bench: --sweep-png needs matplotlib: pip install matplotlib (the extra `plot`)\n"
    )


def test_a_chart_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    chart = tmp_path / "chart.png"
    with serving(AnsweringServer(Manners(tells_timings=True))) as url:
        options = ("--sweep", "concurrency=1,2", "--sweep-png", str(chart))
        assert run(parse("--base-url", url, *WORKLOAD, *options)) == 0
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert f"chart: {chart}" in capsys.readouterr().out


def test_a_chart_that_could_not_be_written_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    for path, complaint in ((tmp_path / "chart.jpg", "must end in .png"), (tmp_path / "no" / "c.png", "no folder")):
        with pytest.raises(Exception, match=complaint):
            require_chart(path)


def test_strengths_are_read_as_they_are_written() -> None:
    assert Sweep.parse("concurrency=1,8,2") == Sweep(SweepKind.CONCURRENCY, (1, 8, 2))
    assert str(Sweep.parse("rate=0.5,10")) == "rate=0.5,10"


@pytest.mark.parametrize(
    "text", ["1,2", "rate", "rate=", "rate=0", "rate=-1", "rate=nan", "rate=inf", "rate=1,1", "concurrency=1.5", "x=1"]
)
def test_unreadable_strengths_are_refused_with_an_example(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--sweep", text)
    said = capsys.readouterr().err
    assert "such as concurrency=1,2,4 or rate=0.5,1" in said
    assert "SweepKind" not in said
