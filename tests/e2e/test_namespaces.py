"""Prefill, decode and the front on three machines, which are network namespaces, started as docs/operations.md says."""

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import httpx
import pytest

from tests.e2e.machines import (
    ClientOn,
    Ended,
    Machine,
    Network,
    NotPermittedError,
    Unlucky,
    Unwanted,
    commands_of,
    remove_leftovers,
)
from tests.e2e.reference import assert_true, random_prompt
from tests.e2e.server import ROOT, Api, Json, Process, wait_until
from tests.e2e.test_deaths import in_the_middle, stream_tokens
from tests.e2e.test_parity import check_batch, check_hits, check_lengths
from tests.patience import PATIENCE_S

DOCUMENT = ROOT / "docs" / "operations.md"
HEADING = "## Several machines"
PAGE = 4
STREAM_LEN = 400
PAGES = ("--page-size", str(PAGE))
CHECKED = (*PAGES, "--chunked-prefill-size", str(PAGE), "--num-pages", "2048", "--verify", "crc")
ROLES = {"prefill": "10.0.0.1", "decode": "10.0.0.2", "router": "10.0.0.3"}
NO_OTHERS: Mapping[str, str] = {}


class Cluster(Api):
    """The commands of the document, each on its machine, and a client on a fourth."""

    def __init__(
        self,
        network: Network,
        model: Path,
        folder: Path,
        extra: Mapping[str, Sequence[str]],
        others: Mapping[str, str] = NO_OTHERS,
    ) -> None:
        """`extra`: flags by role, besides those of the document. `others`: addresses of further machines, by name."""
        self.model_path = model
        self._extra = extra
        self.machines = {role: network.add(role, address) for role, address in (ROLES | dict(others)).items()}
        self.client = network.add("client", "10.0.0.4")
        self.keys = make_keys(folder, [*self.machines.values(), self.client])
        self.commands = commands_of(DOCUMENT, HEADING)
        self.processes: dict[str, Process] = {}
        super().__init__(f"http://{ROLES['router']}:30000", model.name)
        self.http = self.http_on(self.client, self.base_url)
        self.admin = self.http_on(self.machines["router"], "http://127.0.0.1:30001")

    def http_on(self, machine: Machine, url: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.keys}"}
        return httpx.Client(base_url=url, transport=ClientOn(machine), headers=headers, timeout=PATIENCE_S)

    def argv(self, role: str) -> list[str]:
        """As the document has it, for this model; small pages."""
        rest = self.commands[f"{role} {ROLES[role]}"]
        flags = PAGES if role == "router" else CHECKED
        named = (str(self.model_path) if word == "MODEL" else word for word in rest)
        return [role, *named, *flags, *self._extra.get(role, ())]

    def start(self, role: str) -> None:
        self.processes[role] = self.machines[role].start(*self.argv(role), name=role)

    def restart(self, role: str) -> None:
        """Ready again."""
        assert self.processes[role].end() == 0
        wait_until(lambda: not self.is_ready(), "the end to be noticed")
        self.start(role)
        wait_until(self.is_ready, "readiness", self.processes[role])

    def state_of(self, role: str) -> str:
        return str(self.workers()[f"{role}-{ROLES[role]}:8998"]["state"])

    def info(self) -> Json:
        found: Json = self.admin.get("/server_info").json()
        return found

    def end(self) -> None:
        for process in self.processes.values():
            assert process.end() == 0, process.tail()

    def kill(self) -> None:
        self.http.close()
        self.admin.close()
        for process in self.processes.values():
            process.kill()


MadeCluster = TypeVar("MadeCluster", bound=Cluster)


def make_keys(folder: Path, machines: list[Machine]) -> str:
    """By the commands of the document; the API key."""
    section = DOCUMENT.read_text().split(f"\n{HEADING}\n")[1]
    script = section.split("```\n")[1]
    subprocess.run(["bash", "-ec", script], cwd=folder, check=True)
    for machine in machines:
        for name in ("cluster.key", "api.keys"):
            path = machine.folder / name
            path.touch(mode=0o600)
            path.write_bytes((folder / name).read_bytes())
    return (folder / "api.keys").read_text().split()[0]


@contextmanager
def running_cluster(model: Path, extra: Mapping[str, Sequence[str]]) -> Iterator[Cluster]:
    """Ready. One at a time: a process has one network."""
    with made_cluster(lambda network, folder: Cluster(network, model, folder, extra)) as cluster:
        for role in ROLES:
            cluster.start(role)
        wait_until(cluster.is_ready, "readiness", cluster.processes["router"])
        yield cluster


@contextmanager
def made_cluster(make: Callable[[Network, Path], MadeCluster]) -> Iterator[MadeCluster]:
    """Machines on which nothing runs yet. Skips where there can be none."""
    with TemporaryDirectory(prefix="e2e-", ignore_cleanup_errors=True) as name, ExitStack() as stack:
        folder = Path(name)
        try:
            network = Network(folder)
        except NotPermittedError as error:
            pytest.skip(f"needs the right to make network namespaces (root, CAP_NET_ADMIN and CAP_SYS_ADMIN): {error}")
        stack.callback(network.close)
        cluster = make(network, folder)
        stack.callback(cluster.kill)
        try:
            yield cluster
        except BaseException as error:
            for process in cluster.processes.values():
                error.add_note(process.tail())
            raise


@pytest.fixture(scope="module")
def cluster(tiny_models: Path) -> Iterator[Cluster]:
    with running_cluster(tiny_models / "llama", {}) as cluster:
        yield cluster


def test_answers_are_those_of_transformers(cluster: Cluster) -> None:
    check_lengths(cluster, cluster.model_path, PAGE, PAGE)
    check_hits(cluster, cluster.model_path, PAGE, True)
    check_batch(cluster, cluster.model_path, PAGE)


def test_nothing_listens_beyond_the_addresses_that_were_named(cluster: Cluster) -> None:
    """Page transfers too: their port is any of the trusted network's interface."""
    for role in ("prefill", "decode"):
        assert cluster.machines[role].listening() == {ROLES[role]}
    assert cluster.machines["router"].listening() == {ROLES["router"], "127.0.0.1"}


def test_prefill_killed_in_the_middle_of_a_transfer(cluster: Cluster) -> None:
    """The request waits for the one that is started by hand, and is answered."""
    with ThreadPoolExecutor(1) as pool:
        asked = in_the_middle(cluster, pool, 1)
        cluster.processes["prefill"].kill()
        cluster.start("prefill")
        asked.assert_right(cluster.model_path)
    cluster.wait_quiet()


def test_decode_killed_in_the_middle_of_a_stream(cluster: Cluster) -> None:
    """The stream goes on where it was, on the one that is started by hand."""
    prompt = random_prompt(3 * PAGE + 1, seed=4)
    undisturbed = stream_tokens(cluster, prompt, STREAM_LEN, lambda count: None)
    todo = [cluster.processes["decode"]]

    def on_token(count: int) -> None:
        if count >= 10 and todo:
            todo.pop().kill()
            cluster.start("decode")

    assert stream_tokens(cluster, prompt, STREAM_LEN, on_token) == undisturbed
    cluster.wait_quiet()


Failure = Callable[[Machine], AbstractContextManager[None]]


@pytest.mark.parametrize(
    ("role", "failure"),
    [
        ("prefill", Machine.swallowed),
        pytest.param("prefill", Machine.unplugged, marks=pytest.mark.slow),
        pytest.param("decode", Machine.swallowed, marks=pytest.mark.slow),
        pytest.param("decode", Machine.unplugged, marks=pytest.mark.slow),
    ],
)
def test_a_machine_that_is_away_for_a_while(cluster: Cluster, role: str, failure: Failure) -> None:
    """Its process lives on and no connection ends: silence alone tells. What was in the middle is done afterwards."""
    with ThreadPoolExecutor(1) as pool:
        asked = in_the_middle(cluster, pool, 2)
        with failure(cluster.machines[role]):
            wait_until(lambda: cluster.state_of(role) != "ready", "the loss to be noticed")
        asked.assert_right(cluster.model_path)
    prompt = random_prompt(40, seed=5)
    assert_true(cluster.model_path, prompt, cluster.complete(prompt, 4))
    cluster.wait_quiet()


@pytest.mark.slow
def test_a_firewall_that_lets_links_through_and_no_pages(cluster: Cluster) -> None:
    """Who attaches to a peer whose machine drops connections is not held up by it: the client hears what failed."""
    prompt = random_prompt(40, seed=6)
    behind_links = Unwanted(ROLES["prefill"], first=9000)
    cluster.restart("prefill")  # no connection of before
    with cluster.machines["decode"].dropping(behind_links):
        wait_until(lambda: fails_and_is_told(cluster, prompt), "readiness to tell of it")
    assert_true(cluster.model_path, prompt, cluster.complete(prompt, 4))
    cluster.wait_quiet()


def fails_and_is_told(cluster: Cluster, prompt: list[int]) -> bool:
    """One more request; whether readiness says what to expect of the next."""
    reply = cluster.http.post("/v1/completions", json=cluster.body(prompt, max_tokens=4))
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "transfer_failed")
    told = cluster.http.get("/readyz")
    return told.status_code == 503 and "one request after the other fails there" in told.text


@pytest.mark.slow
def test_requests_while_decode_cannot_be_reached(cluster: Cluster) -> None:
    """They wait until their deadline, and probes say for whom; afterwards all is as it was."""
    prompt = random_prompt(40, seed=8)
    body = cluster.body(prompt, max_tokens=4)
    with cluster.machines["decode"].swallowed():
        wait_until(lambda: not cluster.is_ready(), "the loss to be noticed")
        assert "decode-10.0.0.2:8998" in cluster.http.get("/readyz").text
        reply = cluster.http.post("/v1/completions", json=body, headers={"X-Deadline-Seconds": "3"})
        assert reply.status_code == 504, reply.text
    wait_until(cluster.is_ready, "readiness")
    assert_true(cluster.model_path, prompt, cluster.complete(prompt, 4))
    cluster.wait_quiet()


@pytest.mark.slow
def test_machines_that_are_far_apart(cluster: Cluster) -> None:
    """20 ms each way, and one packet in a hundred lost."""
    with ExitStack() as stack:
        try:
            for role in ROLES:
                stack.enter_context(cluster.machines[role].far_away("20ms", "1%"))
        except NotPermittedError as error:
            pytest.skip(f"needs a kernel with netem: {error}")
        check_hits(cluster, cluster.model_path, PAGE, True)
        check_batch(cluster, cluster.model_path, PAGE)
    cluster.wait_quiet()


@pytest.mark.slow
def test_a_network_that_loses_packets(cluster: Cluster) -> None:
    """One in a hundred, of all that reaches a worker: TCP repeats them, and every answer is right."""
    lossy = Unlucky(0.01)
    with cluster.machines["prefill"].dropping(lossy), cluster.machines["decode"].dropping(lossy):
        check_hits(cluster, cluster.model_path, PAGE, True)
        check_batch(cluster, cluster.model_path, PAGE)
        prompt = random_prompt(3000, seed=7)
        assert_true(cluster.model_path, prompt, cluster.complete(prompt, 4))
    cluster.wait_quiet()


@pytest.mark.slow
def test_routers_on_two_machines(cluster: Cluster) -> None:
    """Both serve over the same workers and caches; what one of them had running when it died is given up."""
    argv = ["10.0.0.4" if word == ROLES["router"] else word for word in cluster.argv("router")]
    second = cluster.client.start(*argv, name="second")
    with cluster.http_on(cluster.client, "http://10.0.0.4:30000") as http, ThreadPoolExecutor(4) as pool:
        try:
            other = Api("http://10.0.0.4:30000", cluster.model)
            other.http = http
            wait_until(other.is_ready, "readiness", second)
            prompts = [random_prompt(60, seed=100 + number % 4) for number in range(16)]
            fronts = [cluster, other] * 8
            answers = pool.map(lambda front, prompt: front.complete(prompt, 12), fronts, prompts)
            for prompt, answer in zip(prompts, answers, strict=True):
                assert_true(cluster.model_path, prompt, answer)
            running = pool.submit(other.complete, random_prompt(40, seed=200), 3000)
            wait_until(lambda: is_running(cluster), "the second router's request to run")
        finally:
            second.kill()
        with pytest.raises(httpx.TransportError):
            running.result()
    assert_true(cluster.model_path, prompts[0], cluster.complete(prompts[0], 4))
    cluster.wait_quiet()


def is_running(front: Api) -> bool:
    """Anything, of any front, on any worker."""
    return any(m.get("deltaserve_num_running_reqs", 0.0) for m in front.metrics().values())


# ---------------------------------------------------------------- doctor


def doctor(cluster: Cluster, role: str, *changed: str, on: str | None = None) -> Ended:
    """Run doctor on the command line of that role, with other values for some flags, on its machine."""
    argv = cluster.argv(role)
    for flag, value in zip(changed[::2], changed[1::2], strict=True):
        if flag not in argv:
            argv += [flag, value]
        argv[argv.index(flag) + 1] = value
    return cluster.machines[on or role].run("doctor", *argv)


def test_doctor_finds_nothing_wrong_on_any_of_the_machines(cluster: Cluster) -> None:
    """Doctor looks at commands that run there; each machine also reaches the workers of the others."""
    with ThreadPoolExecutor(3) as pool:
        found = dict(zip(ROLES, pool.map(lambda role: doctor(cluster, role), ROLES), strict=True))
    for role, ended in found.items():
        assert ended.code == 0, ended.text
        assert ended.text.endswith("nothing stands in the way\n"), role
    for role in ("prefill", "decode"):
        assert (
            f"warn  listener      {ROLES[role]}:8998: a worker with this cluster key listens there" in found[role].text
        )
        assert "ok    transfer      nixl over tcp,self on eth0: " in found[role].text
        assert f"ok    link          {role}-{ROLES[role]}:8998: listens" in found["router"].text


FAULTS = {
    "prefill": [
        (("--transfer-devices", "eth1"), "no eth1; did you mean eth0?"),
        (
            ("--host", "10.0.0.9"),
            "10.0.0.9:8998: Cannot assign requested address; this machine has 127.0.0.1, 10.0.0.1",
        ),
        (("--host", "0.0.0.0"), "--host 0.0.0.0: nobody can dial that"),
        (("--trusted-data-network", "10.1.0.0/24"), "--trusted-data-network 10.1.0.0/24: this machine is not on it"),
    ],
    "router": [
        (("--workers", "decode@10.0.0.2:8999"), "decode-10.0.0.2:8999: nobody listens there"),
        (("--workers", "decode@10.0.0.9:8998"), "there is no such machine"),
        (("--workers", "decode@no-such-name:8998"), "nobody knows the name no-such-name"),
        (("--cluster-key-file", "api.keys"), "ends every handshake: another cluster key"),
    ],
}


@pytest.mark.parametrize(
    ("role", "changed", "said"),
    [
        pytest.param(role, *fault, marks=() if number == 0 else pytest.mark.slow, id=f"{role}{fault[0][0]}-{number}")
        for role, faults in FAULTS.items()
        for number, fault in enumerate(faults)
    ],
)
def test_doctor_says_what_is_wrong(cluster: Cluster, role: str, changed: Sequence[str], said: str) -> None:
    ended = doctor(cluster, role, *changed)
    assert ended.code == 1
    assert said in next(line for line in ended.text.splitlines() if line.startswith("fail  "))


@pytest.mark.slow
def test_doctor_finds_a_firewall(cluster: Cluster) -> None:
    blocked = Unwanted(ROLES["router"], first=8998, last=8998)
    with cluster.machines["decode"].dropping(blocked):
        ended = doctor(cluster, "router")
    assert ended.code == 1
    assert "decode-10.0.0.2:8998: no answer within 3 s: a firewall drops what is sent there" in ended.text
    assert "prefill-10.0.0.1:8998: listens" in ended.text


@pytest.mark.slow
def test_doctor_tells_of_workers_that_do_not_fit(cluster: Cluster, tiny_models: Path) -> None:
    """A second router has two decode workers more, one with KV of another type, one with another model."""
    argv = cluster.argv("decode")
    argv[argv.index("--host") + 1] = "10.0.0.4"
    other_kv = ["--kv-cache-dtype", "bfloat16", "--disaggregation-bootstrap-port", "8997"]
    other_model = [str(tiny_models / "llama_bias_mha") if word == str(cluster.model_path) else word for word in argv]
    front = ["10.0.0.4" if word == ROLES["router"] else word for word in cluster.argv("router")]
    front[front.index("--workers") + 1] += ",decode@10.0.0.4:8997,decode@10.0.0.4:8998"
    with ExitStack() as stack:
        for name, line in {"kv": without(argv, other_kv), "model": other_model, "front": front}.items():
            process = cluster.client.start(*line, name=f"unfit-{name}")
            stack.callback(process.kill)
        http = stack.enter_context(cluster.http_on(cluster.client, "http://127.0.0.1:30001"))
        wait_until(lambda: num_refused(http) == 2, "both refusals", process)
        ended = cluster.client.run("doctor", "--base-url", "http://10.0.0.4:30000", "--api-key-file", "api.keys")
    assert ended.code == 1
    lines = [line for line in ended.text.splitlines() if " worker " in line]
    assert sum(": fits, " in line for line in lines) == 2
    kv, model = sorted(line for line in lines if line.startswith("fail  worker        decode-10.0.0.4:899"))
    assert (
        "8997: does not fit prefill-10.0.0.1:8998: KV dtype of kv: here bfloat16, on prefill-10.0.0.1:8998 float32"
        in kv
    )
    assert "8998: does not fit: cluster secret or model" in model


def without(argv: list[str], flags: list[str]) -> list[str]:
    """With these flags instead of the same ones."""
    kept = list(argv)
    for flag in set(flags[::2]) & set(argv):
        del kept[kept.index(flag) : kept.index(flag) + 2]
    return [*kept, *flags]


def num_refused(admin: httpx.Client) -> int:
    try:
        return sum(bool(worker["refusal"]) for worker in admin.get("/server_info").json()["engine"]["workers"])
    except httpx.TransportError:
        return 0


def test_networks_of_processes_that_are_gone_are_removed(cluster: Cluster) -> None:
    """A test that was killed leaves its namespaces to the next one, which leaves those of others alone."""
    with subprocess.Popen(["true"]) as gone:
        pass
    left = f"dsnet{gone.pid}-left"
    subprocess.run(["ip", "netns", "add", left], check=True)
    remove_leftovers()
    there = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert left not in there
    assert cluster.client.namespace in there
