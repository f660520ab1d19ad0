"""The benchmark beside other servers: arguments, commands, tables, and what happens to a peer that fails."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file

import benchmarks.peers.__main__ as peers
from benchmarks.load_shapes import AgentsShape
from benchmarks.peers.__main__ import SMALL, WORKLOADS, arguments, environments, run_workload, servers_of
from benchmarks.peers.attention import ATTENTION
from benchmarks.peers.comparison import PeerBar, ServerFigures, bars_table, medians, servers_table
from benchmarks.peers.environments import STEPS, CannotInstall, Environment, InstallStep, install
from benchmarks.peers.gguf_folder import write_folder
from benchmarks.peers.servers import (
    SERVERS,
    CannotServe,
    Command,
    Job,
    ServerKind,
    deltaserve_threads,
    running,
    vllm_apart,
)
from deltaserve.commands.load.load_client import Measurement
from deltaserve.commands.load.record import Arrival, RequestRecord
from deltaserve.commands.load.report import as_json, summarize
from deltaserve.launch.compose import free_port
from deltaserve.server.text.text_codec import TextCodec
from tests.fixtures.tiny_gguf import Kind, write_gguf
from tests.fixtures.tiny_models import VARIANTS
from tests.patience import PATIENCE_S

SLOW = ServerFigures(2.0, 128.0, None, 900.0, 1000.0, 40.0, 60.0, 41.0, 512.0, 30.0, 0.0, 0.02, 3.0, 0.1)
FAST = replace(SLOW, requests_per_s=3.0, itl_p50=30.0, cached_share=0.8)
HERE = Environment("deltaserve", Path("/nowhere"))
JOB = Job(Path("/model"), "bfloat16", 4096, 16, (0, 1))


def test_figures_are_those_of_the_client_s_report() -> None:
    arrivals = tuple(Arrival(0.5 + 0.1 * number, 1) for number in range(3))
    record = RequestRecord(0, 0, 0.0, 10, arrivals, 0.75, 3, 5, None, 0, None)
    measurement = Measurement((record,), 2.0, (0.001, 0.001))
    summary = as_json({}, measurement, summarize(measurement))["summary"]
    assert isinstance(summary, dict)
    figures = ServerFigures.of_report(summary, peak_rss_mib=7.0, ready_s=3.0, load=0.5)
    assert (figures.requests_per_s, figures.output_tokens_per_s, figures.cached_share) == (0.5, 1.5, 0.5)
    assert figures.ttft_p50 == pytest.approx(500.0)
    assert figures.itl_p50 == pytest.approx(100.0)
    assert figures.tpot_p50 == pytest.approx(100.0)
    assert (figures.peak_rss_mib, figures.ready_s, figures.load, figures.num_failed) == (7.0, 3.0, 0.5, 0)
    assert figures.client_lag_p99 == pytest.approx(1.0)
    assert figures.bunched_share == 0


def test_medians_are_of_each_figure_and_of_what_was_told() -> None:
    middle = medians([SLOW, FAST, replace(SLOW, requests_per_s=2.5)])
    assert (middle.requests_per_s, middle.itl_p50, middle.cached_share) == (2.5, 40.0, 0.8)
    assert medians([SLOW]).cached_share is None


def test_a_ratio_is_over_the_best_peer_that_ran() -> None:
    rate = PeerBar("rate", "own", ("a", "b"), "requests_per_s", 1.2)
    gap = PeerBar("gap", "own", ("a", "b"), "itl_p50", 1.0, is_upper=True)
    servers = {"own": SLOW, "a": SLOW, "b": FAST}
    assert rate.ratio(servers) == pytest.approx(2 / 3)
    assert gap.ratio(servers) == pytest.approx(4 / 3)
    assert rate.ratio({"own": SLOW, "a": SLOW}) == 1.0
    assert rate.ratio({"own": SLOW}) is None
    assert rate.ratio({"a": SLOW}) is None
    assert (rate.holds(1.2), rate.holds(1.19), gap.holds(1.0), gap.holds(1.01)) == (True, False, True, False)
    lines = bars_table((rate, gap), servers).splitlines()
    assert lines[2:] == ["| rate | >= 1.2 | 0.67 | missed |", "| gap | <= 1 | 1.33 | missed |"]
    assert bars_table((rate, gap), {"own": SLOW}) == ""


def test_the_table_has_a_row_for_each_server_and_a_dash_for_what_is_not_told() -> None:
    head, rule, slow, fast = servers_table({"slow": SLOW, "fast": FAST}).splitlines()
    assert len({line.count("|") for line in (head, rule, slow, fast)}) == 1
    assert slow.startswith("| slow | 2.000 | 128.0 | - | 900 |")
    assert fast.startswith("| fast | 3.000 | 128.0 | 80% | 900 |")


def test_arguments_choose_servers_and_workloads() -> None:
    args = arguments(["there", "--only", "vllm", "deltaserve", "--workloads", "46m", "--serve-args=--page-size 9"])
    assert (args.only, args.workloads, args.serve_args) == (["vllm", "deltaserve"], ["46m"], "--page-size 9")
    of_agents = ["agents", "agents-smollm2"]
    assert arguments(["there"]).workloads == ["46m", "smollm2", "smollm2-folder", *of_agents, "attention"]
    for wrong in (["--only", "sglang"], ["--rounds", "0"], ["--cores", "0"], ["--dtype", "int8"]):
        with pytest.raises(SystemExit):
            arguments(["there", *wrong])


def test_every_server_of_a_workload_and_of_its_bars_is_known() -> None:
    known = {kind.name for kind in SERVERS}
    for workload in WORKLOADS:
        assert set(workload.servers) <= known
        assert {name for bar in workload.bars for name in (bar.server, *bar.peers)} <= set(workload.servers)
    assert SMALL.options[0] == "--num-groups=2"
    assert AgentsShape(1800, 200, 12, 8).options == [
        "--workload=agents",
        *("--system-prompt-len=1800", "--question-len=200", "--output-len=12", "--max-concurrency=8"),
        *("--num-agents=2", "--num-turns=10", "--sessions-per-agent=4"),
    ]
    assert {kind.peer for kind in SERVERS} == {None, *STEPS}


def test_a_gguf_file_as_a_folder_has_its_values_and_its_template(tmp_path: Path) -> None:
    file, reference = write_gguf(VARIANTS["llama"], tmp_path, Kind.F16)
    write_folder(file, folder := tmp_path / "written", torch.float32)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    written, wanted = load_file(folder / "model.safetensors"), load_file(reference / "model.safetensors")
    assert written.keys() <= wanted.keys()
    for name, tensor in written.items():
        torch.testing.assert_close(tensor, wanted[name].float(), rtol=1e-3, atol=1e-3)
    text, asked = TextCodec.load(folder), TextCodec.load(file)
    assert text.has_chat_template
    assert text.encode("a word") == asked.encode("a word")


def test_every_process_listens_on_loopback_at_a_port_of_its_own(tmp_path: Path) -> None:
    env = Environment("vllm", tmp_path)
    commands = vllm_apart(JOB, env)
    assert len({command.port for command in commands}) == 3
    for command in commands:
        assert str(command.port) in command.argv
        assert command.url == f"http://127.0.0.1:{command.port}"
    prefill, decode, proxy = commands
    assert (prefill.worker_core, decode.worker_core) == (0, 1)
    assert prefill.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] != decode.env["VLLM_NIXL_SIDE_CHANNEL_PORT"]
    assert {prefill.url, decode.url} <= set(map(str, proxy.argv))


def test_arguments_for_deltaserve_win_over_the_benchmark_s_own() -> None:
    (command,) = deltaserve_threads(replace(JOB, serve_args=("--num-threads=1", "--dtype", "float32")), HERE)
    assert [part for part in map(str, command.argv) if "num-threads" in part] == ["--num-threads=1"]
    assert command.argv.count("--dtype") == 1
    (plain,) = deltaserve_threads(JOB, HERE)
    at = plain.argv.index("--num-threads")
    assert plain.argv[at + 1] == "2"
    assert (str(plain.port) in plain.argv, plain.argv[plain.argv.index("--dtype") + 1]) == (True, "bfloat16")


SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *told): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def kind_of(name: str, program: str) -> ServerKind:
    """A server that is one Python program, which gets its port."""

    def launch(job: Job, env: Environment) -> tuple[Command, ...]:
        port = free_port()
        return (Command(name, (sys.executable, "-c", program, str(port)), port),)

    return ServerKind(name, launch)


def job_on_one_core() -> Job:
    return replace(JOB, cores=(min(os.sched_getaffinity(0)),))


def test_a_server_runs_on_its_cores_and_is_ended(tmp_path: Path) -> None:
    job, before = job_on_one_core(), set(psutil.Process().children())
    with running(kind_of("quiet", SERVER), job, Environment("quiet", tmp_path), tmp_path) as server:
        (process,) = set(psutil.Process().children()) - before
        assert tuple(process.cpu_affinity()) == job.cores
        assert httpx.get(server.url, timeout=PATIENCE_S).status_code == 200
        assert server.peak_rss_mib() > 1
        assert server.ready_s > 0
    assert not process.is_running()


def test_a_server_that_ends_is_named_with_its_log(tmp_path: Path) -> None:
    job, env = job_on_one_core(), Environment("gone", tmp_path)
    with (
        pytest.raises(CannotServe, match=r"gone ended with exit code 3: .*gone\.log"),
        running(kind_of("gone", "print('why'); raise SystemExit(3)"), job, env, tmp_path),
    ):
        pass
    assert (tmp_path / "gone.log").read_text() == "why\n"


def test_a_server_that_fails_is_left_out_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of the two answers a completion, so that both are tried once, in the first of two rounds."""
    kinds = (kind_of("gone", "raise SystemExit(3)"), kind_of("mute", SERVER))
    monkeypatch.setattr(peers, "SERVERS", kinds)
    workload = replace(WORKLOADS[0], load=SMALL, servers=("gone", "mute"))
    said: list[str] = []
    env = Environment("none", tmp_path)
    found = run_workload(workload, job_on_one_core(), {"gone": env, "mute": env}, 2, tmp_path, said.append)
    assert found == {}
    left_out = [line for line in said if "is left out" in line]
    assert [line.split()[0] for line in left_out] == ["gone", "mute"]
    assert "the client ended with exit code" in left_out[1]


def test_steps_are_done_once_and_optional_ones_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def fail(env: Environment) -> None:
        env.run(sys.executable, "-c", "raise SystemExit(4)")

    steps = [InstallStep("first", lambda env: done.append(env.name)), InstallStep("second", fail, is_optional=True)]
    monkeypatch.setitem(STEPS, "vllm", steps)
    said: list[str] = []
    for _ in range(2):
        assert install("vllm", tmp_path, said.append).folder == tmp_path / "vllm"
    assert done == ["vllm"]
    assert sum("without second" in line and "exit code 4" in line for line in said) == 2
    steps.append(InstallStep("third", fail))
    with pytest.raises(CannotInstall, match=r"third: .* ended with exit code 4: .*install\.log"):
        install("vllm", tmp_path, said.append)
    assert set(environments(tmp_path, ["deltaserve", "vllm", "vllm-pd"], said.append)) == {"deltaserve"}
    assert "cannot be installed" in said[-1]


def test_what_no_workload_asks_needs_no_environment() -> None:
    names = [kind.name for kind in SERVERS]
    assert servers_of(["agents"], names) == ["deltaserve", "deltaserve-pd", "vllm", "vllm-pd"]
    assert servers_of(["agents", "smollm2"], ["llama.cpp", "openvino"]) == ["llama.cpp"]
    assert servers_of([ATTENTION], names) == ["vllm"]
