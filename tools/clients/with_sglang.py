"""sglang.bench_serving: every request of a run succeeds on each of its backends, and its cache report is true."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tools.clients.harness import Server, require, run

_NUM_GROUPS, _PROMPTS_PER_GROUP, _OUTPUT_LEN = 2, 5, 16
_NUM_REQUESTS = _NUM_GROUPS * _PROMPTS_PER_GROUP
_TRAFFIC = (
    *("--dataset-name", "generated-shared-prefix", "--gsp-num-groups", str(_NUM_GROUPS)),
    *("--gsp-prompts-per-group", str(_PROMPTS_PER_GROUP), "--gsp-output-len", str(_OUTPUT_LEN)),
    *("--gsp-system-prompt-len", "128", "--gsp-question-len", "32", "--num-prompts", str(_NUM_REQUESTS)),
)


def _benchmark(server: Server, backend: str, *flags: str) -> dict[str, Any]:
    """The report of a run that tells neither model nor tokenizer: both are asked of the server."""
    with TemporaryDirectory() as home:
        report = Path(home) / "report.jsonl"
        argv = [sys.executable, "-m", "tools.clients.run_sglang", "--backend", backend, "--base-url", server.url]
        argv += [*_TRAFFIC, "--output-file", str(report), "--disable-tqdm", "--max-concurrency", "1", *flags]
        env = {**os.environ, "HOME": home}  # where it keeps the prompts that it made
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        require(done.returncode == 0, done.stderr[-500:])
        found: dict[str, Any] = json.loads(report.read_text())
    require(found["completed"] == _NUM_REQUESTS, found)
    require(found["total_output_tokens"] == _NUM_REQUESTS * _OUTPUT_LEN, found["total_output_tokens"])
    return found


def _counted(server: Server) -> tuple[int, int]:
    """Tokens of prompts, and those that a cache had, on the side that had more: what the server has counted so far.

    Decode keeps all that prefill computes, so one request at a time finds there what prefill has, or more.
    """
    with urllib.request.urlopen(f"{server.url}/metrics") as reply:
        text: str = reply.read().decode()
    prompts = re.findall(r"^deltaserve_prompt_tokens_total (\S+)", text, re.MULTILINE)
    cached = re.findall(r"^deltaserve_cached_tokens_total\{.*\} (\S+)", text, re.MULTILINE)
    return int(sum(map(float, prompts))), int(max(map(float, cached), default=0))


def _reported_as_counted(server: Server, backend: str) -> None:
    before = _counted(server)
    found = _benchmark(server, backend, "--flush-cache", "--warmup-requests", "0", "--cache-report")
    after = _counted(server)
    prompts, cached = (late - early for late, early in zip(after, before, strict=True))
    report = found["cache_report"]
    require(report["total_cached_tokens"] == cached, (report, cached))
    require(report["total_prompt_tokens"] <= prompts, (report, prompts))  # it counts no template
    require(cached > prompts / 2, report)


def cache_report_of_generate(server: Server) -> None:
    _reported_as_counted(server, "sglang")


def cache_report_of_completions(server: Server) -> None:
    _reported_as_counted(server, "sglang-oai")


def cache_report_of_chats(server: Server) -> None:
    _reported_as_counted(server, "sglang-oai-chat")


def generate_with_logprobs(server: Server) -> None:
    _benchmark(server, "sglang", "--return-logprob", "--logprob-start-len", "0")


def vllm_completions_with_reset_prefix_cache(server: Server) -> None:
    _benchmark(server, "vllm", "--flush-cache")


def vllm_chats(server: Server) -> None:
    _benchmark(server, "vllm-chat")


if __name__ == "__main__":
    run(
        [
            cache_report_of_generate,
            cache_report_of_completions,
            cache_report_of_chats,
            generate_with_logprobs,
            vllm_completions_with_reset_prefix_cache,
            vllm_chats,
        ]
    )
