"""Names of hosts are looked up where nobody else waits for the answer."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deltaserve.core.ids import PeerName
from deltaserve.core.wire.messages import PeerAddress
from deltaserve.process.links.links import Links
from deltaserve.process.links.name_contexts import NameContexts, host_name, look_up
from tests.e2e.server import ROOT
from tests.patience import PATIENCE_S

SILENT = "127.77.0.1"
"""Address of a name server that never answers."""


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("tcp://10.0.0.1:8998", None),
        ("tcp://[::1]:8998", None),
        ("tcp://localhost:8998", "localhost"),
        ("tcp://pod-0.prefill.svc.cluster.local:1", "pod-0.prefill.svc.cluster.local"),
    ],
)
def test_addresses_are_no_names(url: str, host: str | None) -> None:
    assert host_name(url) == host


def test_each_name_has_a_context_of_its_own_up_to_a_bound() -> None:
    contexts = NameContexts()
    few = [contexts.take() for _ in range(8)]
    assert len(set(few)) == 8
    contexts.give_back(few[0])
    assert contexts.take() is few[0], "an unused one is used again"
    many = [contexts.take() for _ in range(100)]
    assert 8 < len({*few, *many}) <= 32
    contexts.close(0)


def test_what_a_lookup_tells() -> None:
    assert look_up("localhost").result(PATIENCE_S) is None
    assert look_up("a..b").result(PATIENCE_S) == "it is none"


def test_a_name_that_cannot_be_resolved_is_said() -> None:
    links = Links()
    links.dial(PeerAddress(name=PeerName("far"), url=f"tcp://{'a' * 70}.example:8998"))
    while not links.complaints:
        links.wait(0.05)
        links.take_broken()
    assert links.complaints[PeerName("far")].startswith(f"{'a' * 70}.example cannot be resolved: ")
    links.hang_up(PeerName("far"))
    assert not links.complaints
    links.close()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root, and unshare")
def test_a_silent_name_server_holds_up_nobody_else(tmp_path: Path) -> None:
    """In a mount namespace whose resolv.conf names it."""
    resolv = tmp_path / "resolv.conf"
    resolv.write_text(f"nameserver {SILENT}\noptions timeout:30 attempts:3\n")
    inside = f'mount --bind {resolv} /etc/resolv.conf && exec "{sys.executable}" -m tests.process.links.slow_names'
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((SILENT, 53))
        done = subprocess.run(
            ["unshare", "--mount", "bash", "-c", inside],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            cwd=ROOT,
            env=env,
        )
    if "mount" in done.stderr and "permi" in done.stderr.lower():
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    assert (done.returncode, done.stdout.strip()) == (0, "under way"), done.stderr
