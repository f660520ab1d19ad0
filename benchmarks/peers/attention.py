"""One layer's attention by the native library and by vLLM's CPU operator: same shapes and type, one thread each."""

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.bench_attention import SPLIT_TOKENS, STEPS, Step, backends_of
from benchmarks.peers.comparison import markdown
from benchmarks.peers.environments import Environment
from deltaserve.compute.attention.attention import Batch, Shared
from deltaserve.compute.memory.element_conversion import torch_dtype
from deltaserve.core.layout.dtype import DType

ATTENTION = "attention"
BARS = {"8 rows, 8,192 shared": 3.0, "8 rows, 8,192 private": 1.0, "extend of 512 at 4,096": 1.0}
"""Step of bench_attention.py |-> how many times as fast as vLLM's."""
KV_HEADS = (2, 8)
"""With 2 a prefix of 8,192 in bfloat16 is 8 MiB, which many a cache holds; with 8 it is 32 MiB."""
PROGRAM = Path(__file__).resolve().parent / "vllm_attention.py"
ROUNDS, SMALL_ROUNDS = 15, 3


class OperatorFailed(Exception):
    """vLLM's operator could not be called; says where the log is."""


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """Medians over rounds, milliseconds of CPU time."""

    step: str
    kv_heads: int
    dtype: str
    own: str
    """Instruction set."""
    peer: str
    """vLLM's name for the kernel."""
    own_ms: float
    peer_ms: float
    ratio: float
    """Median of vLLM's time over this one's, round by round."""
    bar: float

    def cells(self) -> tuple[str, ...]:
        verdict = "holds" if self.ratio >= self.bar else "missed"
        times = (f"{self.own_ms:.2f} ({self.own})", f"{self.peer_ms:.2f} ({self.peer})", f"{self.ratio:.2f}")
        return (f"{self.step}, {self.kv_heads} KV heads, {self.dtype}", *times, f">= {self.bar:g}", verdict)


@dataclass(frozen=True, slots=True)
class OperatorReport:
    text: str
    rows: list[dict[str, object]]


def attention_report(env: Environment | None, dtype: str, small: bool, say: Callable[[str], None]) -> OperatorReport:
    """`env`: vLLM's, None where it is not installed."""
    if env is None:
        return OperatorReport("attention: vLLM is not installed or not asked for", [])
    num_rounds, rows = SMALL_ROUNDS if small else ROUNDS, []
    try:
        for kv_heads in KV_HEADS:
            for step in (replace(step, kv_heads=kv_heads) for step in STEPS if step.name in BARS):
                say(f"attention: {step.name}, {kv_heads} KV heads, {num_rounds} rounds")
                rows.append(compare(step, DType(dtype), env, num_rounds))
    except OperatorFailed as error:
        say(f"attention is left out: {error}")
    head = ("one layer, D 128, 4 query heads on a KV head", "deltaserve, ms", "vLLM, ms", "vLLM / own", "bar", "")
    load = f"load {os.getloadavg()[0]:.1f}"
    return OperatorReport(
        f"attention: one thread, CPU time, {load}\n\n{markdown([head, *(row.cells() for row in rows)])}",
        [asdict(row) for row in rows],
    )


@torch.inference_mode()
def compare(step: Step, dtype: DType, env: Environment, num_rounds: int) -> OperatorRow:
    """In turns, after one round that does not count. Raises OperatorFailed."""
    torch.set_num_threads(1)
    shared = (Shared(0, step.common, tuple(range(len(step.queries)))),) if step.common else ()
    batch = Batch(step.queries, SPLIT_TOKENS, shared)
    own, backend = list(backends_of(step, dtype).items())[-1]
    q = torch.randn(batch.num_tokens, step.kv_heads * step.group_size, step.head_dim).to(torch_dtype(dtype))
    attend = partial(backend.begin_step(batch)[0].attend, 0, q, step.head_dim**-0.5)
    pairs: list[tuple[float, float]] = []
    with peers_operator(step, dtype, env) as (peer, run_peer):
        for _ in range(num_rounds + 1):
            began = time.process_time()
            attend()
            pairs.append(((time.process_time() - began) * 1e3, run_peer()))
    pairs = pairs[1:]
    own_ms, peer_ms = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(theirs / ours for ours, theirs in pairs)
    return OperatorRow(step.name, step.kv_heads, dtype.value, own, peer, own_ms, peer_ms, ratio, BARS[step.name])


@contextmanager
def peers_operator(step: Step, dtype: DType, env: Environment) -> Iterator[tuple[str, Callable[[], float]]]:
    """The kernel's name, and what runs it once and gives the milliseconds. Raises OperatorFailed."""
    case = {
        "kv_heads": step.kv_heads,
        "group_size": step.group_size,
        "head_dim": step.head_dim,
        "queries": [(query.q_start, query.q_len) for query in step.queries],
        "common": step.common,
    }
    log = env.folder / "attention.log"
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("wb") as errors:
        child = subprocess.Popen(
            [env.python, PROGRAM, dtype.value],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**inherited, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        )
    assert child.stdin is not None and child.stdout is not None
    asked, told = child.stdin, child.stdout

    def answer(line: str) -> str:
        try:
            asked.write(line + "\n")
            asked.flush()
            said = told.readline()
        except OSError as error:
            raise OperatorFailed(f"{error}: {log}") from error
        if not said:
            raise OperatorFailed(f"vLLM's process ended: {log}")
        return said.strip()

    try:
        yield answer(json.dumps(case)), lambda: float(answer(""))
    finally:
        child.kill()
        child.wait()
        asked.close()
        told.close()
