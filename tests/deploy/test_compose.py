"""The compose file: it fits together, and its lines serve; the images' health check and Grafana's board against it."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.deploy.board import BOARD, expressions, series_of
from tests.deploy.lines import settings_of
from tests.deploy.running import MODEL, PROMPT, Release, make_keys, running
from tests.e2e.server import wait_until
from tests.patience import PATIENCE_S
from tests.ports import free_port, free_ports

DEPLOY = BOARD.parents[1]
FOLDER = DEPLOY / "compose"
PARTS = ("prefill", "decode", "router")
LIFE_S = 10
"""Seconds for processes to end once requests have: docs/operations.md."""
Json = dict[str, Any]


def interpolated(text: str) -> str:
    """As compose reads it with nothing in the environment but the folder of the model."""
    text = text.replace("${MODEL_DIR:?the folder of the model}", "/srv/model")
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


@pytest.fixture(scope="module")
def services() -> dict[str, Json]:
    found: dict[str, Json] = yaml.safe_load(interpolated((FOLDER / "compose.yaml").read_text()))["services"]
    return found


@pytest.fixture(scope="module")
def whole() -> Json:
    found: Json = yaml.safe_load(interpolated((FOLDER / "compose.yaml").read_text()))
    return found


def test_deltaserve_takes_every_line(services: dict[str, Json]) -> None:
    found = {part: settings_of(services[part]["command"]) for part in PARTS}
    listed = set((found["router"].network.workers or "").split(","))
    links = found["prefill"].disaggregation.disaggregation_bootstrap_port
    assert listed == {f"{part}@{found[part].network.advertise}:{links}" for part in ("prefill", "decode")}
    assert [found[part].network.advertise for part in ("prefill", "decode")] == ["prefill", "decode"], "service names"
    for part in PARTS:
        seconds = int(services[part]["stop_grace_period"].removesuffix("s"))
        assert seconds >= found[part].process.shutdown_grace_s + LIFE_S


def test_parts_are_confined(whole: Json) -> None:
    for part in PARTS:
        service = whole["services"][part]
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert service["volumes"] == ["/srv/model:/model:ro"]
        assert service["user"] == "1000:1000"
    networks = {name: set(service["networks"]) for name, service in whole["services"].items()}
    assert networks["prefill"] == networks["decode"] == {"workers"}
    assert [name for name, on in networks.items() if "workers" in on] == [*PARTS], "nobody else sees page transfers"
    assert whole["networks"]["workers"]["internal"] is True
    subnet = whole["networks"]["workers"]["ipam"]["config"][0]["subnet"]
    for part in ("prefill", "decode"):
        assert settings_of(whole["services"][part]["command"]).security.trusted_data_network == subnet
    published = [port for service in whole["services"].values() for port in service.get("ports", [])]
    assert published and all(port.startswith("127.0.0.1:") for port in published)


def test_what_is_mounted_is_there(whole: Json) -> None:
    for service in whole["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source == "/srv/model" or (FOLDER / source).exists(), volume
        for secret in service.get("secrets", []):
            assert secret in whole["secrets"]
    readme = (FOLDER / "README.md").read_text()
    for secret in whole["secrets"].values():
        assert f"> {secret['file'].removeprefix('./')}" in readme, "the page says how to make it"


def test_prometheus_reads_the_admin_port_and_grafana_reads_prometheus(whole: Json) -> None:
    router = settings_of(whole["services"]["router"]["command"])
    (job,) = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"router:{router.network.admin_port}"]}]
    secret = job["authorization"]["credentials_file"].removeprefix("/run/secrets/")
    assert secret in whole["services"]["prometheus"]["secrets"]
    (source,) = yaml.safe_load((FOLDER / "grafana/datasources/prometheus.yaml").read_text())["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    (provider,) = yaml.safe_load((FOLDER / "grafana/dashboards/deltaserve.yaml").read_text())["providers"]
    mounts = [volume.split(":") for volume in whole["services"]["grafana"]["volumes"]]
    (board,) = (source for source, target, _ in mounts if target == provider["options"]["path"])
    assert (FOLDER / board / BOARD.name).resolve() == BOARD


@pytest.fixture(scope="module")
def release(services: dict[str, Json], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    """Its lines, with loopback for its networks, and files here for what is mounted."""
    folder = tmp_path_factory.mktemp("compose")
    keys = make_keys(folder)
    prefill, decode, api, admin = free_ports(4)
    places = {
        "/run/secrets": str(folder),
        "/tmp": str(folder),
        "0.0.0.0": "127.0.0.1",
        "172.30.231.0/24": "127.0.0.0/8",
        "--advertise=prefill": "--advertise=127.0.0.1",
        "--advertise=decode": "--advertise=127.0.0.1",
        "prefill:8998": f"127.0.0.1:{prefill}",
        "decode:8998": f"127.0.0.1:{decode}",
        "=9100": f"={admin}",
    }
    own = {
        "prefill": [f"--disaggregation-bootstrap-port={prefill}"],
        "decode": [f"--disaggregation-bootstrap-port={decode}"],
        "router": [f"--port={api}"],
    }
    lines = {part: [*(here(word, places) for word in services[part]["command"]), *own[part]] for part in PARTS}
    pages = {part: [*line, "--page-size=16"] for part, line in lines.items()}
    with running(folder, pages, keys, (api, admin)) as found:
        yield found


def here(word: str, places: dict[str, str]) -> str:
    if word == "/model":
        return str(MODEL)
    pattern = "|".join(re.escape(place) for place in sorted(places, key=len, reverse=True))
    return re.sub(pattern, lambda match: places[match[0]], word)


def test_its_lines_serve(release: Release) -> None:
    reply = release.ask()
    assert reply.status_code == httpx.codes.OK, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 8
    url = f"{release.api_url}/v1/models"
    assert httpx.get(url, timeout=PATIENCE_S).status_code == httpx.codes.UNAUTHORIZED
    metrics = httpx.get(f"{release.api_url}/metrics", timeout=PATIENCE_S)
    assert metrics.status_code != httpx.codes.OK, "on the admin port alone"


def use(release: Release) -> None:
    """Traffic that every panel of the board shows: answers, a hit, an error."""
    for _ in range(2):
        release.ask(max_tokens=16).raise_for_status()
    url = f"{release.api_url}/v1/completions"
    headers = {"Authorization": f"Bearer {release.keys.user}", "X-Deadline-Seconds": "0.001"}
    body = {"prompt": PROMPT * 9, "max_tokens": 64, "ignore_eos": True}
    refused = httpx.post(url, json=body, headers=headers, timeout=PATIENCE_S)
    assert refused.is_error, "an error to count"


def test_every_series_of_the_board_comes_from_a_running_server(release: Release) -> None:
    """Names of metrics and of labels, and values of labels that must be equal, of every query."""
    use(release)

    def missing() -> list[str]:
        told = series_of(release.metrics())
        return [problem for expression in expressions() for problem in expression.problems(told)]

    wait_until(lambda: not missing(), f"what the board asks for; last: {missing()}", release.parts["router"])


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus: apt-get install prometheus")
def test_prometheus_answers_every_query_of_the_board(release: Release, tmp_path: Path) -> None:
    """As configured for compose, with loopback for its networks."""
    with Scraper(tmp_path, release) as scraper:
        wait_until(scraper.has_scraped, "a first look", release.parts["router"])
        use(release)

        def unanswered() -> list[str]:
            return [each.text for each in expressions() if not scraper.answers(each.text)]

        wait_until(lambda: not unanswered(), f"series of every query; last: {unanswered()}", release.parts["router"])


class Scraper:
    """A Prometheus that reads the admin port of a release."""

    def __init__(self, folder: Path, release: Release) -> None:
        text = (FOLDER / "prometheus.yaml").read_text()
        config = yaml.safe_load(text)
        key = folder / "metrics.key"
        key.write_text(release.keys.admin)
        config["global"]["scrape_interval"] = "1s"
        (job,) = config["scrape_configs"]
        job["authorization"]["credentials_file"] = str(key)
        job["static_configs"] = [{"targets": [release.admin_url.removeprefix("http://")]}]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self._folder, self._port = folder, free_port()

    def __enter__(self) -> "Scraper":
        options = {
            "config.file": self._folder / "prometheus.yaml",
            "storage.tsdb.path": self._folder / "data",
            "web.listen-address": f"127.0.0.1:{self._port}",
        }
        argv = ["prometheus", *(f"--{name}={value}" for name, value in options.items())]
        self._log = (self._folder / "log").open("w")
        self._popen = subprocess.Popen(argv, stdout=self._log, stderr=subprocess.STDOUT)
        return self

    def __exit__(self, *_: object) -> None:
        self._popen.terminate()
        self._popen.wait(PATIENCE_S)
        self._log.close()

    def has_scraped(self) -> bool:
        assert self._popen.poll() is None, (self._folder / "log").read_text()
        return self.answers("up == 1")

    def answers(self, query: str) -> bool:
        """With at least one series, over the last minute."""
        asked = {"query": query.replace("$__rate_interval", "1m").replace("$job", ".+")}
        try:
            reply = httpx.get(f"http://127.0.0.1:{self._port}/api/v1/query", params=asked, timeout=PATIENCE_S)
        except httpx.TransportError:
            return False
        return reply.is_success and bool(reply.json()["data"]["result"])


def test_the_health_check_of_the_images_tells_life_from_death(release: Release) -> None:
    api, links = int(release.api_url.rpartition(":")[2]), links_port(release)
    nobody = free_port()
    check = [sys.executable, str(DEPLOY / "images" / "healthcheck.py")]
    for ports, code in (((api, nobody), 0), ((nobody, links), 0), ((nobody, nobody), 1), ((links, nobody), 1)):
        done = subprocess.run([*check, *map(str, ports)], check=False)
        assert done.returncode == code, ports


def links_port(release: Release) -> int:
    word = release.parts["decode"].argv[-2]
    assert word.startswith("--disaggregation-bootstrap-port=")
    return int(word.partition("=")[2])


def test_the_board_is_one_that_grafana_loads() -> None:
    board = json.loads(BOARD.read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    variables = {each["name"] for each in board["templating"]["list"]}
    assert variables == {"datasource", "job"}
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(board["panels"])))
    assert used <= variables | {"__rate_interval"}
    places = [tuple(panel["gridPos"][key] for key in "xywh") for panel in board["panels"]]
    for place in places:
        assert [other for other in places if overlap(place, other)] == [place]


def overlap(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    (x, y, w, h), (x2, y2, w2, h2) = one, other
    return x < x2 + w2 and x2 < x + w and y < y2 + h2 and y2 < y + h


def test_every_query_is_promql() -> None:
    parser = pytest.importorskip("promql_parser", reason="needs a parser of PromQL: pip install promql-parser (1.5 MB)")
    for expression in expressions():
        parser.parse(expression.text.replace("$__rate_interval", "1m").replace("$job", ".+"))
