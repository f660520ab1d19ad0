"""Few descriptors: connections are counted before they run out, and probes are answered when all are taken."""

import contextlib
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.patience import PATIENCE_S
from tests.server.child import child
from tests.server.corpus import COMPLETIONS, JSON
from tests.server.raw_corpus import BODY

NUM_IDLE = 400
BEGUN = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


def complete(url: str) -> httpx.Response:
    return httpx.post(url + COMPLETIONS, content=BODY, headers=JSON, timeout=PATIENCE_S)


@contextlib.contextmanager
def crowd(port: int, begun: bytes = b"", num: int = NUM_IDLE) -> Iterator[None]:
    """Connections that stay; every third has sent `begun`."""
    with contextlib.ExitStack() as held:
        for number in range(num):
            one = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
            if number % 3 == 0:
                one.sendall(begun)
        yield


@pytest.mark.parametrize("num_files", [160, 256])
def test_a_crowd_of_idle_connections_hides_no_probe(model_folder: Path, tmp_path: Path, num_files: int) -> None:
    with child(model_folder, tmp_path, num_files) as front:
        assert f"this process may open {num_files} files (ulimit -Hn)" in front.log.read_text()
        with crowd(front.port):
            for path in ("/livez", "/readyz", "/health") * 3:
                assert httpx.get(front.url + path, timeout=PATIENCE_S).status_code == 200
            refused = complete(front.url)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_connections")
        while (reply := complete(front.url)).status_code == 503:
            pass
        assert reply.status_code == 200
        assert "out of system resource" not in front.log.read_text()


@pytest.mark.parametrize("num_files", [160, 256])
def test_a_crowd_that_comes_at_once_takes_no_more_than_there_are(
    model_folder: Path, tmp_path: Path, num_files: int
) -> None:
    """All of it waits in the kernel when the server looks; every third has begun a request."""
    with child(model_folder, tmp_path, num_files) as front:
        front.process.send_signal(signal.SIGSTOP)
        with crowd(front.port, BEGUN):
            front.process.send_signal(signal.SIGCONT)
            for path in ("/livez", "/readyz") * 3:
                assert httpx.get(front.url + path, timeout=PATIENCE_S).status_code == 200
        while (reply := complete(front.url)).status_code == 503:
            pass
        assert reply.status_code == 200
        assert "out of system resource" not in front.log.read_text()


def test_two_crowds_take_no_more_than_there_are_and_one_leaves_the_other_listener_be(
    model_folder: Path, tmp_path: Path
) -> None:
    """Each listener alone may take no more than its part of the descriptors."""
    with child(model_folder, tmp_path, num_files=500, num_listeners=2) as front, contextlib.ExitStack() as api_crowd:
        assert front.admin_port is not None
        metrics = f"http://127.0.0.1:{front.admin_port}/metrics"
        front.process.send_signal(signal.SIGSTOP)
        api_crowd.enter_context(crowd(front.port, BEGUN, num=300))
        with crowd(front.admin_port, BEGUN, num=300):
            front.process.send_signal(signal.SIGCONT)
            for path in ("/livez", "/readyz") * 3:
                assert httpx.get(front.url + path, timeout=PATIENCE_S).status_code == 200
            assert httpx.get(metrics, timeout=PATIENCE_S).status_code == 503
        while (reply := httpx.get(metrics, timeout=PATIENCE_S)).status_code == 503:
            pass
        assert reply.status_code == 200
        refused = complete(front.url)
        assert refused.status_code == 503
        api_crowd.close()
        while (reply := complete(front.url)).status_code == 503:
            pass
        assert reply.status_code == 200
        assert "out of system resource" not in front.log.read_text()


def test_too_few_to_serve_is_one_clear_line(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="may open 64 files, too few to serve"), child(model_folder, tmp_path, 64):
        pass
