"""docs/deploy.md's section about Ray, followed to the letter: its `ray start` on three machines, which are network
namespaces, and its server on the first of them.

Other here than on the page: the paths of the model and of the cluster key, and a folder of Ray's own.
"""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from ipaddress import ip_address, ip_network
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from tests.e2e.machines import ClientOn, Machine, Network, NotPermittedError
from tests.e2e.questions import RECALL_MODEL, answers_to, ask_about
from tests.e2e.server import ROOT, Api, Process, wait_until
from tests.patience import PATIENCE_S
from tools.clients.page_lines import block_with, here, line_with, lines_with

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed here: scripts/test-ray")

HEAD = "10.0.0.1"
OTHERS = ("10.0.0.2", "10.0.0.3")
WORKERS = ("prefill-0", "decode-0", "decode-1")
NUM_RANKS = 2


class RayMachine:
    """A machine with Ray, and with a route out, by which Ray finds the machine's own address."""

    def __init__(self, network: Network, name: str, address: str) -> None:
        self.machine: Machine = network.add(name, address)
        self.machine.route_out()

    def start_ray(self, *words: str) -> str:
        """The page's line with these words; what Ray says."""
        line = line_with("Ray", "ray", "start", *words)
        assert line[0] == "ray"
        program = str(Path(sys.executable).with_name("ray"))
        return self.machine.do(program, *line[1:])


class Recipe(Process, Api):
    """The page's server, and a client on its machine."""

    def __init__(self, folder: Path, head: Machine) -> None:
        (key, name, *_) = self._make_keys(folder)
        line = here(line_with("Ray", "deltaserve", "--prefill"), self.substitutions(folder))
        assert line[0] == "deltaserve" and name == "ops"
        Api.__init__(self, f"http://{HEAD}:30000", RECALL_MODEL.name)
        Process.__init__(self, folder / "run", *line[1:], wrap=head.wrap(), cwd=folder)
        self.http.close()
        headers = {"Authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=self.base_url, transport=ClientOn(head), headers=headers, timeout=PATIENCE_S)

    @staticmethod
    def substitutions(folder: Path) -> Mapping[str, object]:
        return {"/models/MODEL": RECALL_MODEL, "/etc/deltaserve/cluster.key": folder / "cluster.key"}

    @staticmethod
    def _make_keys(folder: Path) -> list[str]:
        """By the page; what the file of API keys has."""
        subprocess.run(["bash", "-ec", block_with("Install", "> cluster.key")], cwd=folder, check=True)
        return (folder / "api.keys").read_text().split()

    def hosts(self) -> dict[str, str]:
        """Worker |-> address of its node, of those that serve."""
        found = self.workers().items()
        used = {name: worker for name, worker in found if worker["state"] == "ready" and worker["status"] is not None}
        return {name: worker["url"].removeprefix("tcp://").rpartition(":")[0] for name, worker in used.items()}


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
    head = RayMachine(network, "head", HEAD)
    head.start_ray("--head")
    for number, address in enumerate(OTHERS):
        RayMachine(network, f"node{number}", address).start_ray("--address")
    server = Recipe(folder, head.machine)
    try:
        wait_until(server.is_ready, "readiness", server)
        wait_until(lambda: server.hosts().keys() == set(WORKERS), "all workers to be used", server)
        assert sorted(server.hosts().values()) == sorted((HEAD, *OTHERS)), "each worker on a node of its own"
        asked = ask_about(num_documents=4, num_questions=2, answer_len=24, seed=7)
        assert answers_to(server, asked) == [one.answer for one in asked]
        server.wait_quiet()
        assert server.end() == 0, server.tail()
    except BaseException as error:
        error.add_note(server.tail())
        raise
    finally:
        server.http.close()
        server.kill()


def test_addresses_of_the_page_belong_together() -> None:
    """The network for pages has the head in it, which the other machines join."""
    words = line_with("Ray", "deltaserve", "--prefill")
    pages = ip_network(words[words.index("--trusted-data-network") + 1])
    joined = next(line for line in lines_with("Ray", "--head") if "--address" in line)[-1]
    assert joined == f"{words[words.index('--host') + 1]}:6379" == f"{HEAD}:6379"
    assert all(ip_address(each) in pages for each in (HEAD, *OTHERS))
