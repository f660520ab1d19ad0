"""What a dialect costs: a file and a line. One with an event framing of its own is added to a copy of the sources, and
each that is there is taken away from one; the copies serve."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deltaserve.core.branches import DIALECTS as BRANCHES
from deltaserve.server.dialects.registry import DIALECTS
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
HERE = Path("deltaserve/server/dialects")
TABLE = Path("deltaserve/core/branches.py")
LINE = '        "{0}": Branch("deltaserve.server.dialects.{0}"),\n'
"""A dialect's own."""
FIRST = LINE.format("completions")


def copied(folder: Path, change: Callable[[str], str]) -> Path:
    """A copy of the sources whose table of dialects is changed."""
    shutil.copytree(ROOT / "src", folder, ignore=shutil.ignore_patterns("__pycache__"))
    table = folder / TABLE
    changed = change(table.read_text())
    assert changed != table.read_text()
    table.write_text(changed)
    return folder


def run(sources: Path, *arguments: object) -> Any:
    """What `tests.server.try_dialects` prints with these sources."""
    env = {**os.environ, "PYTHONPATH": f"{sources}{os.pathsep}{ROOT}"}
    argv = [sys.executable, "-m", "tests.server.try_dialects", *map(str, arguments)]
    done = subprocess.run(argv, env=env, cwd=sources, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", BRANCHES)
def test_a_server_without_a_dialect(tmp_path: Path, model_folder: Path, name: str) -> None:
    sources = copied(tmp_path / "src", lambda text: text.replace(LINE.format(name), ""))
    (sources / HERE / f"{name}.py").unlink()
    gone = dict(zip(BRANCHES, DIALECTS, strict=True))[name].route.path
    served = {dialect.route.path for dialect in DIALECTS} - {gone}
    found = run(sources, model_folder)
    assert {path for path, status in found.items() if status == 200} == served


def test_a_dialect_with_named_events_is_a_file_and_a_line(tmp_path: Path, model_folder: Path) -> None:
    sources = copied(tmp_path / "src", lambda text: text.replace(FIRST, LINE.format("named_events") + FIRST))
    shutil.copy(ROOT / "tests/server/named_events.py", sources / HERE)
    found = run(sources, model_folder, "/v1/named")
    assert set(found["paths"]) >= {"/v1/named", *(dialect.route.path for dialect in DIALECTS)}
    described = found["described"]["post"]
    assert described["responses"]["429"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/NamedError"
    }
    assert "text/event-stream" in described["responses"]["200"]["content"]
    assert found["whole"] == [200, {"said": "ba", "used": {"in": 3, "out": 2}}]
    assert found["streamed"] == [
        ["begun", {"model": "tiny", "in": 3}],
        ["said", {"text": "b"}],
        ["said", {"text": "a"}],
        ["ended", {"used": {"in": 3, "out": 2}}],
    ]
    failure = {"kind": "error", "what": "compute_failed"}
    assert found["failed_midway"] == [
        ["begun", {"model": "tiny", "in": 3}],
        ["said", {"text": "b"}],
        ["error", failure],
    ]
    assert found["failed_before"] == [500, failure]
    assert found["wrong_field"] == [400, {"kind": "error", "what": "invalid_value"}]
    assert found["wrong_method"] == [405, {"kind": "error", "what": "method_not_allowed"}]
    assert found["without_key"] == [401, {"kind": "error", "what": "invalid_api_key"}]
