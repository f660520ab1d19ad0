"""`deltaserve bench`: options, one run, its report."""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer as TokenizerFile

from deltaserve.commands.bench.sweep import Sweep, SweepKind, SweepPoint, print_sweep
from deltaserve.commands.bench.sweep_chart import draw_sweep, require_chart
from deltaserve.commands.client.bearer_key import authorization
from deltaserve.commands.client.chat_stream import find_model
from deltaserve.commands.client.completion_stream import ServerDialect, ServerError, Tokenizer, negotiate
from deltaserve.commands.client.http_client import async_http_client, fault
from deltaserve.commands.load.agents import AgentMaker, AgentTraffic, Habits, RandomAgent, RecallAgent
from deltaserve.commands.load.load_client import Client, Load, Measurement
from deltaserve.commands.load.mooncake_trace import BLOCK_LEN, TraceScale, TraceTraffic, read_trace
from deltaserve.commands.load.moved_bytes import settled_bytes
from deltaserve.commands.load.recall import DocumentShape, RecallTraffic
from deltaserve.commands.load.report import BenchSummary, as_json, print_summary, summarize
from deltaserve.commands.load.session_hints import with_hints
from deltaserve.commands.load.traffic import (
    Conversation,
    Lengths,
    MultiTurnTraffic,
    SharedPrefixTraffic,
    TokenRange,
    arrival_times,
)
from deltaserve.core.errors import ConfigError
from deltaserve.core.files.result_file import check_place, write_result
from deltaserve.settings.urls import DEFAULT_URL, admin_root, server_root, url_of

DESCRIPTION = """\
Send generated traffic to an OpenAI-compatible server and report throughput and latency.
Prompts are token ids, so lengths and shared prefixes are exact. Servers that take only text need --tokenizer.
"""
SWEEP = """\
Sends the whole workload once for each strength of the load, to show what more load buys and what it costs. Up to some
strength requests/s grow and the time between tokens (ITL) grows little; beyond it requests/s stay, and either ITL or,
where the batch or the memory is full, the time to first token (TTFT) grows. Take the last strength before that.
  --sweep concurrency=1,2,4,8,16   so many requests in flight: what a server gives at its best
  --sweep rate=0.5,1,2,4           so many conversations start per second: what users meet who do not wait for others
Each strength has prompts of its own, drawn alike, so that none finds in the cache what another left there."""

TRACE = """\
A JSON object for each request, as Mooncake's public traces have them (conversation, toolagent): timestamp in ms,
input_length, output_length, and hash_ids, one for each 512 tokens of the prompt. Equal ids are equal tokens.
  --workload trace --trace toolagent_trace.jsonl --num-prompts 500 --trace-block-len 32 --trace-speed 4"""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Each flag once with what follows it, and its default where it has one."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=112)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(action.option_strings)
        return names if action.nargs == 0 else f"{names} {self._format_args(action, self._value(action))}"

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.nargs != 0 and action.default not in (None, {})
        return f"{action.help} (default {action.default})" if has_default else action.help

    def _value(self, action: argparse.Action) -> str:
        numbers = {int: "N", float: "X", Path: "FILE"}
        return next((text for kind, text in numbers.items() if action.type is kind), action.dest.split("_")[-1].upper())


class LocalTokenizer:
    """A tokenizer.json on this machine."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = TokenizerFile.from_file(str(path / "tokenizer.json" if path.is_dir() else path))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare all options of `deltaserve bench`."""
    parser.description = DESCRIPTION
    parser.formatter_class = _Help
    parser.usage = "deltaserve bench [options]"
    parser.add_argument(
        "--workload",
        choices=("shared-prefix", "multi-turn", "recall", "agents", "trace"),
        default="shared-prefix",
        help="what to send",
    )
    _add_sglang(parser.add_argument_group("as sglang.bench_serving names them"))
    _add_server(parser.add_argument_group("server"))
    _add_load(parser.add_argument_group("load"))
    _add_sweep(parser.add_argument_group("sweep", SWEEP))
    _add_lengths(parser.add_argument_group("lengths in tokens (shared-prefix, multi-turn and agents)"))
    _add_workloads(parser)


def _add_sglang(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--backend", help="ignored: every server is spoken to as OpenAI's is")
    group.add_argument("--host", help="with --port, another way to write --base-url")
    group.add_argument("--port", type=int, help="with --host, or on this machine")
    group.add_argument(
        "--dataset-name", choices=("generated-shared-prefix",), help="the same as --workload shared-prefix"
    )
    group.add_argument(
        "--num-prompts", type=int, help="at most so many conversations; it adds none to those of the workload"
    )


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--base-url", default=DEFAULT_URL, metavar="URL", help="the server to measure")
    group.add_argument("--model", help="model name to send; by default the first the server names")
    group.add_argument(
        "--admin-url",
        metavar="URL",
        help="where --flush-cache goes, and looks at /metrics; with API keys: deltaserve's admin port, the next one, "
        "and an admin key",
    )
    group.add_argument("--api-key-file", type=Path, help="its first key is sent as a bearer token; mode 0600")
    group.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="tokenizer.json or its folder, for servers that speak only text"
    )
    group.add_argument("--extra-body", type=_json_object, default={}, metavar="JSON", help="more fields per request")
    group.add_argument("--timeout-s", type=float, default=600.0, help="longest wait for the next bytes of an answer")


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-concurrency", type=int, help="requests in flight at most; by default no limit")
    group.add_argument(
        "--request-rate",
        type=float,
        help="conversations that start per second, as a Poisson process; by default all at once",
    )
    group.add_argument("--warmup-requests", type=int, default=2, help="requests sent before the measurement")
    group.add_argument("--flush-cache", action="store_true", help="POST /flush_cache after the warm-up")
    group.add_argument("--seed", type=int, default=1, help="equal seeds and options give equal traffic")
    group.add_argument("--output-file", type=Path, help="write settings, summary and every request as JSON")


def _add_sweep(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--sweep", type=_sweep, metavar="KIND=X,X,...", help="measure at each strength; print a table")
    group.add_argument(
        "--sweep-png", type=Path, help="draw requests/s and TTFT over ITL, too; needs matplotlib, the extra `plot`"
    )


def _add_lengths(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--system-prompt-len", "--gsp-system-prompt-len", type=int, default=2048, help="shared prefix")
    group.add_argument("--question-len", "--gsp-question-len", type=int, default=128, help="of each turn")
    group.add_argument("--output-len", "--gsp-output-len", type=int, default=256, help="of each answer")
    group.add_argument(
        "--range-ratio", "--gsp-range-ratio", type=float, default=1.0, help="draw lengths from [ratio * length, length]"
    )
    group.add_argument(
        "--token-range",
        type=_token_range,
        default="32:256",
        metavar="FIRST:END",
        help="ids of random prompts; the default ones are plain bytes in byte-level vocabularies",
    )


def _add_workloads(parser: argparse.ArgumentParser) -> None:
    shared = parser.add_argument_group("shared-prefix: each group's prompts start with its system prompt")
    shared.add_argument("--num-groups", "--gsp-num-groups", type=int, default=64, help="system prompts")
    shared.add_argument(
        "--prompts-per-group", "--gsp-prompts-per-group", type=int, default=16, help="per system prompt"
    )
    turns = parser.add_argument_group("multi-turn: each turn appends the last answer and a new question")
    turns.add_argument("--num-conversations", type=int, default=32, help="all with one system prompt")
    turns.add_argument("--num-turns", type=int, default=4, help="turns of each conversation (all but shared-prefix)")
    recall = parser.add_argument_group("recall: documents of facts for the recall model, whose answers can be checked")
    recall.add_argument("--num-documents", type=int, default=8, help="shared documents")
    recall.add_argument("--conversations-per-document", type=int, default=8, help="conversations about each document")
    recall.add_argument("--num-facts", type=int, default=64, help="facts per document, 3 tokens each")
    recall.add_argument("--num-noise", type=int, default=64, help="noise tokens per document")
    recall.add_argument("--answer-len", type=int, default=16, help="names per answer")
    agents = parser.add_argument_group(
        "agents: sessions behind an agent's system prompt; each turn is what a tool told (question-len)"
    )
    agents.add_argument("--num-agents", type=int, default=4, help="system prompts")
    agents.add_argument("--sessions-per-agent", type=int, default=8, help="sessions of each agent")
    agents.add_argument("--tool-s", type=float, default=0.0, help="mean time that a tool takes, before each later turn")
    agents.add_argument("--fork-share", type=float, default=0.2, help="sessions that try two ways from some turn on")
    agents.add_argument("--abandoned-share", type=float, default=0.2, help="sessions and forks that end early")
    agents.add_argument(
        "--agents-recall", action="store_true", help="prefixes are documents of facts: answers can be checked"
    )
    agents.add_argument(
        "--agents-hints",
        action="store_true",
        help="send kv_hints: retain_s before a tool runs, done with a session's last turn",
    )
    _add_trace(parser.add_argument_group("trace: requests of a recorded trace, at their times, shared as there", TRACE))


def _add_trace(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--trace", type=Path, help="the trace; --num-prompts N sends its first N requests")
    group.add_argument(
        "--trace-block-len",
        type=int,
        default=BLOCK_LEN,
        help="tokens for a block: fewer make all lengths as much shorter",
    )
    group.add_argument("--trace-speed", type=float, default=1.0, help="requests come so many times as fast")


def _json_object(text: str) -> dict[str, object]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object")
    return value


def _sweep(text: str) -> Sweep:
    try:
        return Sweep.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; such as concurrency=1,2,4 or rate=0.5,1") from None


def _token_range(text: str) -> TokenRange:
    first, _, end = text.partition(":")
    return TokenRange(int(first), int(end))


def make_traffic(args: argparse.Namespace) -> list[Conversation]:
    """The conversations the options describe. Raises ValueError for options that make no sense."""
    if args.num_prompts is not None and args.num_prompts < 1:
        raise ValueError(f"num_prompts is {args.num_prompts}; it must be positive")
    return _all_traffic(args)[: args.num_prompts]


def with_url(args: argparse.Namespace) -> argparse.Namespace:
    """`base_url` as --host and --port say, where they are given. Raises ValueError."""
    if args.host is None and args.port is None:
        return args
    if args.base_url != DEFAULT_URL:
        raise ValueError("--base-url and --host or --port: give one of them")
    return argparse.Namespace(**{**vars(args), "base_url": url_of(args.host, args.port)})


def ignored_options(args: argparse.Namespace, num_conversations: int) -> list[str]:
    """One line for each option that was given and changes nothing."""
    lines = []
    if args.backend is not None:
        lines.append(f"--backend {args.backend} is ignored: every server is spoken to as OpenAI's is")
    if args.num_prompts is not None and args.num_prompts > num_conversations:
        lines.append(f"--num-prompts {args.num_prompts} is ignored: the workload has {num_conversations} conversations")
    return lines


def _trace_traffic(args: argparse.Namespace) -> TraceTraffic:
    sweep: Sweep | None = args.sweep
    if args.trace is None:
        raise ValueError("--workload trace needs --trace FILE")
    sweeps_rate = sweep is not None and sweep.kind is SweepKind.RATE
    for flag, is_given in (("--request-rate", args.request_rate is not None), ("--sweep rate", sweeps_rate)):
        if is_given:
            raise ValueError(f"{flag} and --workload trace: a trace has times of its own (--trace-speed)")
    scale = TraceScale(args.trace_block_len, args.trace_speed)
    return TraceTraffic(read_trace(args.trace, args.num_prompts), args.token_range, scale)


def _all_traffic(args: argparse.Namespace) -> list[Conversation]:
    if args.trace is not None and args.workload != "trace":
        raise ValueError(f"--trace and --workload {args.workload}: give one of them")
    if args.dataset_name is not None and args.workload != "shared-prefix":
        raise ValueError(f"--dataset-name {args.dataset_name} and --workload {args.workload}: give one of them")
    if args.workload == "trace":
        return _trace_traffic(args).generate(args.seed)
    shape = DocumentShape(args.num_facts, args.num_noise)
    if args.workload == "recall":
        return RecallTraffic(
            args.num_documents, args.conversations_per_document, args.num_turns, args.answer_len, shape
        ).generate(args.seed)
    lengths = Lengths(args.system_prompt_len, args.question_len, args.output_len, args.range_ratio)
    if args.workload == "agents":
        habits = Habits(args.num_turns, args.tool_s, args.fork_share, args.abandoned_share)
        make_agent: AgentMaker = partial(RandomAgent.make, lengths=lengths, token_range=args.token_range)
        if args.agents_recall:
            make_agent = partial(RecallAgent, shape=shape, answer_len=args.answer_len)
        sessions = AgentTraffic(args.num_agents, args.sessions_per_agent, make_agent, habits).generate(args.seed)
        return [with_hints(session, habits) for session in sessions] if args.agents_hints else sessions
    if args.workload == "multi-turn":
        return MultiTurnTraffic(args.num_conversations, args.num_turns, lengths, args.token_range).generate(args.seed)
    return SharedPrefixTraffic(args.num_groups, args.prompts_per_group, lengths, args.token_range).generate(args.seed)


@dataclass(frozen=True, slots=True)
class Trial:
    """What is sent in one go, and how hard."""

    label: str
    conversations: Sequence[Conversation]
    load: Load


def make_trials(args: argparse.Namespace) -> list[Trial]:
    """One, or with --sweep one for each strength, with seeds of their own. Raises ValueError, ConfigError."""
    sweep: Sweep | None = args.sweep
    if args.sweep_png is not None:
        if sweep is None:
            raise ValueError("--sweep-png draws what --sweep measures: give both")
        require_chart(args.sweep_png)
    if sweep is None:
        conversations = make_traffic(args)
        arrivals = _arrivals(conversations, args.request_rate, args.seed)
        return [Trial("requests", conversations, Load(arrivals, args.max_concurrency))]
    for flag, given, swept in (
        ("--max-concurrency", args.max_concurrency, sweep.concurrencies),
        ("--request-rate", args.request_rate, sweep.rates),
    ):
        if given is not None and None not in swept:
            raise ValueError(f"{flag} {given} and a sweep over it: give one of them")
    return [_strength(args, sweep, index) for index in range(len(sweep.values))]


def _strength(args: argparse.Namespace, sweep: Sweep, index: int) -> Trial:
    """The workload drawn anew, at one of the sweep's strengths."""
    seed = args.seed + index
    conversations = make_traffic(argparse.Namespace(**{**vars(args), "seed": seed}))
    arrivals = _arrivals(conversations, sweep.rates[index] or args.request_rate, seed)
    label = f"{sweep.kind.heading} {sweep.values[index]:g}"
    return Trial(label, conversations, Load(arrivals, sweep.concurrencies[index] or args.max_concurrency))


def _arrivals(conversations: Sequence[Conversation], rate: float | None, seed: int) -> list[float]:
    """When each begins: as the traffic says, else as `rate` does."""
    drawn = arrival_times(len(conversations), rate, seed)
    return [at if each.arrives_s is None else each.arrives_s for each, at in zip(conversations, drawn, strict=True)]


def run(args: argparse.Namespace) -> int:
    """0: every request completed; 1: some failed or the server could not be reached; 2: bad options."""
    try:
        args = with_url(args)
        if args.output_file is not None:
            check_place(args.output_file, "--output-file")
        trials = make_trials(args)
        tokenizer = LocalTokenizer(args.tokenizer) if args.tokenizer else None
        headers = authorization(args.api_key_file)
    except (ValueError, ConfigError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    for line in ignored_options(args, len(trials[0].conversations)):
        print(f"bench: {line}", file=sys.stderr)
    try:
        model, measurements = asyncio.run(_benchmark(args, headers, trials, tokenizer))
    except ServerError as error:
        print(f"bench: {args.base_url}: {error}", file=sys.stderr)
        return 1
    except httpx.HTTPError as error:
        print(f"bench: {fault(args.base_url, error)}", file=sys.stderr)
        return 1
    summaries = [summarize(measurement) for measurement in measurements]
    problems = [_write_json(args, model, measurements, summaries)]  # before all else: nothing may lose it
    problems += [_report(args, what_ran(args, model, trials[0].conversations), measurements, summaries)]
    for problem in filter(None, problems):
        print(f"bench: {problem}", file=sys.stderr)
    return 1 if any(problems) or any(summary.num_failed for summary in summaries) else 0


def _write_json(
    args: argparse.Namespace, model: str, measurements: Sequence[Measurement], summaries: Sequence[BenchSummary]
) -> str | None:
    """What was in the way of the file, if one was asked for."""
    if args.output_file is None:
        return None
    settings = {name: str(value) for name, value in vars(args).items()} | {"model": model}
    told = [as_json(settings, *pair) for pair in zip(measurements, summaries, strict=True)]
    whole = told[0] if args.sweep is None else _sweep_json(settings, args.sweep, told)
    return write_result(args.output_file, "--output-file", json.dumps(whole, indent=1) + "\n")


def _report(
    args: argparse.Namespace, title: str, measurements: Sequence[Measurement], summaries: Sequence[BenchSummary]
) -> str | None:
    """Print what was measured, and draw it; what was in the way of the drawing."""
    problem = None
    console = Console(soft_wrap=True)
    console.print(title, markup=False, highlight=False)
    sweep: Sweep | None = args.sweep
    if not any(summary.num_completed for summary in summaries):
        num_failed = sum(summary.num_failed for summary in summaries)
        print(f"bench: none of the {num_failed} requests was completed", file=sys.stderr)
    elif sweep is None:
        print_summary(console, summaries[0])
    else:
        points = [SweepPoint(*pair) for pair in zip(sweep.values, summaries, strict=True)]
        print_sweep(console, sweep, points)
        if args.sweep_png is not None:
            problem = _draw(args.sweep_png, title, sweep, points)
            if problem is None:
                console.print(f"chart: {args.sweep_png}", markup=False, highlight=False)
    _print_errors(measurements)
    return problem


def _draw(path: Path, title: str, sweep: Sweep, points: Sequence[SweepPoint]) -> str | None:
    try:
        draw_sweep(path, title, sweep, points)
    except OSError as error:
        return f"--sweep-png {path}: {error.strerror or error}"
    return None


def _sweep_json(
    settings: Mapping[str, object], sweep: Sweep, told: Sequence[Mapping[str, object]]
) -> dict[str, object]:
    """What `--output-file` holds of a sweep: the settings, and for each strength its summary and every request."""
    points = [
        {sweep.kind.value: value, "summary": one["summary"], "requests": one["requests"]}
        for value, one in zip(sweep.values, told, strict=True)
    ]
    return {"settings": dict(settings), "points": points}


def what_ran(args: argparse.Namespace, model: str, conversations: Sequence[Conversation]) -> str:
    """One line: workload, counts, model, server."""
    counts = {
        "shared-prefix": f"{args.num_groups} groups of {args.prompts_per_group} prompts",
        "multi-turn": f"{args.num_conversations} conversations of {args.num_turns} turns",
        "recall": f"{args.num_documents} documents with {args.conversations_per_document} conversations of "
        f"{args.num_turns} turns each",
        "agents": f"{args.num_agents} agents with {args.sessions_per_agent} sessions of {args.num_turns} turns each",
        "trace": f"{len(conversations)} requests of {args.trace} within {_last_arrival_s(conversations):.0f} s",
    }[args.workload]
    num_requests = sum(conversation.num_requests for conversation in conversations)
    return f"{args.workload}: {counts}, {num_requests} requests in all, to {model} at {server_root(args.base_url)}"


def _last_arrival_s(conversations: Sequence[Conversation]) -> float:
    return max((conversation.arrives_s or 0.0 for conversation in conversations), default=0.0)


async def _benchmark(
    args: argparse.Namespace,
    headers: dict[str, str],
    trials: Sequence[Trial],
    tokenizer: Tokenizer | None,
) -> tuple[str, list[Measurement]]:
    """Model and outcomes. Raises ServerError, httpx.HTTPError."""
    timeout = httpx.Timeout(args.timeout_s, pool=None)
    async with async_http_client(server_root(args.base_url), timeout, headers) as http:
        served = await find_model(http, args.model)
        warmup = _warmup(args)
        dialect = await negotiate(http, served.name, warmup[0].turns[0].tokens, tokenizer)
        asked: dict[str, object] = {"timings": True} if served.is_ours else {}
        dialect = replace(dialect, extra={**dialect.extra, **asked, **args.extra_body})
        await Client(http, dialect).measure(warmup[1:], Load([0.0] * (len(warmup) - 1), args.max_concurrency))
        measurements = []
        for trial in trials:
            if args.flush_cache:
                await _flush_cache(http, args)
            root = server_root(args.admin_url or args.base_url)
            before = await settled_bytes(http, root) if args.workload == "agents" else None
            measurement = await _measure(http, dialect, tokenizer, trial)
            after = None if before is None else await settled_bytes(http, root)
            moved = None if before is None or after is None else after.since(before)
            measurements.append(replace(measurement, moved=moved))
        return served.name, measurements


async def _measure(
    http: httpx.AsyncClient, dialect: ServerDialect, tokenizer: Tokenizer | None, trial: Trial
) -> Measurement:
    num_requests = sum(conversation.num_requests for conversation in trial.conversations)
    console = Console(stderr=True)
    with Progress(transient=True, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(trial.label, total=num_requests)
        client = Client(http, dialect, tokenizer, on_record=lambda record: progress.advance(task))
        return await client.measure(trial.conversations, trial.load)


async def _flush_cache(http: httpx.AsyncClient, args: argparse.Namespace) -> None:
    """Raises ServerError, which says where the admin routes of a server with keys are."""
    url = f"{server_root(args.admin_url or args.base_url)}/flush_cache"
    status = (await http.post(url)).status_code
    if httpx.codes.is_success(status):
        return
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        advice = "; the first key of --api-key-file must be an admin key"
    elif args.admin_url is None:
        advice = f"; with keys it is on the admin port: --admin-url {admin_root(args.base_url) or 'URL'}"
    else:
        advice = ""
    raise ServerError(f"POST {url}: HTTP {status}{advice}")


def _warmup(args: argparse.Namespace) -> list[Conversation]:
    """Short random prompts, one more than asked for: the first finds out what the server understands."""
    traffic = SharedPrefixTraffic(args.warmup_requests + 1, 1, Lengths(0, 64, 8), args.token_range)
    return traffic.generate(args.seed - 1)


def _print_errors(measurements: Sequence[Measurement]) -> None:
    records = (record for measurement in measurements for record in measurement.records)
    errors = [record.error for record in records if record.error is not None]
    for error in sorted(set(errors), key=errors.count, reverse=True)[:5]:
        print(f"bench: {errors.count(error)} x {error}", file=sys.stderr)
