"""`deltaserve verify`: is what a running server answers what the model says? Cold, cached, over several turns."""

import argparse
import importlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from deltaserve.commands.verify.client import Score, ServerClient, TokenCompletion, VerifyError
from deltaserve.core.errors import ConfigError
from deltaserve.core.layout.dtype import DType
from deltaserve.settings.urls import DEFAULT_URL

_REFERENCE = "deltaserve.commands.verify.reference"
_TOLERANCES = {DType.FLOAT32: 2e-3}
_LOOSE_TOLERANCE = 0.25
"""Tolerance for 16-bit weights: rounding moves log-probabilities by some hundredths, a wrong page by several."""
_FP8_KV_TOLERANCE = 1.0
"""Tolerance for fp8 keys and values: rounding moves log-probabilities by some tenths."""
_IF_FP8 = (
    f"verify: differences up to {_FP8_KV_TOLERANCE:g} are expected of a server with --kv-cache-dtype fp8_e4m3, and of "
    f"no other: if it is one, give --tolerance {_FP8_KV_TOLERANCE:g}"
)
_TIE = 1e-2
_WIDTH = 100
_NUM_CASES = 13
_SAY_EVERY_S = 10.0
_TEXT = (
    "A radix tree keeps each common prefix once. Two requests that begin alike share its pages, on the worker that "
    "computes prompts as well as on the one that generates, and what one side lacks is sent by the other. "
)

T = TypeVar("T")


class Reference(Protocol):
    """Something that scores tokens by itself."""

    def score(self, tokens: Sequence[int]) -> list[Score]:
        """Scores of tokens 1 .. n-1."""
        ...


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt and what was answered."""

    name: str
    prompt: tuple[int, ...]
    answer: TokenCompletion
    is_greedy: bool = True


@dataclass(frozen=True, slots=True)
class Finding:
    """How far an answer is from the reference: largest differences of log-probabilities."""

    prompt_error: float
    output_error: float
    behind: float
    """How much likelier than the chosen token another one was; 0 when sampled."""

    @property
    def worst(self) -> float:
        """What the tolerance is held against."""
        return max(self.prompt_error, self.output_error, self.behind - _TIE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `deltaserve verify`."""
    parser.add_argument(
        "--base-url", default=DEFAULT_URL, metavar="URL", help=f"the server to verify (default {DEFAULT_URL})"
    )
    parser.add_argument(
        "model", nargs="?", type=Path, metavar="MODEL", help="its checkpoint: transformers is the reference"
    )
    parser.add_argument("--model-path", type=Path, metavar="MODEL", help="the same as the positional MODEL")
    parser.add_argument(
        "--reference", metavar="URL", help="another server that is the reference, such as a unified one"
    )
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="the first key of it is sent to both")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help=f"allowed difference of log-probabilities (default {_TOLERANCES[DType.FLOAT32]:g} where MODEL has "
        f"float32 weights, else {_LOOSE_TOLERANCE:g}; a server with --kv-cache-dtype fp8_e4m3 needs "
        f"{_FP8_KV_TOLERANCE:g})",
    )
    parser.add_argument("--output-len", type=int, default=24, metavar="N", help="tokens of each answer (default 24)")


def run(arguments: argparse.Namespace) -> int:
    """0: all answers agree; 1: some do not, or a server could not be asked. Raises ConfigError."""
    if arguments.model is not None and arguments.model_path is not None:
        raise ConfigError("MODEL and --model-path: give one of them")
    arguments.model_path = arguments.model_path or arguments.model
    if arguments.model_path is None and arguments.reference is None:
        raise ConfigError("verify: name a reference: MODEL (the checkpoint), --reference URL, or both")
    client = ServerClient(arguments.base_url, arguments.api_key_file)
    other = ServerClient(arguments.reference, arguments.api_key_file) if arguments.reference else None
    try:
        return _verify(arguments, client, other)
    except VerifyError as error:
        print(f"verify: {error}", file=sys.stderr)
        return 1
    finally:
        client.close()
        if other is not None:
            other.close()


def _verify(arguments: argparse.Namespace, client: ServerClient, other: ServerClient | None) -> int:
    client.connect()
    references: dict[str, Reference] = {}
    tolerance = _LOOSE_TOLERANCE
    if arguments.model_path is not None:
        print(f"verify: loading {arguments.model_path} into transformers", file=sys.stderr)
        local = _load_reference(arguments.model_path)
        references[local.name] = local
        tolerance = _TOLERANCES.get(local.stored, _LOOSE_TOLERANCE)
    if arguments.tolerance is not None:
        tolerance = arguments.tolerance
    if other is not None:
        other.connect()
        references[arguments.reference] = other
    cases = list(told_steps(ask_all(client, arguments.output_len), _NUM_CASES, "asking the server"))
    findings = {
        name: [compare(case, reference) for case in told_steps(cases, len(cases), f"asking {name}")]
        for name, reference in references.items()
    }
    console = Console(width=_WIDTH)
    for name, found in findings.items():
        _show(console, name, cases, found, tolerance)
    worst = [finding.worst for found in findings.values() for finding in found]
    is_good = all(one <= tolerance for one in worst)
    verdict = "every answer agrees" if is_good else "some answers differ: the lines that say DIFFERS"
    print(f"verify: {verdict} (with {' and '.join(references)})")
    if not is_good and arguments.tolerance is None and all(one <= _FP8_KV_TOLERANCE for one in worst):
        print(_IF_FP8)
    return 0 if is_good else 1


def told_steps(steps: Iterable[T], num_steps: int, what: str) -> Iterator[T]:
    """The steps, and on stderr how far they are: a bar on a terminal, else lines with counts, some seconds apart."""
    console = Console(stderr=True)
    if console.is_terminal:
        with Progress(console=console, transient=True) as progress:
            yield from progress.track(steps, num_steps, description=what)
        return
    print(f"verify: {what}, {num_steps} cases", file=sys.stderr)
    said_s = time.monotonic()
    for count, step in enumerate(steps, 1):
        yield step
        if count == num_steps or time.monotonic() - said_s > _SAY_EVERY_S:
            print(f"verify: {what}, {count} of {num_steps} done", file=sys.stderr)
            said_s = time.monotonic()


class LocalReference(Reference, Protocol):
    """A model in the memory of this machine."""

    name: str
    stored: DType
    """Type of the checkpoint's weights."""


def _load_reference(folder: Path) -> LocalReference:
    """The checkpoint in transformers, which is optional and takes long to import: the server was asked before.

    Raises ConfigError.
    """
    try:
        module = importlib.import_module(_REFERENCE)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        advice = "pip install 'deltaserve[verify]', or compare with another server, --reference URL"
        raise ConfigError(f"verify: a MODEL as reference is computed by transformers: {advice}") from None
    reference: LocalReference = module.TransformersReference(folder)
    return reference


# ---------------------------------------------------------------- asking


def ask_all(client: ServerClient, output_len: int) -> Iterator[Case]:
    """Cold, warm, forked, the next turns, sampled, several at once: `_NUM_CASES`, as they are answered."""
    text = client.encode(_TEXT)
    unit = max(1, min(len(text) * 4, client.max_len // 3 - output_len))
    long = (text * 4)[:unit]
    other = (text[5:] * 4)[:unit]
    tail = client.encode(" And what is a page?")

    def ask(name: str, prompt: Sequence[int], **fields: object) -> Case:
        answer = client.complete(prompt, output_len, **fields)
        return Case(name, tuple(prompt), answer, is_greedy="temperature" not in fields)

    cold = ask("cold, prompt scored", long, prompt_logprobs=0)
    yield cold
    yield ask("the same again", long)
    yield ask("again, prompt scored", long, prompt_logprobs=0)
    yield ask("one token more", [*long, tail[0]])
    yield ask("forked half way", [*long[: unit // 2], *tail])
    turn = [*long, *cold.answer.tokens, *tail]
    second = ask("second turn", turn)
    yield second
    yield ask("third turn", [*turn, *second.answer.tokens, *tail])
    for name in ("sampled, cold", "sampled, cached"):
        yield ask(name, other, temperature=1.0, seed=7)
    prompts = [[*other[: unit - 10 * i], *tail] for i in range(4)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        yield from pool.map(lambda prompt: ask("four at once", prompt), prompts)


# ---------------------------------------------------------------- comparing


def compare(case: Case, reference: Reference) -> Finding:
    """The answer's log-probabilities against the reference's of the same tokens."""
    scores = reference.score([*case.prompt, *case.answer.tokens])
    of_prompt, of_output = scores[: len(case.prompt) - 1], scores[len(case.prompt) - 1 :]
    told = case.answer.prompt_logprobs
    return Finding(
        prompt_error=_worst(told, of_prompt) if told else 0.0,
        output_error=_worst(case.answer.logprobs, of_output),
        behind=max(score.best - score.logprob for score in of_output) if case.is_greedy else 0.0,
    )


def _worst(logprobs: Sequence[float], scores: Sequence[Score]) -> float:
    return max((abs(a - b.logprob) for a, b in zip(logprobs, scores, strict=True)), default=0.0)


def _show(console: Console, name: str, cases: Sequence[Case], findings: Sequence[Finding], tolerance: float) -> None:
    """Print a table: lengths in tokens, cached ones by side."""
    table = Table(title=f"against {name}, tolerance {tolerance:g}", title_justify="left", box=box.SIMPLE)
    for heading in ("case", "prompt", "on decode", "on prefill", "output", "prompt error", "output error", ""):
        table.add_column(heading, justify="left" if heading in ("case", "") else "right", no_wrap=heading == "case")
    for case, finding in zip(cases, findings, strict=True):
        answer = case.answer
        lengths = (len(case.prompt), answer.decode_cached_len, answer.prefill_cached_len, len(answer.tokens))
        prompt_error = f"{finding.prompt_error:.1e}" if answer.prompt_logprobs else "-"
        verdict = "ok" if finding.worst <= tolerance else "DIFFERS"
        table.add_row(case.name, *map(str, lengths), prompt_error, f"{finding.output_error:.1e}", verdict)
    console.print(table)
