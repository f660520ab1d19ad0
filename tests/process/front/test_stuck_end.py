"""A front that nobody supervises, and that hangs as it ends."""

import signal
import subprocess
import sys
from pathlib import Path

from deltaserve.launch.compose import free_port
from deltaserve.process.children.exits import Exit
from tests.patience import PATIENCE_S, killed_if_late


def test_an_end_that_hangs_is_cut_short(tiny_models: Path, tmp_path: Path) -> None:
    key = tmp_path / "cluster.key"
    key.touch(mode=0o600)
    key.write_bytes(b"k" * 32)
    words = ["router", str(tiny_models / "llama"), "--workers", "prefill@127.0.0.1:1,decode@127.0.0.1:2"]
    options = ["--port", str(free_port()), "--cluster-key-file", str(key), "--state-dir", str(tmp_path)]
    command = [sys.executable, "-m", "tests.process.front.stuck_end", *words, *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as router, killed_if_late(router):
        assert router.stderr is not None
        assert any("not ready" in line for line in router.stderr), "it ended"
        router.send_signal(signal.SIGTERM)
        said = router.stderr.read()
        assert router.wait(PATIENCE_S) == Exit.STUCK
    assert "the process did not end, closing its links went on for" in said
    assert "most recent call first" in said
