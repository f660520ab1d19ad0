"""A foreign load generator against `serve`: NVIDIA's AIPerf, and what it measures beside what `deltaserve bench` does.

    python3 -m venv out/aiperf && out/aiperf/bin/pip install aiperf
    python -m benchmarks.bench_aiperf --aiperf out/aiperf/bin/aiperf [--rounds N] [--json FILE]

The form of the load that SGLang's pull request 19746 was measured with (chats, streamed, each behind one of 20
prefixes, lengths drawn from normal distributions, ignore_eos), scaled to models/recall-micro: prefixes of 400 tokens,
100 +- 11 own ones, 24 +- 7 out, 32 requests in flight, 200 a round. Both clients ask one server in turns, for documents
that it has not seen. Exit code 1 if a request failed, or if their median times to the first token are more than a fifth
apart.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.bench_serve import ROOT, serving

MODEL = ROOT / "models" / "recall-micro"
NUM_PREFIXES, PER_PREFIX = 20, 10
PREFIX_LEN, OWN_LEN, OWN_DEVIATION, OUTPUT_LEN, OUTPUT_DEVIATION = 400, 100, 11, 24, 7
CONCURRENCY = 32
MAX_APART = 1.2
PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class Told:
    """What a client says of its run."""

    num_completed: int
    num_failed: int
    requests_per_s: float
    ttft_ms_p50: float
    cached_share: float
    """Share of prompt tokens that were cached, as the answers' usage says."""


def ask_with_aiperf(program: Path, url: str, seed: int) -> Told:
    num_requests = NUM_PREFIXES * PER_PREFIX
    with TemporaryDirectory() as folder:
        run(
            *(str(program), "profile", "--model", MODEL.name, "--url", url, "--tokenizer", str(MODEL)),
            *("--endpoint-type", "chat", "--streaming", "--extra-inputs", "ignore_eos:true"),
            *("--concurrency", str(CONCURRENCY), "--request-count", str(num_requests), "--random-seed", str(seed)),
            *("--num-prefix-prompts", str(NUM_PREFIXES), "--prefix-prompt-length", str(PREFIX_LEN)),
            *("--isl", str(OWN_LEN), "--isl-stddev", str(OWN_DEVIATION)),
            *("--osl", str(OUTPUT_LEN), "--osl-stddev", str(OUTPUT_DEVIATION)),
            *("--ui", "none", "--no-gpu-telemetry", "--no-server-metrics", "--output-artifact-dir", folder),
        )
        found = json.loads(Path(folder, "profile_export_aiperf.json").read_text())
    num_completed = round(average(found, "request_count"))
    cached, asked = (average(found, f"total_usage_prompt_{what}tokens") for what in ("cache_read_", ""))
    ttft_ms = found["time_to_first_token"]["p50"]
    num_failed = num_requests - num_completed
    return Told(num_completed, num_failed, average(found, "request_throughput"), ttft_ms, cached / asked)


def average(found: Mapping[str, Any], name: str) -> float:
    return float(found[name]["avg"]) if name in found else 0.0


def ask_with_bench(url: str, seed: int) -> Told:
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        run(
            *(sys.executable, "-m", "deltaserve.cli.main", "bench", "--base-url", url, "--warmup-requests", "0"),
            *("--num-groups", str(NUM_PREFIXES), "--prompts-per-group", str(PER_PREFIX)),
            *("--system-prompt-len", str(PREFIX_LEN), "--question-len", str(OWN_LEN), "--output-len", str(OUTPUT_LEN)),
            *("--max-concurrency", str(CONCURRENCY), "--seed", str(seed), "--output-file", str(report)),
        )
        found = json.loads(report.read_text())["summary"]
    cached_share = found["cached_len"] / found["input_len"]
    ttft_ms = 1e3 * found["latencies_s"]["ttft"]["p50"]
    return Told(found["num_completed"], found["num_failed"], found["requests_per_s"], ttft_ms, cached_share)


def run(*command: str) -> None:
    """Raises SystemExit with what it printed."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE_S, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]}: exit code {done.returncode}\n{done.stdout.decode(errors='replace')[-3000:]}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiperf", type=Path, required=True, metavar="PROGRAM")
    parser.add_argument("--rounds", type=int, metavar="N", default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    by_aiperf, by_bench = [], []
    with serving(MODEL, "--device", "cpu") as served:
        served.wait_ready()
        url = str(served.http.base_url).rstrip("/")
        for number in range(args.rounds):
            by_aiperf.append(ask_with_aiperf(args.aiperf, url, 42 + number))
            by_bench.append(ask_with_bench(url, 42 + number))
    print(f"load average {os.getloadavg()[0]:.1f}\n")
    print(
        "| client | completed | failed | req/s | TTFT p50, ms | prompt tokens cached |\n|---|---:|---:|---:|---:|---:|"
    )
    for name, rounds in (("AIPerf", by_aiperf), ("deltaserve bench", by_bench)):
        for told in rounds:
            print(
                f"| {name} | {told.num_completed} | {told.num_failed} | {told.requests_per_s:.1f} "
                f"| {told.ttft_ms_p50:.0f} | {told.cached_share:.1%} |"
            )
    apart = statistics.median(a.ttft_ms_p50 / b.ttft_ms_p50 for a, b in zip(by_aiperf, by_bench, strict=True))
    print(f"\nTTFT p50, AIPerf over deltaserve bench: {apart:.2f}")
    if args.json:
        whole = {"aiperf": [*map(asdict, by_aiperf)], "bench": [*map(asdict, by_bench)]}
        args.json.write_text(json.dumps(whole, indent=1) + "\n")
    any_failed = any(told.num_failed for told in (*by_aiperf, *by_bench))
    return 1 if any_failed or not 1 / MAX_APART <= apart <= MAX_APART else 0


if __name__ == "__main__":
    sys.exit(main())
