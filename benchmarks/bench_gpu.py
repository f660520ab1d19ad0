"""What deltaserve does on this machine's GPU: its tests there, the card, engine, servers; in one command of minutes.

    python -m benchmarks.bench_gpu [--parts card,tests,...] [--budget-seconds 360] [--json FILE]

Parts, in the order in which they run:
    card        what the device copies and multiplies
    recall      a server's answers that can be checked, unified and P/D
    pages       pages from one process to another one on the card, by the local transport
    engine      0.6B shape without HTTP: TTFT, one and 64 at a time, G1; a step on the stream and on the host
    http        the same over HTTP, behind a burst of 256 requests at the server's start
    shared      8 x 32 prompts with shared prefixes, unified and P/D
    tests       tests/gpu, failures by name
    agents      agents' sessions, 64 at a time (bench_agents.py), unified and P/D
    attention   one layer's attention by each backend
    big         8B shape without HTTP, one at a time

The budget holds the first five, whatever each of them takes within its limit. The others run in what is left of it,
and are named where they are left out: --parts runs them alone.

Weights are random and made here; nothing is fetched. A part that fails is named with its cause, and the others go on.
The packages need not be installed: with the sources, PYTHONPATH=src:. and what is missing in a folder behind them.
With --device cpu a tiny model runs every part, to try the benchmark itself.
"""

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMITS_S = {
    "card": 40.0,
    "recall": 75.0,
    "pages": 50.0,
    "engine": 90.0,
    "http": 100.0,
    "shared": 120.0,
    "tests": 200.0,
    "agents": 150.0,
    "attention": 90.0,
    "unrecorded": 60.0,
    "big": 90.0,
}
"""Longest time of each part on a GPU, the most valuable ones first, as they run; more where the budget is more than
usual."""
BUDGET_S = 360.0
_CPU_PATIENCE = 5.0
PARTS = tuple(LIMITS_S)
NEEDED = (
    *("torch", "safetensors", "tokenizers", "numpy", "msgspec", "zmq", "starlette", "uvicorn", "h11", "httpx"),
    *("pydantic", "yaml", "prometheus_client", "rich", "xxhash", "jinja2", "psutil", "gguf"),
)
"""Modules that a server imports."""
TEST_MODULES = ("pytest", "hypothesis", "pytest_timeout", "transformers")
_MIN_PART_S = 15.0
"""A part that could not run for so long is left out."""
LEFT_OUT = "left out: the time is up"
_END_WAIT_S = 30.0
_IN_MEMORY = Path("/dev/shm")
_ROOM_BYTES = 40 << 30
_ABOUT = """\
import json, platform, sys
import torch
found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
if torch.cuda.is_available():
    free, total = torch.cuda.mem_get_info()
    found |= {"card": torch.cuda.get_device_name(), "memory_gib": round(total / 2**30, 1)}
try:
    import triton
    found["triton"] = triton.__version__
except ImportError:
    pass
print(json.dumps(found))
"""


@dataclass(slots=True)
class PartResult:
    """What became of a part."""

    part: str
    seconds: float
    problem: str | None
    """Why it ended early; None: it did not."""
    figures: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Run:
    """How parts are run."""

    device: str
    size: str
    scratch: Path


def missing_modules(parts: Sequence[str]) -> list[str]:
    """Modules that are needed and not there."""
    wanted = [*NEEDED, *(TEST_MODULES if "tests" in parts else ())]
    return [name for name in wanted if importlib.util.find_spec(name) is None]


def about_machine() -> dict[str, Any]:
    """Versions, and the card where there is one. In a process of its own: this one stays off the device."""
    done = subprocess.run([sys.executable, "-c", _ABOUT], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"bench_gpu: torch cannot be asked for its device: {done.stderr.strip()[-300:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run_part(part: str, run: Run, limit_s: float) -> PartResult:
    """One part in a process of its own, for at most so long."""
    figures, log = run.scratch / f"{part}.figures", run.scratch / f"{part}.log"
    command = [sys.executable, "-m", "benchmarks.bench_gpu_parts", part, "--device", run.device, "--size", run.size]
    command += ["--scratch", str(run.scratch), "--figures", str(figures)]
    began, problem = time.monotonic(), None
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=_environment())
        try:
            code = process.wait(limit_s)
            problem = None if code == 0 else _cause(log, code)
        except subprocess.TimeoutExpired:
            problem = f"not over after {limit_s:.0f} s"
            _stop(process)
        except KeyboardInterrupt:
            _stop(process)
            raise
    lines = figures.read_text().splitlines() if figures.exists() else []
    return PartResult(part, time.monotonic() - began, problem, [json.loads(line) for line in lines])


def _environment() -> dict[str, str]:
    """A part finds these sources, and what this process found."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """A part ends its servers when it is asked to end."""
    process.terminate()
    try:
        process.wait(_END_WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _cause(log: Path, code: int) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1].strip()[:400]} (exit code {code})" if lines else f"exit code {code}"


def scratch_root(device: str) -> Path | None:
    """Where 16 GB of weights are written and read quickest; None: where temporary files go."""
    is_large = device == "cuda" and _IN_MEMORY.is_dir() and shutil.disk_usage(_IN_MEMORY).free >= _ROOM_BYTES
    return _IN_MEMORY if is_large else None


def run_parts(parts: Sequence[str], run: Run, budget_s: float) -> list[PartResult]:
    """Each in turn while there is time."""
    began, results = time.monotonic(), []
    patience = max(budget_s / BUDGET_S, 1.0 if run.device == "cuda" else _CPU_PATIENCE)
    for part in parts:
        left_s = budget_s - (time.monotonic() - began)
        if left_s < _MIN_PART_S:
            results.append(PartResult(part, 0.0, LEFT_OUT))
            continue
        tell(f"{time.monotonic() - began:5.0f} s  {part}")
        result = run_part(part, run, min(left_s, patience * LIMITS_S[part]))
        results.append(result)
        for figure in result.figures:
            bar = f"   ({figure['bar']})" if figure["bar"] else ""
            tell(f"         {figure['name']}: {shown(figure)}{bar}")
        if result.problem is not None:
            tell(f"         FAILED: {result.problem}")
    tell(f"{time.monotonic() - began:5.0f} s  over")
    if missing := [result.part for result in results if result.problem == LEFT_OUT]:
        tell(f"         left out, as the time was up: --parts {','.join(missing)}")
    return results


def keep_logs(scratch: Path, to: Path) -> None:
    """By part and process: `http.serve.log`."""
    to.mkdir(parents=True, exist_ok=True)
    for log in scratch.rglob("*.log"):
        shutil.copyfile(log, to / ".".join(log.relative_to(scratch).parts))


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def shown(figure: Mapping[str, Any]) -> str:
    """A value with its unit."""
    value = figure["value"]
    if isinstance(value, float):
        value = f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value} {figure['unit']}".rstrip()


def table(about: Mapping[str, Any], results: Sequence[PartResult]) -> str:
    """Markdown, for docs/performance.md."""
    machine = ", ".join(f"{name} {value}" for name, value in about.items())
    lines = [machine, "", "| what | figure | bar |", "|---|---|---|"]
    for result in results:
        for figure in result.figures:
            lines.append(f"| {figure['name']} | {shown(figure)} | {figure['bar']} |")
        if result.problem is not None:
            failed = "" if result.problem == LEFT_OUT else "failed: "
            lines.append(f"| **{result.part}** | {failed}{result.problem} | |")
    return "\n".join(lines)


def wanted_parts(text: str) -> list[str]:
    """In the order in which parts run. Raises ArgumentTypeError."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        raise argparse.ArgumentTypeError(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return [part for part in PARTS if part in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """0: every part ended well; 1: one did not; 2: it cannot run here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=wanted_parts, default=list(PARTS), help="some of them, after commas")
    parser.add_argument("--budget-seconds", type=float, default=BUDGET_S, help="no part goes on after that")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, help="write all figures there, whatever fails")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the logs of all parts and servers there")
    args = parser.parse_args(arguments)
    missing = missing_modules(args.parts)
    if missing:
        tell(f"bench_gpu: not installed: {', '.join(missing)}; put them in a folder, and that on PYTHONPATH")
        return 2
    about = about_machine()
    if args.device == "cuda" and "card" not in about:
        tell(f"bench_gpu: torch {about['torch']} sees no CUDA device here; --device cpu tries the benchmark itself")
        return 2
    with tempfile.TemporaryDirectory(prefix="bench-gpu-", dir=scratch_root(args.device)) as folder:
        run = Run(args.device, "full" if args.device == "cuda" else "small", Path(folder))
        results = run_parts(args.parts, run, args.budget_seconds)
        if args.logs is not None:
            keep_logs(run.scratch, args.logs)
    print(table(about, results))
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": about, "parts": [asdict(result) for result in results]}, indent=1))
    return 1 if any(result.problem is not None for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
