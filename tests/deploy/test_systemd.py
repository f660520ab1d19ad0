"""The systemd units: systemd takes them; deltaserve takes what they start and the files of variables beside them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deltaserve.process.children.exits import Exit
from deltaserve.settings.config import Settings
from tests.deploy.lines import settings_of

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
PROGRAM = "/opt/deltaserve/bin/deltaserve"
PARTS = ("prefill", "decode", "router")
LIFE_S = 10
"""Seconds for processes to end once requests have: docs/operations.md."""


class Unit:
    """The section [Service] of a unit's file. A key that comes again adds a value."""

    def __init__(self, part: str) -> None:
        section = (FOLDER / f"deltaserve-{part}.service").read_text().partition("[Service]\n")[2].partition("\n[")[0]
        pairs = [line.split("=", 1) for line in section.splitlines() if line and not line.startswith("#")]
        self._values: dict[str, list[str]] = {}
        for key, value in pairs:
            self._values.setdefault(key, []).append(value)

    def all(self, key: str) -> list[str]:
        return self._values[key]

    def value(self, key: str) -> str:
        (only,) = self._values[key]
        return only


def variables(text: str) -> dict[str, str]:
    """An EnvironmentFile of plain lines."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def environment(unit: Unit) -> dict[str, str]:
    files = [(FOLDER / Path(path).name).read_text() for path in unit.all("EnvironmentFile")]
    own = variables("\n".join(unit.all("Environment")))
    return {key: value for text in files for key, value in variables(text).items()} | own


@pytest.mark.parametrize("part", PARTS)
def test_systemd_takes_the_unit(part: str, tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("needs systemd-analyze, of Debian's package systemd")
    text = (FOLDER / f"deltaserve-{part}.service").read_text()
    unit = tmp_path / f"deltaserve-{part}.service"
    unit.write_text(text.replace(PROGRAM, sys.executable))  # which has to exist
    done = subprocess.run([program, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("part", PARTS)
def test_deltaserve_takes_its_line_and_its_variables(part: str) -> None:
    unit = Unit(part)
    program, *argv = unit.value("ExecStart").split()
    assert program == PROGRAM and argv == [part]
    settings = settings_of(argv, environment(unit))
    assert int(unit.value("TimeoutStopSec")) >= settings.process.shutdown_grace_s + LIFE_S
    assert settings.security.cluster_key_file == "/etc/deltaserve/cluster.key"


def test_routers_name_the_workers_of_the_other_files() -> None:
    found = {part: settings_of([part], environment(Unit(part))) for part in PARTS}
    port = Settings().disaggregation.disaggregation_bootstrap_port
    expected = ",".join(f"{part}@{found[part].network.host}:{port}" for part in ("prefill", "decode"))
    assert found["router"].network.workers == expected


@pytest.mark.parametrize("part", PARTS)
def test_a_wrong_configuration_is_not_tried_again(part: str) -> None:
    assert Unit(part).value("RestartPreventExitStatus") == str(int(Exit.CONFIG))


@pytest.mark.parametrize("part", PARTS)
def test_the_folders_it_writes_to_are_its_own(part: str) -> None:
    """ProtectSystem=strict leaves nothing else, beside a private /tmp."""
    unit = Unit(part)
    assert (unit.value("ProtectSystem"), unit.value("PrivateTmp")) == ("strict", "true")
    own = environment(unit)
    if part == "router":
        assert own["DELTASERVE_STATE_DIR"] == f"/run/{unit.value('RuntimeDirectory')}"
    else:
        assert own["HOME"] == f"/var/cache/{unit.value('CacheDirectory')}"
