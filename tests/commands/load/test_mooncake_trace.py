"""Recorded traces: lines that are requests, times, and prompts that begin alike as far as the trace says."""

import json
from pathlib import Path
from typing import Any

import pytest

from deltaserve.commands.bench.command import run
from deltaserve.commands.load.mooncake_trace import TraceScale, TraceTraffic, read_trace
from deltaserve.commands.load.traffic import TokenRange
from tests.commands.bench.answering_server import AnsweringServer, Manners, serving
from tests.commands.bench.test_sweep import parse

SYSTEM = [0, 1]
LINES: list[dict[str, Any]] = [
    {"timestamp": 27000, "input_length": 1400, "output_length": 64, "hash_ids": [*SYSTEM, 2]},
    {"timestamp": 27900, "input_length": 2000, "output_length": 32, "hash_ids": [*SYSTEM, 2, 3]},
    {"timestamp": 27300, "input_length": 1536, "output_length": 16, "hash_ids": [*SYSTEM, 4]},
]


def written(folder: Path, *lines: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def test_requests_come_by_time_and_share_what_the_trace_says(tmp_path: Path) -> None:
    requests = read_trace(written(tmp_path, *LINES, ""))
    assert [request.at_s for request in requests] == pytest.approx([0.0, 0.3, 0.9])
    first, second, third = TraceTraffic(requests, TokenRange()).generate(seed=3)
    assert [len(each.turns[0].tokens) for each in (first, second, third)] == [1400, 1536, 2000]
    assert [each.turns[0].output_len for each in (first, second, third)] == [64, 16, 32]
    assert [each.turns[0].known_len for each in (first, second, third)] == [0, 1024, 1536]
    tokens = [each.turns[0].tokens for each in (first, second, third)]
    assert tokens[0][:1024] == tokens[1][:1024] == tokens[2][:1024]
    assert tokens[0] == tokens[2][:1400]
    assert tokens[1][1024:1100] != tokens[0][1024:1100]
    assert TraceTraffic(requests, TokenRange()).generate(seed=4)[0] != first


def test_lengths_and_times_are_scaled_alike(tmp_path: Path) -> None:
    requests = read_trace(written(tmp_path, *LINES))
    small = TraceTraffic(requests, TokenRange(), TraceScale(block_len=32, speed=3.0)).generate(seed=3)
    turns = [each.turns[0] for each in small]
    assert [len(turn.tokens) for turn in turns] == [88, 96, 125]
    assert [turn.output_len for turn in turns] == [4, 1, 2]
    assert [turn.known_len for turn in turns] == [0, 64, 96]
    assert [each.arrives_s for each in small] == pytest.approx([0.0, 0.1, 0.3])
    assert turns[0].tokens == turns[2].tokens[:88]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2 is no JSON"),
        ("[1]", "line 2 is no JSON object"),
        ({**LINES[0], "hash_ids": []}, "line 2 has no hash_ids"),
        ({**LINES[0], "hash_ids": [1, "a", 2]}, "line 2 has no hash_ids"),
        ({**LINES[0], "input_length": 1025 + 512}, "line 2 has 3 hash_ids, input_length 1537 takes 4"),
        ({**LINES[0], "output_length": -1}, "line 2 has a output_length that is no whole number"),
        ({**LINES[0], "timestamp": "now"}, "line 2 has a timestamp that is no whole number"),
    ],
)
def test_lines_that_are_no_requests_are_named(tmp_path: Path, line: object, complaint: str) -> None:
    path = written(tmp_path, LINES[0], line)
    with pytest.raises(ValueError, match=complaint.replace("[", r"\[")):
        read_trace(path)
    assert len(read_trace(path, most=1)) == 1


def test_files_without_requests_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no request is in it"):
        read_trace(written(tmp_path, ""))
    with pytest.raises(ValueError, match="No such file"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="no UTF-8"):
        read_trace(tmp_path / "bytes")


def test_bench_sends_a_trace_at_its_times(tmp_path: Path) -> None:
    report, trace, server = tmp_path / "report.json", written(tmp_path, *LINES), AnsweringServer(Manners())
    options = ("--workload", "trace", "--trace", str(trace), "--trace-block-len", "16", "--output-file", str(report))
    with serving(server) as url:
        assert run(parse("--base-url", url, *options)) == 0
    requests = json.loads(report.read_text())["requests"]
    assert [request["prompt_len"] for request in requests] == [44, 48, 62]
    for request, at_s in zip(requests, (0.0, 0.3, 0.9), strict=True):
        assert request["sent_s"] > at_s - 0.01


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--workload", "trace"), "needs --trace FILE"),
        (("--trace", "x.jsonl"), "--trace and --workload shared-prefix: give one of them"),
        (("--workload", "trace", "--trace", "none.jsonl"), "none.jsonl: No such file"),
        (("--workload", "trace", "--trace", "x", "--request-rate", "2"), "a trace has times of its own"),
        (("--workload", "trace", "--trace", "x", "--sweep", "rate=1,2"), "a trace has times of its own"),
        (("--workload", "trace", "--trace", "x", "--trace-speed", "0"), "its speed is positive"),
    ],
)
def test_options_that_contradict_a_trace_are_refused(
    options: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(parse(*options)) == 2
    assert complaint in capsys.readouterr().err
