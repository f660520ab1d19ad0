"""CPU time that a front takes for each streamed token.

    python -m benchmarks.bench_stream_cpu [--answers text schema call] [--streams 1 8] [--tokens 600] [--rounds 3]

Streams, so many at a time, from one prefill and one decode worker of models/tools-micro: completions without a rule,
those that a schema rules, and chats whose answer is one long call of a tool. The CPU time of the front's process over
the tokens that it sent, and over its events (tokens that come together share one). Medians over rounds, in which the
kinds take turns. Which event loop it has depends on whether uvloop is installed; the first line says.
"""

import argparse
import statistics
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Event

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.serve_while import serve_while
from deltaserve.launch.compose import free_port
from deltaserve.launch.serve import as_resolved
from deltaserve.settings.config import MemorySettings, ModelSettings, NetworkSettings, Settings

MODEL = Path(__file__).resolve().parent.parent / "models" / "tools-micro"
SETTINGS = Settings(
    model=ModelSettings(model_path=str(MODEL), device="cpu"),
    memory=MemorySettings(page_size=16),
    network=NetworkSettings(port=free_port()),
)


Body = dict[str, object]


def _body(answers: str, num_tokens: int) -> tuple[str, Body]:
    """Path and fields of a request whose answer its limit ends."""
    long = {"type": "string", "minLength": 10 * num_tokens}
    if answers == "text":
        shown = {"ignore_eos": True, "skip_special_tokens": False}  # ids that end answers, again and again
        return "/v1/completions", {"prompt": "Facts: rada ruga;", **shown}
    if answers == "schema":
        return "/v1/completions", {"prompt": "Facts: rada ruga;", "structured_outputs": {"json": long}}
    rules = {"type": "object", "properties": {"text": long}, "required": ["text"]}
    tool = {"type": "function", "function": {"name": "note", "parameters": rules}}
    said = [{"role": "user", "content": "rada ruga"}]
    return "/v1/chat/completions", {"messages": said, "tools": [tool], "tool_choice": "required"}


def stream(url: str, answers: str, num_tokens: int, _: int = 0) -> int:
    """Events of one stream."""
    path, fields = _body(answers, num_tokens)
    body = {**fields, "max_tokens": num_tokens, "temperature": 0, "stream": True}
    with httpx.stream("POST", url + path, json=body, timeout=120.0) as reply:
        if reply.is_error:
            raise SystemExit(reply.read().decode())
        return sum(line.startswith("data: {") for line in reply.iter_lines())


Kind = tuple[str, int]
"""(answers, number of streams)."""


def measure(kinds: list[Kind], num_tokens: int, rounds: int, url: str, stopping: Event) -> dict[Kind, list[float]]:
    """Kind |-> [us per token, us per event]."""
    children = psutil.Process().children()
    (front,) = (child for child in children if any("front_process" in word for word in child.cmdline()))
    for answers in dict.fromkeys(answers for answers, _ in kinds):
        stream(url, answers, num_tokens)
    found: dict[Kind, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for (answers, count), rows in found.items():
            began = sum(front.cpu_times()[:2])
            with ThreadPoolExecutor(count) as pool:
                num_events = sum(pool.map(partial(stream, url, answers, num_tokens), range(count)))
            took_us = 1e6 * (sum(front.cpu_times()[:2]) - began)
            rows.append((took_us / (count * num_tokens), took_us / num_events))
    return {kind: list(map(statistics.median, zip(*rows, strict=True))) for kind, rows in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", choices=("text", "schema", "call"), nargs="+", default=["text", "schema", "call"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    console = Console()
    console.print(f"event loop: {'asyncio' if find_spec('uvloop') is None else 'uvloop'}")
    kinds = [(answers, count) for answers in args.answers for count in args.streams]
    work = partial(measure, kinds, args.tokens, args.rounds)
    table = Table("answers", "streams", "CPU per token, us", "per event, us")
    for (answers, count), (per_token, per_event) in serve_while(SETTINGS, as_resolved, work, console.print).items():
        table.add_row(answers, str(count), f"{per_token:.1f}", f"{per_event:.1f}")
    console.print(table)


if __name__ == "__main__":
    main()
