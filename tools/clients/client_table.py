"""Runs the checks of unmodified clients against a server, and writes docs/clients.md.

    python -m tools.clients.client_table [NAME ...] [--folder FOLDER] [--port PORT] [--print] [--where-installable]

Each client gets an environment of its own under FOLDER (kept: the next run has it at once), with the newest version
that the package index has. With names only those clients run, and the rows of the others stay as they are. A client
whose program the system lacks (npm, Chromium) is left out, and with --where-installable one that cannot be installed.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tools.clients.catalogue import CLIENTS, Served
from tools.clients.environments import Environment, missing_program
from tools.clients.results_page import Row, page_of
from tools.clients.serving import ROOT, Place, halves, path_of, serving

PAGE = ROOT / "docs" / "clients.md"
_CLIENT_S = 1800.0
_MAX_TOLD = 200


def main() -> int:
    """0, or 1 where a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)}; by default all")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "deltaserve-clients")
    parser.add_argument("--port", type=int, default=30099)
    parser.add_argument("--print", action="store_true", help="write nothing")
    parser.add_argument("--where-installable", action="store_true", help="what cannot be installed is no failure")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - CLIENTS.keys()
    if unknown:
        parser.error(f"{', '.join(unknown)}: no client of {', '.join(CLIENTS)}")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    chosen = [Environment(name, CLIENTS[name], arguments.folder / name) for name in arguments.names or CLIENTS]
    rows: list[Row] = []
    chosen = list(_present(chosen))
    failed = list(_not_installed(chosen))
    rows += [] if arguments.where_installable else failed
    installed = [environment for environment in chosen if environment.name not in {row.client for row in failed}]
    for row in _rows(installed, Place(arguments.port, arguments.port + 2), arguments.folder):
        print(row, flush=True)
        rows.append(row)
    if not arguments.print:
        PAGE.write_text(page_of(rows, list(CLIENTS), PAGE.read_text()))
    return 1 if any(row.failed for row in rows) else 0


def _present(chosen: Iterable[Environment]) -> Iterator[Environment]:
    """Those whose program is there."""
    for environment in chosen:
        missing = missing_program(environment.client)
        if missing is None:
            yield environment
        else:
            print(f"{environment.name} is left out: there is no {missing}", flush=True)


def _not_installed(chosen: Iterable[Environment]) -> Iterator[Row]:
    """Install each; rows of those with which that fails."""
    for environment in chosen:
        print(f"installing {environment.name}", flush=True)
        try:
            environment.install()
        except subprocess.CalledProcessError as error:
            row = _row(environment, "none", ["install"], [("install", f"exit code {error.returncode}")])
            print(row, flush=True)
            yield row


def _rows(installed: list[Environment], place: Place, folder: Path) -> Iterator[Row]:
    """One server after the other is there for its clients."""
    for served in Served:
        clients = [environment for environment in installed if environment.client.model is served]
        if clients:
            with serving(served, place, folder / f"serve-{served.value}.log"):
                for environment in clients:
                    if not environment.client.is_router:
                        told = [sys.executable] if environment.client.starts_servers else []
                        yield _checked(environment, served, place, told)
                        continue
                    with halves(served, place.port + 4, folder) as told:
                        yield _checked(environment, served, place, told)


def _row(environment: Environment, version: str, checks: list[str], failed: list[tuple[str, str]]) -> Row:
    day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return Row(environment.name, version, day, checks, failed)


def _checked(environment: Environment, served: Served, place: Place, beside: Sequence[str] = ()) -> Row:
    """Run one client's checks; `beside`: what it is told of workers. One that ends early has failed in the check it was
    at."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "OPENAI_", "ANTHROPIC_"))}
    env |= {"OPENAI_API_KEY": "none", "PYDANTIC_AI_DISABLE_TELEMETRY": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    argv = [*environment.program, place.url, served.value, str(path_of(served)), place.page, *beside]
    where = environment.working_folder
    done = subprocess.run(argv, cwd=where, env=env, capture_output=True, text=True, timeout=_CLIENT_S, check=False)
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
    failed = [(each["check"], each["told"]) for each in told if each["told"] is not None]
    checks = [each["check"] for each in told]
    if done.returncode:
        failed.append(("start", (done.stderr.strip().splitlines() or ["no word"])[-1][:_MAX_TOLD]))
        checks.append("start")
    return _row(environment, environment.versions(), checks, failed)


if __name__ == "__main__":
    sys.exit(main())
