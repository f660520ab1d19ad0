"""guidellm: every request of a run succeeds, and its tokens are as many as it asked for."""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tools.clients.harness import Server, require, run

_NUM_REQUESTS, _PROMPT_LEN, _OUTPUT_LEN = 10, 64, 16


def _benchmark(server: Server, profile: str, backend: str = "") -> None:
    """Run it and look at its report."""
    with TemporaryDirectory() as name:
        report = Path(name) / "report.json"
        argv = [sys.executable, "-m", "guidellm", "run", "--disable-console"]
        argv += ["--backend", f"kind=openai_http,target={server.url},model={server.model}{backend}"]
        argv += ["--profile", profile, "--constraint", f"kind=max_requests,count={_NUM_REQUESTS}"]
        argv += ["--tokenizer", f"kind=huggingface_auto,model={server.path}"]
        argv += ["--data", f"kind=synthetic_text,prompt_tokens={_PROMPT_LEN},output_tokens={_OUTPUT_LEN}"]
        argv += ["--output", f"kind=json,path={report}"]
        done = subprocess.run(argv, cwd=name, capture_output=True, text=True, check=False)
        require(done.returncode == 0, (done.stderr or done.stdout)[-500:])
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
    # Not the totals of its metrics: those are of the requests within the time that it measured.
    state = benchmark["scheduler_state"]
    counts = {what: state[f"{what}_requests"] for what in ("created", "successful", "errored", "cancelled")}
    failed = benchmark["requests"]["errored"][:1]
    require((counts["created"], counts["errored"], counts["cancelled"]) == (_NUM_REQUESTS, 0, 0), (counts, failed))
    # On a busy machine guidellm 0.8.1 at times ends a run, before the limit that it was given, while the last one runs.
    require(counts["successful"] >= _NUM_REQUESTS - 1, counts)
    metrics: dict[str, Any] = benchmark["metrics"]
    output = metrics["output_token_count"]["successful"]
    require(output["mean"] == _OUTPUT_LEN, output)
    require(metrics["prompt_token_count"]["successful"]["mean"] >= _PROMPT_LEN, metrics["prompt_token_count"])
    require(metrics["time_to_first_token_ms"]["successful"]["mean"] > 0, "no time to first token")


def concurrent_chats(server: Server) -> None:
    _benchmark(server, "kind=concurrent,streams=2")


def synchronous_chats(server: Server) -> None:
    _benchmark(server, "kind=synchronous")


def concurrent_completions(server: Server) -> None:
    _benchmark(server, "kind=concurrent,streams=2", ",request_format=/v1/completions")


def concurrent_responses(server: Server) -> None:
    _benchmark(server, "kind=concurrent,streams=2", ",request_format=/v1/responses")


if __name__ == "__main__":
    run([concurrent_chats, synchronous_chats, concurrent_completions, concurrent_responses])
