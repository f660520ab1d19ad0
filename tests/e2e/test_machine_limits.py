"""What a machine allows a process is counted before it is met: a server that fits into it, or one line that names the
limit and the way out, with exit code 2 and nothing left behind."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.server import ROOT, Api, Process, environment, wait_until
from tests.patience import PATIENCE_S
from tests.ports import free_port

MODEL = ROOT / "models" / "recall-micro"
GIB = 1 << 30


def refused(folder: Path, limit: int, value: int, *flags: str) -> list[str]:
    """The lines of a `serve` with this limit on itself and its children, which ends with exit code 2."""
    done = subprocess.run(
        [sys.executable, "-m", "deltaserve.cli.main", "serve", str(MODEL), *flags],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env=environment(folder),
        preexec_fn=lambda: resource.setrlimit(limit, (value, value)),
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [
        (resource.RLIMIT_NOFILE, 64, ("this process may open 64 files", "ulimit -Hn) to 1")),
        (resource.RLIMIT_NOFILE, 128, ("this process may open 128 files", "ulimit -Hn) to 1")),
        (resource.RLIMIT_AS, GIB, ("a process may have 1.0 GiB of addresses (ulimit -v)", "2.0 GiB beside its pages")),
        (resource.RLIMIT_FSIZE, 1 << 20, ("no file may be so large (ulimit -f)", "lower --num-pages")),
    ],
)
def test_too_little_is_told_in_one_line(tmp_path: Path, limit: int, value: int, words: tuple[str, str]) -> None:
    told = [line for line in refused(tmp_path, limit, value) if words[0] in line]
    assert told
    assert all(word in told[-1] for word in words)


def test_pages_fit_into_the_addresses(tmp_path: Path) -> None:
    """Each worker maps its own pages and its peer's: half of what is left is for those."""
    port = free_port()
    limited = ("bash", "-c", f'ulimit -v {3 * GIB >> 10}; exec "$@"', "bash")
    server = Process(tmp_path, "serve", str(MODEL), "--port", str(port), wrap=limited)
    try:
        server.wait_for_log("all processes are ready")
        prompt = list(range(1, 200))
        api = Api(f"http://127.0.0.1:{port}", MODEL.name)
        with api.http:
            assert api.complete(prompt).tokens == api.complete(prompt).tokens
    finally:
        assert server.end() == 0


@pytest.mark.parametrize("flags", [(), ("--log-to", "stdout", "--log-format", "json")], ids=["terminal", "logs"])
def test_an_output_that_nobody_reads_stops_nothing(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Such as that of a collector of logs that stands still: the pipe is full from the start."""
    port = free_port()
    unread = ("bash", "-c", 'mkfifo out; exec 3<>out; head -c 65536 /dev/zero >&3; exec "$@" >&3 2>&3 3>&-', "bash")
    server = Process(tmp_path, "serve", str(MODEL), "--port", str(port), *flags, wrap=unread)
    api = Api(f"http://127.0.0.1:{port}", MODEL.name)
    with api.http:
        try:
            wait_until(api.is_ready, "readiness", server)
            assert all(api.complete([1, 2, 3]).tokens for _ in range(20))
        finally:
            assert server.end() == 0
