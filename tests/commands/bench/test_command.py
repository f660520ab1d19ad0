"""`deltaserve bench` from its options to its report."""

import argparse
import json
from pathlib import Path

import pytest

from deltaserve.commands.bench.command import add_arguments, make_traffic, run, what_ran, with_url
from deltaserve.commands.load import moved_bytes
from tests.commands.bench.answering_server import AnsweringServer, Manners, serving


def parse(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench")
    add_arguments(parser)
    return parser.parse_args(options)


RECALL = ("--workload", "recall", "--num-documents", "2", "--conversations-per-document", "2", "--num-turns", "2")


def test_recall_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server, report = AnsweringServer(Manners()), tmp_path / "report.json"
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("# mine\nsecret-of-mine tenant\n")
    with serving(server) as url:
        options = (*RECALL, "--num-facts", "8", "--num-noise", "0", "--api-key-file", str(key), "--flush-cache")
        code = run(
            parse("--base-url", f"{url}/v1", *options, "--output-file", str(report), "--extra-body", '{"top_k": 1}')
        )
    assert code == 0
    assert "answers right" in capsys.readouterr().out
    text = report.read_text()
    assert "secret-of-mine" not in text
    assert server.authorizations == {"Bearer secret-of-mine"}
    summary = json.loads(text)["summary"]
    assert (summary["num_completed"], summary["answers_right"], summary["answers_expected"]) == (8, 8, 8)
    assert server.flushes == 1
    assert len(server.bodies) == 1 + 2 + 8  # the dialect, the warm-up, the traffic
    assert server.bodies[-1]["top_k"] == 1


AGENTS = (
    *("--workload", "agents", "--agents-recall", "--num-agents", "1", "--sessions-per-agent", "2"),
    *("--num-turns", "3", "--num-facts", "8"),
)


def test_agents_tell_what_moved_and_what_became_of_their_hints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moved_bytes, "LOOK_APART_S", 0.01)
    server, report = AnsweringServer(Manners(tells_timings=True, tells_metrics=True)), tmp_path / "report.json"
    shape = (
        "--num-noise",
        "0",
        "--answer-len",
        "4",
        "--tool-s",
        "0.004",
        "--abandoned-share",
        "0",
        "--fork-share",
        "0",
    )
    with serving(server) as url:
        options = ("--base-url", url, *AGENTS, *shape, "--agents-hints", "--output-file", str(report))
        assert run(parse(*options, "--warmup-requests", "1")) == 0
    hints = [body.get("kv_hints") for body in server.bodies]
    assert hints[:2] == [None, None]  # the dialect and the warm-up
    assert sorted(map(str, hints[2:])) == ["{'done': True}"] * 2 + ["{'retain_s': 0.012}"] * 4
    summary = json.loads(report.read_text())["summary"]
    assert summary["answers_right"] == 6
    assert summary["hint_outcomes"] == {"accepted": 6}
    assert summary["reuse"]["counted"] == {"granted": 1500, "back": 180}
    rows = dict(line.strip().rsplit("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line.strip())
    told = {name.strip(): value.strip() for name, value in rows.items()}
    assert told["bytes moved over bytes of the delta"] == "2.0000"
    assert told["bytes back to prefill"] == "180"
    assert told["hints"] == "6 accepted"


def test_agents_send_no_hints_unasked_and_ask_a_server_without_metrics_once(capsys: pytest.CaptureFixture[str]) -> None:
    server = AnsweringServer(Manners(tells_timings=True))
    with serving(server) as url:
        assert run(parse("--base-url", url, *AGENTS)) == 0
    assert not any("kv_hints" in body for body in server.bodies)
    told = capsys.readouterr().out
    assert "bytes moved " in told
    assert "bytes back" not in told
    assert "hints" not in told


def test_a_report_that_has_no_place_is_refused_before_anything_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = AnsweringServer(Manners())
    with serving(server) as url:
        for path, words in ((tmp_path / "none" / "x.json", "there is no folder"), (tmp_path, "a folder")):
            assert run(parse("--base-url", url, *RECALL, "--output-file", str(path))) == 2
            assert f"bench: --output-file {path}: {words}" in capsys.readouterr().err
    assert server.bodies == []


def test_a_report_that_cannot_be_written_in_the_end_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """What was measured is shown all the same."""
    with serving(AnsweringServer(Manners())) as url:
        assert run(parse("--base-url", url, *RECALL, "--output-file", "/dev/full")) == 1
    out, err = capsys.readouterr()
    assert "answers right" in out
    assert err.splitlines()[-1] == "bench: --output-file /dev/full: No space left on device"


def test_the_cache_is_flushed_where_the_admin_listens() -> None:
    server, admin = AnsweringServer(Manners()), AnsweringServer(Manners())
    with serving(server) as url, serving(admin) as admin_url:
        assert run(parse("--base-url", url, *RECALL, "--flush-cache", "--admin-url", admin_url)) == 0
    assert (server.flushes, admin.flushes) == (0, 1)


@pytest.mark.parametrize("status", [403, 404])
def test_a_cache_that_cannot_be_flushed_says_where_it_could(status: int, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(AnsweringServer(Manners(flush_status=status))) as url:
        assert run(parse("--base-url", url, *RECALL, "--flush-cache")) == 1
        above = f"http://127.0.0.1:{int(url.rpartition(':')[2]) + 1}"
    (line,) = capsys.readouterr().err.splitlines()
    assert f"/flush_cache: HTTP {status}; " in line
    advice = {403: "must be an admin key", 404: f"with keys it is on the admin port: --admin-url {above}"}
    assert line.endswith(advice[status])


def test_a_server_that_wants_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(AnsweringServer(Manners(models_status=401))) as url:
        assert run(parse("--base-url", url, *RECALL)) == 1
    assert "HTTP 401; the server wants a key: --api-key-file" in capsys.readouterr().err


def test_the_report_says_what_was_run(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(AnsweringServer(Manners())) as url:
        assert run(parse("--base-url", f"{url}/v1", *RECALL)) == 0
    ran = "recall: 2 documents with 2 conversations of 2 turns each, 8 requests in all"
    assert capsys.readouterr().out.splitlines()[0] == f"{ran}, to oracle at {url}"


@pytest.mark.parametrize(
    ("workload", "counts"),
    [
        ("shared-prefix", "64 groups of 16 prompts, 1024 requests in all"),
        ("multi-turn", "32 conversations of 4 turns, 128 requests in all"),
    ],
)
def test_the_counts_of_a_workload(workload: str, counts: str) -> None:
    options = parse("--workload", workload, "--base-url", "http://host:1")
    assert what_ran(options, "[m]", make_traffic(options)) == f"{workload}: {counts}, to [m] at http://host:1"


def test_failures_show_in_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(AnsweringServer(Manners(fail_at=4))) as url:
        assert run(parse("--base-url", url, *RECALL, "--warmup-requests", "0")) == 1
    assert "1 x ServerError: the worker died" in capsys.readouterr().err


def test_a_run_in_which_everything_fails_says_what_and_shows_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(AnsweringServer(Manners(fail_from=1))) as url:
        assert run(parse("--base-url", url, *RECALL, "--warmup-requests", "0")) == 1
    told = capsys.readouterr()
    lines = told.err.splitlines()
    assert lines[-2:] == ["bench: none of the 4 requests was completed", "bench: 4 x ServerError: the worker died"]
    assert "latency" not in told.out


def test_no_server_and_bad_options_end_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(parse("--base-url", "http://127.0.0.1:9")) == 1
    assert run(parse("--num-groups", "0")) == 2
    assert run(parse("--request-rate", "-1")) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith("bench: ") for line in lines] == [True, True, True]


@pytest.mark.parametrize(
    ("text", "mode"), [("", 0o600), (" \n", 0o600), ("# x", 0o600), ("\u00e9", 0o600), ("k", 0o644)]
)
def test_a_key_file_that_is_no_secret_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, mode: int
) -> None:
    key = tmp_path / "key"
    key.write_text(text)
    key.chmod(mode)
    assert run(parse("--base-url", "http://127.0.0.1:9", *RECALL, "--api-key-file", str(key))) == 2
    assert f"--api-key-file {key}" in capsys.readouterr().err


def test_each_workload_and_the_names_sglang_gives_its_options() -> None:
    shared = parse("--gsp-num-groups", "3", "--gsp-prompts-per-group", "2", "--gsp-system-prompt-len", "9")
    assert len(make_traffic(shared)) == 6
    assert {len(c.turns[0].tokens) for c in make_traffic(shared)} == {9 + 128}
    turns = parse(
        "--workload", "multi-turn", "--num-conversations", "2", "--num-turns", "5", "--system-prompt-len", "0"
    )
    assert [len(conversation.turns) for conversation in make_traffic(turns)] == [5, 5]
    narrow = parse("--num-groups", "1", "--prompts-per-group", "1", "--token-range", "7:8")
    assert set(make_traffic(narrow)[0].turns[0].tokens) == {7}


def test_the_line_of_sglangs_benchmark_runs_and_names_what_it_ignores(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--backend sglang --host 127.0.0.1 --dataset-name generated-shared-prefix --gsp-num-groups 4"
    line += " --gsp-prompts-per-group 2 --gsp-system-prompt-len 70 --gsp-question-len 10"
    line += " --gsp-output-len 4 --gsp-range-ratio 0.5"
    line += " --max-concurrency 8 --request-rate inf --num-prompts 16"
    with serving(AnsweringServer(Manners())) as url:
        assert run(parse("--port", url.rpartition(":")[2], *line.split())) == 0
    told = capsys.readouterr()
    assert told.err.splitlines()[:2] == [
        "bench: --backend sglang is ignored: every server is spoken to as OpenAI's is",
        "bench: --num-prompts 16 is ignored: the workload has 8 conversations",
    ]
    assert "4 groups of 2 prompts, 8 requests in all" in told.out


def test_host_and_port_are_another_way_to_write_the_url() -> None:
    assert with_url(parse()).base_url == "http://127.0.0.1:30000"
    assert with_url(parse("--port", "8000")).base_url == "http://127.0.0.1:8000"
    assert with_url(parse("--host", "::1")).base_url == "http://[::1]:30000"
    assert with_url(parse("--host", "box", "--port", "1")).base_url == "http://box:1"
    with pytest.raises(ValueError, match="give one of them"):
        with_url(parse("--base-url", "http://box:1", "--port", "2"))


def test_each_request_has_a_connection_of_its_own() -> None:
    """Some servers close connections that wait, just as the next request comes."""
    server = AnsweringServer(Manners())
    load = ["--num-groups", "2", "--prompts-per-group", "3", "--output-len", "2", "--max-concurrency", "1"]
    with serving(server) as url:
        assert run(parse("--base-url", url, *load)) == 0
    assert len(server.client_ports) == len(server.bodies) > 6


def test_fewer_prompts_than_the_workload_has() -> None:
    assert len(make_traffic(parse("--num-groups", "4", "--prompts-per-group", "4", "--num-prompts", "5"))) == 5
    with pytest.raises(ValueError, match="num_prompts is 0"):
        make_traffic(parse("--num-prompts", "0"))
    with pytest.raises(ValueError, match="give one of them"):
        make_traffic(parse("--workload", "recall", "--dataset-name", "generated-shared-prefix"))


@pytest.mark.parametrize("options", [["--workload", "x"], ["--token-range", "9"], ["--extra-body", "[]"]])
def test_unreadable_options_are_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*options)


def test_help_explains_every_option() -> None:
    parser = argparse.ArgumentParser("bench")
    add_arguments(parser)
    assert all(action.help for action in parser._actions)
    text = parser.format_help()
    assert "None" not in text
    assert "--seed N " in text
    assert "(default http://127.0.0.1:30000)" in text
