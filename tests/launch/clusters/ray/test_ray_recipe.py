"""docs/deploy.md's section about Ray, followed to the letter: its `ray start` on three machines, which are network
namespaces, and its server on the first of them.

Other here than on the page: the paths of the model and of the cluster key, and a folder of Ray's own.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from ipaddress import ip_address, ip_network
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.e2e.machines import ClientOn, Machine, Network, NotPermittedError
from tests.e2e.questions import answers_to, ask_about
from tests.e2e.server import ROOT, wait_until
from tests.launch.clusters.ray.page_server import HOST, NETWORK, PageServer, Stand
from tools.clients.page_lines import line_with

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed here: scripts/test-ray")

OTHERS = ("10.0.0.2", "10.0.0.3")
WORKERS = ("prefill-0", "decode-0", "decode-1")


class RayMachine:
    """A machine with Ray, and with a route out, by which Ray finds the machine's own address."""

    def __init__(self, network: Network, name: str, address: str) -> None:
        self.machine: Machine = network.add(name, address)
        self.machine.route_out()

    def start_ray(self, *words: str) -> str:
        """The page's line with these words; what Ray says."""
        program, *rest = line_with("Ray", "ray", "start", *words)
        return self.machine.do(str(Path(sys.executable).with_name(program)), *rest)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Ray's sockets lie in it, whose paths must be short. GPUs would be counted once for each machine."""
    with TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as path:
        Path(path, "ray").mkdir()
        surroundings = {"RAY_TMPDIR": path, "RAY_USAGE_STATS_ENABLED": "0", "CUDA_VISIBLE_DEVICES": ""}
        for name, value in {**surroundings, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}.items():
            monkeypatch.setenv(name, value)
        yield Path(path)


@pytest.fixture
def network(folder: Path) -> Iterator[Network]:
    with ExitStack() as stack:
        try:
            made = Network(folder)
        except NotPermittedError as error:
            pytest.skip(f"needs the right to make network namespaces (root, CAP_NET_ADMIN and CAP_SYS_ADMIN): {error}")
        stack.callback(made.close)
        yield made


def test_ray_s_lines_and_the_server_s_lead_to_right_answers(network: Network, folder: Path) -> None:
    head = RayMachine(network, "head", HOST)
    head.start_ray("--head")
    for number, address in enumerate(OTHERS):
        RayMachine(network, f"node{number}", address).start_ray("--address")
    stand = Stand(HOST, 30000, head.machine.wrap(), lambda: ClientOn(head.machine))
    server = PageServer(folder, stand, {})
    try:
        wait_until(server.is_ready, "readiness", server)
        wait_until(lambda: all(map(server.is_used, WORKERS)), "all workers to be used", server)
        assert {server.node(name) for name in WORKERS} == {HOST, *OTHERS}, "each on a node of its own"
        asked = ask_about(num_documents=4, num_questions=2, answer_len=24, seed=7)
        assert answers_to(server, asked) == [one.answer for one in asked]
        server.wait_quiet()
        assert server.end() == 0, server.tail()
    except BaseException as error:
        error.add_note(server.tail())
        raise
    finally:
        server.close()


def test_addresses_of_the_page_belong_together() -> None:
    """The other machines join the one of the server, and all are on the network for pages."""
    assert line_with("Ray", "ray", "start", "--address")[-1] == f"{HOST}:6379"
    assert all(ip_address(each) in ip_network(NETWORK) for each in (HOST, *OTHERS))
