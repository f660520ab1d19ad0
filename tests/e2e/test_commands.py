"""`verify` and `doctor` against real servers, and commands that end before anything is started."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deltaserve.cli.main import main
from tests.e2e.server import Server, environment
from tests.patience import PATIENCE_S
from tests.ports import free_port

FLAGS = ("--page-size", "16", "--chunked-prefill-size", "64", "--num-pages", "256")


def test_verify_against_transformers_and_a_server(
    shared_pair: Server, tiny_models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server itself is the other reference: it computes everything anew for that."""
    model = tiny_models / "llama"
    argv = [
        "verify",
        "--base-url",
        shared_pair.base_url,
        "--model-path",
        str(model),
        "--reference",
        shared_pair.base_url,
    ]
    assert main([*argv, "--output-len", "8"]) == 0
    out = capsys.readouterr().out
    assert out.count("against ") == 2
    assert out.count(" ok") == 2 * 13
    assert "DIFFERS" not in out
    assert out.splitlines()[-1].startswith("verify: every answer agrees (with transformers float32 and ")


def test_verify_notices_another_model(
    shared_pair: Server, tiny_models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_models / "llama_llama3_rope"
    assert main(["verify", "--base-url", shared_pair.base_url, "--model-path", str(model), "--output-len", "8"]) == 1
    assert "verify: some answers differ" in capsys.readouterr().out


def test_verify_without_a_server_or_a_reference(
    shared_pair: Server, tiny_models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    assert main(["verify", "--base-url", shared_pair.base_url]) == 2
    assert main(["verify", "--base-url", shared_pair.base_url, "--reference", gone]) == 1
    assert main(["verify", "--base-url", gone, "--reference", shared_pair.base_url]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_bench_sweeps_over_a_running_pair(
    shared_pair: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    lengths = ["--system-prompt-len", "40", "--question-len", "8", "--output-len", "4", "--token-range", "1:60"]
    workload = ["--num-groups", "2", "--prompts-per-group", "3", *lengths]
    argv = ["bench", "--base-url", shared_pair.base_url, *workload, "--output-file", str(report)]
    assert main([*argv, "--sweep", "concurrency=1,3"]) == 0
    points = json.loads(report.read_text())["points"]
    assert [(point["concurrency"], point["summary"]["num_completed"]) for point in points] == [(1, 6), (3, 6)]
    assert all(point["summary"]["output_len"] == 6 * 4 for point in points)
    assert points[0]["summary"]["cached_len"] > 0
    assert "TTFT" in capsys.readouterr().out


def test_doctor_looks_at_a_running_pair(
    shared_pair: Server, tiny_models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(tiny_models / "llama"), "--base-url", shared_pair.base_url]) == 0
    out = capsys.readouterr().out
    assert f"ok    server        {shared_pair.base_url}: ready" in out
    for name in ("prefill-0", "decode-0"):
        assert f"ok    worker        {name}: fits" in out


def test_doctor_finds_the_server_behind_a_port(shared_pair: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--port", shared_pair.base_url.rpartition(":")[2]]) == 0
    out = capsys.readouterr().out
    assert "warn  listener" in out
    assert f"doctor --base-url {shared_pair.base_url}`" in out


def ended(folder: Path, *argv: str) -> tuple[int, list[str]]:
    """Exit code and stderr of a command that should end by itself."""
    done = subprocess.run(
        [sys.executable, "-m", "deltaserve.cli.main", *argv],
        capture_output=True,
        text=True,
        env=environment(folder),
        timeout=PATIENCE_S,
        check=False,
    )
    return done.returncode, done.stderr.splitlines()


def assert_refused(folder: Path, argv: list[str], *parts: str) -> None:
    """Exit code 2, one line that says why, no file and no process left."""
    code, lines = ended(folder, *argv)
    assert (code, len(lines)) == (2, 1), lines
    assert all(part in lines[0] for part in parts), lines
    assert not list(folder.glob("deltaserve-*"))
    mine = str(folder).encode()
    environs = (_environ(Path("/proc") / entry) for entry in os.listdir("/proc") if entry.isdecimal())
    assert not any(mine in environ for environ in environs)


def _environ(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""


def test_a_port_in_use(tiny_models: Path, folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert_refused(folder, ["serve", str(tiny_models / "llama"), "--port", port], f"--port {port}", "in use")


def test_the_port_of_a_worker_in_use(tiny_models: Path, folder: Path) -> None:
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_text("x" * 40)
    flag = "--disaggregation-bootstrap-port"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        argv = ["decode", str(tiny_models / "llama"), "--cluster-key-file", str(key), flag, port]
        assert_refused(folder, argv, f"{flag} {port}", "in use")


def test_a_folder_without_weights(folder: Path) -> None:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert_refused(folder, ["serve", str(model), "--port", str(free_port())], "model.safetensors", str(model))


def test_a_pool_that_cannot_hold_what_was_asked(tiny_models: Path, folder: Path) -> None:
    argv = ["serve", str(tiny_models / "llama"), "--num-pages", "4", "--context-length", "4096"]
    assert_refused(folder, argv, "--context-length 4096", "--num-pages")


def test_a_pool_that_no_memory_can_hold(tiny_models: Path, folder: Path) -> None:
    argv = ["serve", str(tiny_models / "llama"), "--num-pages", "1000000000"]
    assert_refused(folder, argv, "--num-pages 1000000000", "each of 2 worker processes", "at most ")


def test_a_wrong_key_file(tiny_models: Path, folder: Path) -> None:
    key = folder / "key"
    key.touch(mode=0o644)
    key.write_text("x" * 40)
    assert_refused(folder, ["decode", str(tiny_models / "llama"), "--cluster-key-file", str(key)], "0644", "0600")


def test_weights_that_do_not_match_end_the_server_with_one_reason(tiny_models: Path, folder: Path) -> None:
    """Found by the workers, after they were started: they and the rest end, exit code 2, the reason last."""
    model = folder / "model"
    model.mkdir()
    for file in (tiny_models / "llama").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    code, lines = ended(folder, "serve", str(model), "--port", str(free_port()), *FLAGS)
    assert code == 2
    assert any("mlp" in line for line in lines)
    assert not list(folder.glob("deltaserve-*"))
