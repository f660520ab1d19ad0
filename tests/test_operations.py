"""docs/operations.md lists every metric there is, with the meaning that the code gives it."""

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from deltaserve.control.front.client import EngineStats
from deltaserve.core.ids import PeerName, Role
from deltaserve.core.metrics import HELP, read_samples
from deltaserve.process.children.exits import Exit
from deltaserve.process.links.limits import LinkStats
from deltaserve.process.worker.build import make_instance
from deltaserve.server.admission import Admission
from deltaserve.server.foreign_metrics import ForeignMetrics
from deltaserve.server.prometheus import ServerMetrics
from deltaserve.server.settings import ServerSettings
from deltaserve.sim.cluster import Shape, worker_config

DOCUMENT = (Path(__file__).parent.parent / "docs" / "operations.md").read_text()
ROWS = dict(re.findall(r"^\| `((?:deltaserve|process)_\w+)` \| (.+) \|$", DOCUMENT, re.MULTILINE))


def of_the_front() -> dict[str, str]:
    registry = CollectorRegistry()
    ServerMetrics(registry, EngineStats, Admission(ServerSettings("m")), ForeignMetrics(registry, (), "m"))
    families = {f.name + ("_total" if f.type == "counter" else ""): f.documentation for f in registry.collect()}
    return {name: text for name, text in families.items() if name not in HELP}


def test_every_metric_is_listed_with_its_meaning_and_no_other() -> None:
    assert {**of_the_front(), **HELP} == ROWS


def test_whatever_a_worker_tells_has_a_meaning() -> None:
    told = dict(LinkStats().as_metrics())
    for role in (Role.PREFILL, Role.DECODE):
        told |= make_instance(worker_config(Shape(), PeerName(f"{role.value}-0"), role, 1)).metrics()
    names = {sample.name for sample in read_samples(told)}
    assert names <= HELP.keys()
    assert len(names) > 20


def test_every_exit_code_is_explained() -> None:
    codes = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", DOCUMENT, re.MULTILINE) for code in row.split(",")}
    assert codes == {int(code) for code in Exit}
