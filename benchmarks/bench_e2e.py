"""Whole servers on the 46 M parameter bfloat16 model: unified and P/D, decode's cache on and off.

    python -m benchmarks.bench_e2e [--json FILE] [--rounds N] [--only NAME ...]

The load of every run: 8 groups x 8 prompts, 2048 shared + 128 own tokens in, 64 out, 16 at a time. Runs of all variants
alternate, the median over rounds is reported; a run's server is new, so nothing is cached before it.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from msgspec.structs import replace

from benchmarks.serve_while import serve_while
from deltaserve.commands.bench import command as bench
from deltaserve.core.ids import Role
from deltaserve.launch.compose import free_port
from deltaserve.process.worker.worker_spec import WorkerSpec
from deltaserve.settings.config import (
    DisaggregationSettings,
    ModelSettings,
    NetworkSettings,
    SchedulingSettings,
    Settings,
)
from deltaserve.settings.flags.line_parser import LineParser

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "out" / "bench-46m"
SIZES = {"system-prompt-len": 2048, "question-len": 128, "output-len": 64, "num-groups": 8, "prompts-per-group": 8}
LOAD = ["--workload", "shared-prefix", "--max-concurrency", "16", *(f"--{key}={value}" for key, value in SIZES.items())]


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to serve."""

    name: str
    unified: bool
    decode_cache: bool

    def settings(self) -> Settings:
        mode = (
            DisaggregationSettings(disaggregation_mode="null")
            if self.unified
            else DisaggregationSettings(conditional_prefill="off")
        )
        return Settings(
            model=ModelSettings(model_path=str(MODEL), device="cpu", context_length=4096),
            scheduling=SchedulingSettings(max_running_requests=16, num_reserved_decode_tokens=64),
            disaggregation=mode,
            network=NetworkSettings(port=free_port()),
        )

    def adjust(self, spec: WorkerSpec) -> WorkerSpec:
        if spec.role is Role.PREFILL or self.decode_cache:
            return spec
        return replace(spec, options=replace(spec.options, sched=replace(spec.options.sched, radix_cache=False)))


VARIANTS = (
    Variant("unified", unified=True, decode_cache=True),
    Variant("unified, cache off", unified=True, decode_cache=False),
    Variant("P/D", unified=False, decode_cache=True),
    Variant("P/D, decode cache off", unified=False, decode_cache=False),
)


def told_under(settings: Settings, adjust: Callable[[WorkerSpec], WorkerSpec], load: Sequence[str], out: Path) -> Any:
    """What `deltaserve bench` with these flags writes to `out` of a new server."""

    def work(url: str, stopping: Event) -> int:
        parser = LineParser("bench", "")
        bench.add_arguments(parser)
        return bench.run(parser.parse_args(["--base-url", url, "--output-file", str(out), *load]))

    if serve_while(settings, adjust, work, lambda text: print(text, file=sys.stderr)) != 0:
        raise SystemExit(f"the benchmark failed: {' '.join(load)}")
    return json.loads(out.read_text())


def run_once(variant: Variant, folder: Path) -> dict[str, float]:
    """Figures of one server under the load. Latencies in ms."""
    summary = told_under(variant.settings(), variant.adjust, LOAD, folder / "run.json")["summary"]
    latencies = summary["latencies_s"]
    return {
        "req/s": summary["requests_per_s"],
        "output tok/s": summary["output_tokens_per_s"],
        "cached %": 100 * summary["cached_len"] / summary["input_len"],
        "TTFT p50 ms": 1000 * latencies["ttft"]["p50"],
        "TTFT p99 ms": 1000 * latencies["ttft"]["p99"],
        "ITL p50 ms": 1000 * latencies["itl"]["p50"],
        "ITL p99 ms": 1000 * latencies["itl"]["p99"],
        "failed": summary["num_failed"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[v.name for v in VARIANTS], help="names of variants")
    parser.add_argument("--json", type=Path, help="write all figures there")
    arguments = parser.parse_args()
    if not MODEL.is_dir():
        raise SystemExit(f"{MODEL.relative_to(ROOT)} is missing: python -m tools.make_bench_model {MODEL}")
    MODEL.parent.mkdir(exist_ok=True)
    variants = [v for v in VARIANTS if v.name in arguments.only]
    runs: dict[str, list[dict[str, float]]] = {v.name: [] for v in variants}
    for _ in range(arguments.rounds):
        for variant in variants:
            runs[variant.name].append(run_once(variant, MODEL.parent))
    medians = {name: {key: statistics.median(r[key] for r in done) for key in done[0]} for name, done in runs.items()}
    keys = list(next(iter(medians.values())))
    print(f"{'':24}" + "".join(f"{key:>14}" for key in keys))
    for name, row in medians.items():
        print(f"{name:24}" + "".join(f"{row[key]:14.2f}" for key in keys))
    if arguments.json:
        arguments.json.write_text(json.dumps({"load": LOAD, "medians": medians, "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
