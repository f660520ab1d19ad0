"""The Helm chart: what it renders is valid, fits together, and starts deltaserve by flags that there are."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import msgspec
import pytest
import yaml
import zmq

import deltaserve
from deltaserve.core.errors import ConfigError
from deltaserve.process.front.secrets import read_cluster_key
from deltaserve.settings.config import Settings
from deltaserve.settings.kv_events import read_kv_events
from tests.deploy.lines import settings_of
from tests.deploy.rendered import (
    CHART,
    Helm,
    Json,
    case,
    component_of,
    containers,
    flag,
    named,
    of_kind,
    pods,
    replicas,
    selects,
    set_all,
    specs_of_groups,
    templates_of_groups,
)
from tests.deploy.running import MODEL, PROMPT, Release, make_keys, running
from tests.patience import PATIENCE_S
from tests.ports import free_ports

TWO_NODES = "1p1d-two-nodes"
ONE_SET = "disaggregated-set"
CASES = ("1p1d", "3p1d-tp4", "routers", TWO_NODES, ONE_SET)
PARTS = ("prefill", "decode", "router")
NODES = ("prefill-node", "decode-node")
"""Further nodes, of workers that have any."""
LIFE_S = 10
"""Seconds for processes to end once requests have: docs/operations.md."""
Objects = list[Json]


@pytest.fixture(scope="module")
def rendered(helm: Helm) -> dict[str, Objects]:
    return {name: helm.template("--values", str(case(name))) for name in CASES}


@pytest.fixture(params=CASES)
def objects(rendered: dict[str, Objects], request: pytest.FixtureRequest) -> Objects:
    return rendered[request.param]


def argv_of(container: Json, node: int = 0) -> list[str]:
    """As the kubelet starts it, with the pod's address, and what a LeaderWorkerSet tells that node of two."""
    known = {
        "POD_IP": "10.1.2.3",
        "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": str(node),
        "LWS_LEADER_ADDRESS": "r-deltaserve-prefill-nodes-0.r-deltaserve-prefill-nodes.prod",
    }
    return [re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], word) for word in container["args"]]


def nodes_in(objects: Objects) -> list[str]:
    """Components of further nodes that there are."""
    return [part for part, _ in pods(objects) if part not in PARTS]


def test_its_version_is_that_of_the_code() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == deltaserve.__version__


@pytest.mark.parametrize("name", CASES)
def test_helm_finds_nothing_to_say(helm: Helm, name: str) -> None:
    done = helm.run("lint", "--strict", "--values", str(case(name)), str(CHART))
    assert done.returncode == 0, done.stdout
    assert not re.findall(r"WARNING|ERROR", done.stdout)


def test_every_object_fits_the_schemas_of_kubernetes(rendered: dict[str, Objects], tmp_path: Path) -> None:
    try:
        metadata.version("kubernetes-validate")
    except metadata.PackageNotFoundError:
        pytest.skip(
            "needs the schemas of Kubernetes: pip install kubernetes-validate (23 MB), as scripts/make-venv does"
        )
    file = tmp_path / "objects.yaml"
    others = ("ServiceMonitor", "LeaderWorkerSet", "DisaggregatedSet")
    known = [each for objects in rendered.values() for each in objects if each["kind"] not in others]
    for spec in (spec for objects in rendered.values() for spec in specs_of_groups(objects)):
        known += [as_pod_template(template) for template in templates_of_groups(spec)]
    file.write_text(yaml.safe_dump_all(known))
    command = [sys.executable, "-W", "ignore", "-m", "kubernetes_validate", "--strict", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert said.count(" passed for resource ") == len(known)


def as_pod_template(template: Json) -> Json:
    """An object of its own, which has a schema."""
    return {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "template"}, "template": template}


def test_a_leader_worker_set_has_fields_that_there_are(rendered: dict[str, Objects]) -> None:
    """Those of api/leaderworkerset/v1/leaderworkerset_types.go in kubernetes-sigs/lws, whose schema nobody packages."""
    for each in of_kind(rendered[TWO_NODES], "LeaderWorkerSet"):
        assert each["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
        spec = dict(each["spec"])
        template = dict(spec.pop("leaderWorkerTemplate"))
        assert spec == {"replicas": 1, "startupPolicy": "LeaderCreated"}
        del template["leaderTemplate"], template["workerTemplate"]
        assert template == {"size": 2, "restartPolicy": "None"}


def test_no_service_is_in_the_way_of_the_one_that_a_leader_worker_set_makes(objects: Objects) -> None:
    """It has the set's name, and leads to pods that are not ready."""
    taken = {each["metadata"]["name"] for each in of_kind(objects, "Service")}
    assert not taken & {each["metadata"]["name"] for each in of_kind(objects, "LeaderWorkerSet")}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model.volume": {}}, "model.volume: where is the model?"),
        ({"replicas": 2}, "replicas"),
        ({"prefill.tpsize": 4}, "tpsize"),
        ({"device": "gpu"}, "device"),
        ({"router.fronts": 0}, "fronts"),
        ({"transfers.network": "eth0"}, "network"),
        ({"serviceMonitor": {"enabled": True, "credentials": {"secretName": "m"}}}, "networkPolicy.metricsFrom lets"),
        ({"networkPolicy.enabled": False, "serviceMonitor.enabled": True}, "serviceMonitor.credentials.secretName"),
        ({"prefill.nodes": 0}, "nodes"),
        ({"kvEvents.enabled": True}, "kvEvents.from lets nobody in"),
        ({"kvEvents.port": 80}, "port"),
        ({"prefill.nodes": 2, "prefill.tpSize": 3}, "prefill.nodes 2: must divide prefill.tpSize, 3 ranks"),
        ({"decode.nodes": 2, "decode.tpSize": 2, "device": "cuda"}, "decode.nodes 2 with device cuda: ranks on GPUs"),
        ({"decode.nodes": 2, "decode.tpSize": 2, "transfers.network": "10.0.0.0/8"}, "leave transfers.network out"),
    ],
)
def test_wrong_values_are_refused_by_name(helm: Helm, values: Json, words: str) -> None:
    done = helm.run("template", "r", str(CHART), "--values", str(case("1p1d")), *set_all(values))
    assert done.returncode != 0
    assert words in done.stderr


def test_a_name_that_leaves_no_room_for_those_of_pods_is_refused(helm: Helm) -> None:
    """The API server refuses pods of a StatefulSet whose name has more than 52 characters."""
    longest, values = "r" * 24, ("--values", str(case(TWO_NODES)))
    assert helm.run("template", longest, str(CHART), *values).returncode == 0
    done = helm.run("template", longest + "r", str(CHART), *values)
    assert done.returncode != 0
    assert "has 50 characters, 49 at most" in done.stderr


def test_its_defaults_are_those_that_the_values_name(helm: Helm) -> None:
    """Nothing that a template needs is missing from values.yaml but the model."""
    volume = set_all({"model.volume": {"hostPath": {"path": "/m"}}})
    assert set(containers(helm.template(*volume))) == set(PARTS)


def test_deltaserve_takes_every_line(objects: Objects) -> None:
    nodes = nodes_in(objects)
    found = {part: settings_of(argv_of(each, int(part in nodes))) for part, each in containers(objects).items()}
    assert set(found) == {*PARTS, *nodes}
    for part in nodes:
        ranks, first = found[part].parallelism, found[part.removesuffix("-node")].parallelism
        assert (first.nnodes, first.node_rank, ranks.node_rank) == (2, 0, 1)
        assert ranks == first.model_copy(update={"node_rank": 1})
    for part in ("prefill", "decode"):
        links = containers(objects)[part]["ports"]
        port = found[part].disaggregation.disaggregation_bootstrap_port
        assert {"name": "links", "containerPort": port} == links[0]
        assert found[part].network.advertise == "10.1.2.3"
    check_router_ports(objects, found["router"])


def check_router_ports(objects: Objects, settings: Settings) -> None:
    network = settings.network
    ports = {each["name"]: each["containerPort"] for each in containers(objects)["router"]["ports"]}
    admin = network.admin_port
    assert admin is not None
    assert ports == {"http": network.port} | {f"admin-{front}": admin + front for front in range(network.fronts)}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("1p1d", {"prefill": (1, 1), "decode": (1, 1), "router": (1, 1)}),
        ("3p1d-tp4", {"prefill": (3, 4), "decode": (1, 4), "router": (1, 1)}),
        ("routers", {"prefill": (1, 1), "decode": (2, 1), "router": (3, 2)}),
        (TWO_NODES, {"prefill": (1, 4), "decode": (1, 2), "router": (1, 1)}),
        (ONE_SET, {"prefill": (3, 1), "decode": (1, 2), "router": (1, 1)}),
    ],
)
def test_it_has_the_shape_that_was_asked_for(
    rendered: dict[str, Objects], name: str, shape: dict[str, tuple[int, int]]
) -> None:
    """Part |-> replicas, and ranks of a worker or fronts of a router."""
    objects = rendered[name]
    found = {}
    for part, count in replicas(objects).items():
        word = "--fronts" if part == "router" else "--tp-size"
        found[part] = (count, int(flag(containers(objects)[part]["args"], word)))
    assert found == shape


def test_a_worker_on_gpus_has_one_for_each_rank(rendered: dict[str, Objects]) -> None:
    objects = rendered["3p1d-tp4"]
    for component, template in pods(objects):
        container = containers(objects)[component]
        gpus = container["resources"].get("limits", {}).get("nvidia.com/gpu")
        shared = [each["name"] for each in template["spec"]["volumes"] if each["name"] == "shm"]
        assert (gpus, shared) == ((None, []) if component == "router" else (4, ["shm"]))
        assert component == "router" or container["resources"]["limits"]["memory"] == "64Gi", "what was asked for stays"


def test_routers_find_workers_behind_the_names_of_the_services(objects: Objects) -> None:
    listed = flag(containers(objects)["router"]["args"], "--workers-dns").split(",")
    assert len(listed) == 2
    for entry in listed:
        role, name, namespace, kind, port = re.fullmatch(r"(\w+)@([\w-]+)\.(\w+)\.(svc):(\d+)", entry).groups()  # type: ignore[union-attr]
        service = named(objects, "Service", name)
        assert (namespace, kind, service["spec"]["clusterIP"]) == ("prod", "svc", "None")
        assert service["spec"]["publishNotReadyAddresses"] is False, "a worker that starts or ends is not listed"
        chosen = [part for part, pod in pods(objects) if selects_labels(service, pod)]
        assert chosen == [role]
        assert (
            int(port) == service["spec"]["ports"][0]["port"] == containers(objects)[role]["ports"][0]["containerPort"]
        )
        for each in of_kind(objects, "StatefulSet"):
            assert each["spec"]["serviceName"] == each["metadata"]["name"]


def selects_labels(service: Json, pod: Json) -> bool:
    return selects({"matchLabels": service["spec"]["selector"]}, pod["metadata"]["labels"])


def test_services_lead_to_ports_of_their_pods(objects: Objects) -> None:
    for service in of_kind(objects, "Service"):
        (part,) = (part for part, pod in pods(objects) if selects_labels(service, pod))
        has = {port["name"] for port in containers(objects)[part]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= has


def test_each_workload_selects_its_own_pods_and_each_budget_one_workload(objects: Objects) -> None:
    for kind in ("StatefulSet", "Deployment", "PodDisruptionBudget"):
        for each in of_kind(objects, kind):
            own = component_of(each)
            of_a_worker = [own, *({f"{own}-node"} & {*nodes_in(objects)})]
            assert chosen_by(each["spec"]["selector"], objects) == of_a_worker
    assert len(of_kind(objects, "PodDisruptionBudget")) == len(PARTS)


def chosen_by(selector: Json, objects: Objects) -> list[str]:
    """Components of the pods that it selects."""
    return [part for part, pod in pods(objects) if selects(selector, pod["metadata"]["labels"])]


def test_workers_are_reached_by_their_own_release_alone(objects: Objects) -> None:
    policy = named(objects, "NetworkPolicy", "r-deltaserve-workers")["spec"]
    assert {*chosen_by(policy["podSelector"], objects)} == {"prefill", "decode"}
    links, pages = policy["ingress"][:2]
    decode = containers(objects)["decode"]
    first, last = next(each["value"] for each in decode["env"] if each["name"] == "UCX_TCP_PORT_RANGE").split("-")
    assert links["ports"] == [{"port": decode["ports"][0]["containerPort"]}]
    assert pages["ports"] == [{"port": int(first), "endPort": int(last)}]
    check_from(links, {*PARTS}, objects)
    check_from(pages, {"prefill", "decode", *nodes_in(objects)}, objects)


def check_from(rule: Json, allowed: set[str], objects: Objects) -> None:
    """It lets in these components of this release, and nobody else."""
    (peer,) = rule["from"]
    assert set(peer) == {"podSelector"}, "of this namespace"
    assert {*chosen_by(peer["podSelector"], objects)} == allowed
    for _, pod in pods(objects):
        other = pod["metadata"]["labels"] | {"app.kubernetes.io/instance": "another"}
        assert not selects(peer["podSelector"], other)


def test_nodes_of_a_worker_reach_each_other_and_pages_reach_them(rendered: dict[str, Objects]) -> None:
    """The ranks of a worker listen on any port."""
    objects = rendered[TWO_NODES]
    pages = named(objects, "NetworkPolicy", "r-deltaserve-workers")["spec"]["ingress"][1]
    for role in ("prefill", "decode"):
        policy = named(objects, "NetworkPolicy", f"r-deltaserve-{role}-nodes")["spec"]
        nodes = {role, f"{role}-node"}
        assert {*chosen_by(policy["podSelector"], objects)} == nodes
        each_other, theirs = policy["ingress"]
        assert "ports" not in each_other
        check_from(each_other, nodes, objects)
        assert theirs == pages
    for name in {*CASES} - {TWO_NODES, ONE_SET}:
        assert len(of_kind(rendered[name], "NetworkPolicy")) == 2


def test_routers_are_reached_at_the_api_and_at_the_admin_ports_by_whom_the_values_name(
    rendered: dict[str, Objects],
) -> None:
    open_to_all = named(rendered["1p1d"], "NetworkPolicy", "r-deltaserve-router")["spec"]["ingress"]
    assert open_to_all == [{"ports": [{"port": 30000}]}]
    api, admin = named(rendered["routers"], "NetworkPolicy", "r-deltaserve-router")["spec"]["ingress"]
    assert api["from"][0]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "apps"}
    assert admin["ports"] == [{"port": 9100, "endPort": 9101}]
    assert admin["from"][0]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "monitoring"}


def test_workers_tell_kv_events_to_whom_the_values_name(rendered: dict[str, Objects]) -> None:
    """Where they publish is what the NetworkPolicy and the services lead to; else there is no such port."""
    objects = rendered["routers"]
    policy = named(objects, "NetworkPolicy", "r-deltaserve-workers")["spec"]
    (rule,) = (
        each for each in policy["ingress"] if each["from"] == [{"podSelector": {"matchLabels": {"app": "picker"}}}]
    )
    for part in ("prefill", "decode"):
        container = containers(objects)[part]
        text = settings_of(argv_of(container)).network.kv_events_config
        assert text is not None
        config = read_kv_events(text)
        ports = {name: port["containerPort"] for port in container["ports"] if (name := port["name"]) != "links"}
        assert config.endpoint == f"tcp://10.1.2.3:{ports['kv-events']}"
        assert config.replay_endpoint == f"tcp://10.1.2.3:{ports['kv-replay']}"
        assert config.topic == "kv@10.1.2.3@acme/tiny:1"
        assert [each["port"] for each in rule["ports"]] == [*ports.values()]
        service = named(objects, "Service", f"r-deltaserve-{part}")["spec"]
        assert {port["targetPort"] for port in service["ports"]} == {"links", *ports}
    for each in containers(rendered["1p1d"]).values():
        assert "--kv-events-config" not in each["args"]


def test_prometheus_scrapes_every_front(rendered: dict[str, Objects]) -> None:
    (monitor,) = of_kind(rendered["routers"], "ServiceMonitor")
    services = of_kind(rendered["routers"], "Service")
    (service,) = (each for each in services if selects(monitor["spec"]["selector"], each["metadata"]["labels"]))
    ports = {port["name"] for port in service["spec"]["ports"]}
    assert {each["port"] for each in monitor["spec"]["endpoints"]} == ports == {"admin-0", "admin-1"}
    assert not of_kind(rendered["1p1d"], "ServiceMonitor")


def test_pods_are_not_root_and_write_to_volumes_of_their_own_only(objects: Objects) -> None:
    for part, pod in pods(objects):
        spec, container = pod["spec"], containers(objects)[part]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
        assert spec["automountServiceAccountToken"] is False
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        volumes = {each["name"]: each for each in spec["volumes"]}
        mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
        assert {each["name"] for each in mounts.values()} == set(volumes)
        writable = {path for path, each in mounts.items() if not each.get("readOnly")}
        assert all("emptyDir" in volumes[mounts[path]["name"]] for path in writable)
        home = next(each["value"] for each in container["env"] if each["name"] == "HOME")
        assert {home, *([flag(container["args"], "--state-dir")] if part == "router" else [])} <= writable


def test_keys_are_mounted_so_that_only_root_and_the_pods_group_can_read_them(objects: Objects) -> None:
    """defaultMode 0400 and fsGroup: the kubelet makes that root:GROUP 0440, which core/files/private_file.py takes."""
    for part, pod in pods(objects):
        context, argv = pod["spec"]["securityContext"], containers(objects)[part]["args"]
        assert context["fsGroup"] == context["runAsGroup"]
        volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
        mounts = {each["mountPath"]: volumes[each["name"]] for each in containers(objects)[part]["volumeMounts"]}
        for name in ("--cluster-key-file", *(["--api-key-file"] if part == "router" else [])):
            folder, _, file = flag(argv, name).rpartition("/")
            secret = mounts[folder]["secret"]
            assert secret["defaultMode"] == 0o400
            assert [item["path"] for item in secret["items"]] == [file]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can lay files as the kubelet does: they are root's")
def test_a_key_as_the_kubelet_lays_it_is_read(tmp_path: Path) -> None:
    """Files in a folder of their own behind two links; root:fsGroup, group-readable."""
    (tmp_path / "..2026_11_26").mkdir()
    file = tmp_path / "..2026_11_26" / "cluster.key"
    file.write_text("k" * 48)
    os.chown(file, 0, 10001)
    file.chmod(0o440)
    (tmp_path / "..data").symlink_to("..2026_11_26")
    (tmp_path / "cluster.key").symlink_to("..data/cluster.key")
    assert read_cluster_key(tmp_path / "cluster.key") == b"k" * 48
    file.chmod(0o444)
    with pytest.raises(ConfigError, match="others can reach it"):
        read_cluster_key(tmp_path / "cluster.key")


def test_pods_have_the_time_to_drain(objects: Objects) -> None:
    for part, pod in pods(objects):
        container = containers(objects)[part]
        if part in NODES:
            assert "lifecycle" not in container, "it ends with its worker: there is nothing to drain"
            continue
        program, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
        assert program == "sleep"
        grace_s = int(float(flag(container["args"], "--shutdown-grace-s")))
        assert pod["spec"]["terminationGracePeriodSeconds"] >= int(seconds) + grace_s + LIFE_S


def test_probes_ask_what_there_is(objects: Objects) -> None:
    found = containers(objects)
    router = found["router"]
    assert router["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "http"}
    assert router["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    for part in ("prefill", "decode"):
        assert found[part]["readinessProbe"]["tcpSocket"] == {"port": "links"}
        patience_s = found[part]["startupProbe"]["periodSeconds"] * found[part]["startupProbe"]["failureThreshold"]
        assert patience_s >= Settings().process.start_timeout_s
        assert "livenessProbe" not in found[part], "a worker that stands still ends by itself"
    for part in nodes_in(objects):
        assert not {"ports", "startupProbe", "readinessProbe", "livenessProbe"} & found[part].keys(), "none is known"


def test_llm_d_reads_routers_as_servers_that_do_both(rendered: dict[str, Objects]) -> None:
    labels = {part: pod["metadata"]["labels"] for part, pod in pods(rendered["routers"])}
    theirs = {part: {k: v for k, v in each.items() if k.startswith("llm-d.ai/")} for part, each in labels.items()}
    assert theirs["router"] == {
        "llm-d.ai/engine-type": "vllm",
        "llm-d.ai/role": "prefill-decode",
        "llm-d.ai/model": "acme_tiny_1",
    }
    assert theirs["prefill"] == {"llm-d.ai/role": "prefill"}, (
        "no model: an InferencePool that selects by it has routers"
    )
    assert settings_of(argv_of(containers(rendered["routers"])["router"])).logging.metrics_on_api_port


PAGES = range(61000, 61100)
"""Ports of page transfers, which no other test is given, nor a connection by the kernel."""
PODS = {"prefill": "127.0.0.2", "decode": "127.0.0.3", "router": "127.0.0.1", "prefill-node": "127.0.0.4"}


def lines_on_loopback(objects: Objects, folder: Path) -> dict[str, list[str]]:
    """Each container's arguments, with an address of loopback for its pod's, and folders here for what is mounted."""
    return {part: [here(word, part, folder) for word in each["args"]] for part, each in containers(objects).items()}


def here(word: str, part: str, folder: Path) -> str:
    if word == "$(POD_IP)/32":
        return "127.0.0.1/32"  # the one that the interface is listed with; it has all of 127.0.0.0/8
    for mounted in ("/etc/deltaserve/cluster", "/etc/deltaserve/api", "/model", "/tmp"):
        if word == mounted or word.startswith(f"{mounted}/"):
            return str(MODEL if mounted == "/model" else folder) + word.removeprefix(mounted)
    for other in ("prefill", "decode"):
        word = word.replace(f"r-deltaserve-{other}.prod.svc", PODS[other])
    word = word.replace("$(LWS_GROUP_SIZE)", "2").replace("$(LWS_WORKER_INDEX)", str(int(part in NODES)))
    word = word.replace("$(LWS_LEADER_ADDRESS)", "localhost")  # a name, of the address that is the network's here
    return word.replace("$(POD_IP)", PODS[part]).replace("0.0.0.0", PODS[part])


def rendered_on(helm: Helm, ports: Sequence[int], values: Json) -> Objects:
    """A worker of each role. `ports`: of links, the API and the admin routes."""
    links, api, admin = ports
    own = {"links.port": links, "router.port": api, "router.adminPort": admin}
    pages = {"transfers.firstPort": PAGES.start, "transfers.lastPort": PAGES.stop - 1}
    return helm.template("--values", str(case("1p1d")), *set_all(own | pages | values))


def test_what_it_renders_serves(helm: Helm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chart's own lines, with pods on addresses of loopback: they find each other by name and answer; they listen
    where the NetworkPolicy lets others in and nowhere else; probes disturb no worker; SIGTERM ends each with 0."""
    links, api, admin = ports = free_ports(3)
    objects = rendered_on(helm, ports, {"router.fronts": 2})
    pages = named(objects, "NetworkPolicy", "r-deltaserve-workers")["spec"]["ingress"][1]["ports"][0]
    set_page_ports(objects, monkeypatch)
    keys = make_keys(tmp_path)
    with running(tmp_path, lines_on_loopback(objects, tmp_path), keys, (api, admin)) as release:
        first = release.ask()
        assert first.status_code == 200, first.text
        check_listeners(release, links, range(pages["port"], pages["endPort"] + 1))
        assert release.listening("router") == {api, admin, admin + 1}
        assert 'instance="decode-127.0.0.3:' in release.metrics()
        probe(PODS["decode"], links)
        probe(PODS["prefill"], links)
        assert release.ask().json()["choices"] == first.json()["choices"]
        for part in ("prefill", "decode"):
            log = release.parts[part].log()
            assert '"level": "info"' in log
            assert '"level": "warning"' not in log and '"level": "error"' not in log


def test_its_workers_tell_kv_events(helm: Helm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the chart's own lines: a listener at each pod hears of a prompt's pages, under its own topic."""
    *ports, port, replay = free_ports(5)
    events = {"kvEvents": {"enabled": True, "port": port, "replayPort": replay, "from": [{"podSelector": {}}]}}
    objects = rendered_on(helm, ports, events)
    set_page_ports(objects, monkeypatch)
    lines = lines_on_loopback(objects, tmp_path)
    with (
        running(tmp_path, lines, make_keys(tmp_path), (ports[1], ports[2])) as release,
        zmq.Context() as context,
        context.socket(zmq.SUB) as listener,
    ):
        pods = [PODS[part] for part in ("prefill", "decode")]
        for pod in pods:
            listener.connect(f"tcp://{pod}:{port}")
        listener.subscribe("kv@")
        listener.rcvtimeo = round(1000 * PATIENCE_S)
        heard: set[bytes] = set()
        expected = {f"kv@{pod}@recall-micro".encode() for pod in pods}
        for number in range(100):
            assert release.ask(f"{number} {PROMPT}").status_code == 200
            topic, _, payload = listener.recv_multipart()
            if any(kind == "BlockStored" for kind, *_ in msgspec.msgpack.decode(payload)[1]):
                heard.add(topic)
            if heard == expected:
                break
        assert heard == expected


def set_page_ports(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in containers(objects)["decode"]["env"]:
        if each["name"] == "UCX_TCP_PORT_RANGE":
            monkeypatch.setenv(each["name"], each["value"])


def test_a_worker_on_two_nodes_serves(helm: Helm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Further nodes find the first by a name, and listen for nothing but pages."""
    *ports, nodes = free_ports(4)
    links, api, admin = ports
    objects = rendered_on(helm, ports, {"nodes.port": nodes, "prefill.nodes": 2, "prefill.tpSize": 2})
    set_page_ports(objects, monkeypatch)
    lines = lines_on_loopback(objects, tmp_path)
    with running(tmp_path, lines, make_keys(tmp_path), (api, admin)) as release:
        answer = release.ask()
        assert answer.status_code == 200, answer.text
        assert {links, nodes} <= release.listening("prefill")
        assert release.listening("prefill-node") and release.listening("prefill-node") <= {*PAGES}


def check_listeners(release: Release, links: int, pages: range) -> None:
    for part in ("prefill", "decode"):
        found = release.listening(part)
        assert links in found
        assert found - {links} and found - {links} <= set(pages)


def probe(host: str, port: int) -> None:
    """As the kubelet's tcpSocket probe: connects, and closes."""
    for _ in range(20):
        socket.create_connection((host, port)).close()
