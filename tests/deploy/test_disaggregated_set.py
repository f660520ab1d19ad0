"""The chart's DisaggregatedSet: fields that there are, the pods of the other sets, found under names of its controller.

The API is kubernetes-sigs/lws's `disaggregatedset.x-k8s.io/v1`, released with 0.9.0 and 0.10.0. Nobody packages its
CRD, nor was a controller tried: what the tests know of both is written down here from its sources, named where it is.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import jsonschema_rs
import pytest

from tests.deploy.rendered import CHART, Helm, Json, case, of_kind, pods, selects, set_all, templates_of_groups

CASES = ("1p1d", "3p1d-tp4", "1p1d-two-nodes")
ON = {"disaggregatedSet.enabled": True}
WORKLOADS = ("StatefulSet", "LeaderWorkerSet", "DisaggregatedSet")
NAME_LIMIT = 63
"""Characters of a label's value and of a service's name."""
STATEFUL_SET_LIMIT = 52
"""Characters of a StatefulSet's name: its pods have a label with it, a hyphen and a hash of 10."""

_SHARE: Final = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^[0-9]+%$"}]}


def closed(required: list[str], **properties: Json) -> Json:
    """The schema of an object that has no other fields: the API server drops those that a CRD does not name."""
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


_POD: Final = {"type": "object", "required": ["metadata", "spec"]}
SCHEMA: Final = closed(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "disaggregatedset.x-k8s.io/v1"},
    kind={"const": "DisaggregatedSet"},
    metadata={"type": "object", "required": ["name"]},
    spec=closed(
        ["roles"],
        roles={
            "type": "array",
            "minItems": 2,
            "maxItems": 10,
            "items": closed(
                ["name", "spec"],
                name={"type": "string", "maxLength": 63, "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
                metadata={"type": "object"},
                spec=closed(
                    ["leaderWorkerTemplate"],
                    replicas={"type": "integer", "minimum": 0},
                    startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
                    networkConfig=closed(["subdomainPolicy"], subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
                    rolloutStrategy=closed(
                        ["type"],
                        type={"enum": ["RollingUpdate"]},
                        rollingUpdateConfiguration=closed([], maxSurge=_SHARE, maxUnavailable=_SHARE),
                    ),
                    leaderWorkerTemplate=closed(
                        ["workerTemplate"],
                        leaderTemplate=_POD,
                        workerTemplate=_POD,
                        size={"type": "integer", "minimum": 1},
                        restartPolicy={"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
                    ),
                ),
            ),
        },
    ),
)
"""The fields of 0.9 of config/crd/bases/disaggregatedset.x-k8s.io_disaggregatedsets.yaml (read at commits 11638ef2, its
types, and 03e24b07), pods apart, without `partition`, which its webhook refuses."""


@dataclass(frozen=True, slots=True)
class MadePod:
    """A pod as the controllers make it of a role."""

    name: str
    node: int
    labels: dict[str, str]
    template: Json


def made_pods(made_of: Json, revision: str) -> Iterator[MadePod]:
    """All pods of one revision: the LeaderWorkerSet of a role is NAME-SLICE-REVISION-ROLE (GenerateName in lws's
    pkg/utils/disaggregatedset/utils.go; 0.9 has no slices), its pods are that and -GROUP, further ones -GROUP-NODE;
    templates keep their labels beside GenerateLabels' (Create in pkg/controllers/disaggregatedset/lws_manager.go)."""
    whole = made_of["metadata"]["name"]
    for role in made_of["spec"]["roles"]:
        own = {
            "app": f"{whole}-0-{role['name']}",
            "disaggregatedset.x-k8s.io/name": whole,
            "disaggregatedset.x-k8s.io/role": role["name"],
            "disaggregatedset.x-k8s.io/slice": "0",
            "disaggregatedset.x-k8s.io/revision": revision,
            "leaderworkerset.sigs.k8s.io/name": f"{whole}-0-{revision}-{role['name']}",
        }
        templates = templates_of_groups(role["spec"])
        for group in range(role["spec"]["replicas"]):
            for node in range(role["spec"]["leaderWorkerTemplate"]["size"]):
                template = templates[0 if node == 0 else -1]
                name = f"{own['leaderworkerset.sigs.k8s.io/name']}-{group}" + (f"-{node}" if node else "")
                yield MadePod(name, node, template["metadata"]["labels"] | own, template)


@pytest.fixture(scope="module")
def both(helm: Helm) -> dict[str, tuple[list[Json], list[Json]]]:
    """Case |-> without a DisaggregatedSet, and with one."""
    values = {name: ("--values", str(case(name))) for name in CASES}
    return {name: (helm.template(*words), helm.template(*words, *set_all(ON))) for name, words in values.items()}


@pytest.fixture(params=CASES)
def apart_and_objects(
    both: dict[str, tuple[list[Json], list[Json]]], request: pytest.FixtureRequest
) -> tuple[list[Json], list[Json]]:
    return both[request.param]


@pytest.fixture
def apart(apart_and_objects: tuple[list[Json], list[Json]]) -> list[Json]:
    """The same values without a DisaggregatedSet."""
    return apart_and_objects[0]


@pytest.fixture
def objects(apart_and_objects: tuple[list[Json], list[Json]]) -> list[Json]:
    return apart_and_objects[1]


def one_set(objects: list[Json]) -> Json:
    (found,) = of_kind(objects, "DisaggregatedSet")
    return found


def test_it_takes_the_place_of_the_workers_sets_and_changes_nothing_else(
    apart: list[Json], objects: list[Json]
) -> None:
    def others(rendered: list[Json]) -> list[Json]:
        return [each for each in rendered if each["kind"] not in WORKLOADS]

    assert others(objects) == others(apart)
    assert [each["kind"] for each in objects if each["kind"] in WORKLOADS] == ["DisaggregatedSet"]


def test_its_pods_are_those_of_the_workers_sets(apart: list[Json], objects: list[Json]) -> None:
    """Probes, preStop, Secrets, labels: the other tests check them for those sets."""
    assert dict(pods(objects)) == dict(pods(apart))


def test_its_fields_are_those_of_the_crd(objects: list[Json]) -> None:
    made_of = one_set(objects)
    schema = jsonschema_rs.validator_for(SCHEMA)
    schema.validate(made_of)
    misplaced = {"name": "prefill", "replicas": 1, "spec": made_of["spec"]["roles"][0]["spec"]}
    assert not schema.is_valid(made_of | {"spec": {"roles": [misplaced, made_of["spec"]["roles"][1]]}})


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("1p1d", {"prefill": (1, 1), "decode": (1, 1)}),
        ("3p1d-tp4", {"prefill": (3, 1), "decode": (1, 1)}),
        ("1p1d-two-nodes", {"prefill": (1, 2), "decode": (1, 2)}),
    ],
)
def test_its_roles_say_what_the_values_say(
    both: dict[str, tuple[list[Json], list[Json]]], name: str, shape: dict[str, tuple[int, int]]
) -> None:
    """Role |-> replicas, and pods of each."""
    roles = one_set(both[name][1])["spec"]["roles"]
    assert [role["name"] for role in roles] == ["prefill", "decode"]
    for role in roles:
        spec = dict(role["spec"])
        template = dict(spec.pop("leaderWorkerTemplate"))
        count, size = shape[role["name"]]
        limits = {"maxSurge": 0, "maxUnavailable": 1}
        strategy = {"type": "RollingUpdate", "rollingUpdateConfiguration": limits}
        assert spec == {"replicas": count, "startupPolicy": "LeaderCreated", "rolloutStrategy": strategy}
        templates = {"workerTemplate"} | ({"leaderTemplate"} if size > 1 else set())
        assert template.keys() == {"size", "restartPolicy"} | templates
        assert (template["size"], template["restartPolicy"]) == (size, "None")


def test_routers_find_every_worker_of_both_revisions_and_no_further_node(objects: list[Json]) -> None:
    """The names of pods do not matter: a service selects by labels of the chart, which the controller leaves."""
    made = [pod for revision in ("0a1b2c3d", "4e5f6a7b") for pod in made_pods(one_set(objects), revision)]
    roles = {role["name"]: role["spec"]["replicas"] for role in one_set(objects)["spec"]["roles"]}
    (router,) = (pod for part, pod in pods(objects) if part == "router")
    listed = router["spec"]["containers"][0]["args"]
    entries = listed[listed.index("--workers-dns") + 1].split(",")
    for role, entry in zip(("prefill", "decode"), entries, strict=True):
        name = re.fullmatch(rf"{role}@([\w-]+)\.prod\.svc:\d+", entry)
        assert name is not None
        (service,) = (each for each in of_kind(objects, "Service") if each["metadata"]["name"] == name[1])
        found = [pod for pod in made if selects({"matchLabels": service["spec"]["selector"]}, pod.labels)]
        assert found == [pod for pod in made if f"-{role}-" in pod.name and pod.node == 0]
        assert len(found) == 2 * roles[role]
        ports = {port["name"] for pod in found for port in pod.template["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_no_service_of_the_chart_is_in_the_way_of_those_of_the_controllers(objects: list[Json]) -> None:
    """A LeaderWorkerSet's has its name, through which further nodes find the first; up to 0.10 there is one more,
    with -prv (pkg/controllers/disaggregatedset/service_manager.go)."""
    taken = {each["metadata"]["name"] for each in of_kind(objects, "Service")}
    sets = {pod.labels["leaderworkerset.sigs.k8s.io/name"] for pod in made_pods(one_set(objects), "0a1b2c3d")}
    assert len(sets) == 2 and taken
    assert not taken & (sets | {f"{name}-prv" for name in sets})


@pytest.mark.parametrize("name", CASES)
def test_helm_finds_nothing_to_say(helm: Helm, name: str) -> None:
    done = helm.run("lint", "--strict", "--values", str(case(name)), *set_all(ON), str(CHART))
    assert done.returncode == 0, done.stdout
    assert not re.findall(r"WARNING|ERROR", done.stdout)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"prefill.replicas": 0},
            "prefill.replicas 0 and decode.replicas 1: either both roles have workers or neither",
        ),
        ({"decode.replicas": 0}, "prefill.replicas 1 and decode.replicas 0: either both roles have workers or neither"),
        ({"disaggregatedSet.maxUnavailable": 0}, "are both 0: a rollout could replace no worker"),
        ({"disaggregatedSet.slices": 2}, "slices"),
        ({"disaggregatedSet.maxSurge": -1}, "maxSurge"),
        ({"decode.nodes": 2, "decode.tpSize": 3}, "decode.nodes 2: must divide decode.tpSize, 3 ranks"),
        ({"decode.nodes": 2, "decode.tpSize": 2, "device": "cuda"}, "decode.nodes 2 with device cuda: ranks on GPUs"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(helm: Helm, values: Json, words: str) -> None:
    done = helm.run("template", "r", str(CHART), "--values", str(case("1p1d")), *set_all(ON | values))
    assert done.returncode != 0
    assert words in done.stderr


def test_it_may_have_no_workers_of_either_role(helm: Helm) -> None:
    none = set_all(ON | {"prefill.replicas": 0, "decode.replicas": 0})
    roles = one_set(helm.template("--values", str(case("1p1d")), *none))["spec"]["roles"]
    assert [role["spec"]["replicas"] for role in roles] == [0, 0]


def test_names_that_the_controllers_make_fit_for_the_longest_release_with_all_its_workers(helm: Helm) -> None:
    """A StatefulSet is made for the leaders, with the set's name, and one for the further nodes of each group."""
    words = ("--values", str(case("1p1d-two-nodes")), *set_all(ON | {"prefill.replicas": 64}))
    longest = "r" * 19
    made_of = one_set(helm.template(*words, release=longest))
    assert made_of["metadata"]["name"] == f"{longest}-deltaserve"
    for pod in made_pods(made_of, "0a1b2c3d"):
        of_further_nodes = pod.name if pod.node == 0 else pod.name.rpartition("-")[0]
        assert len(of_further_nodes) <= STATEFUL_SET_LIMIT
        assert all(len(value) <= NAME_LIMIT for value in pod.labels.values())
    done = helm.run("template", longest + "r", str(CHART), *words)
    assert done.returncode != 0
    assert "has 31 characters, 30 at most" in done.stderr
