"""Simulated runs in several processes: tasks and summaries travel as lines of JSON.

python -m deltaserve.commands.simulate.pool        a child: one task per line in, one summary per line out
"""

import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue

import msgspec

from deltaserve.sim.exhaustive import Strike, run_small
from deltaserve.sim.rig import simulate
from deltaserve.sim.summary import Summary

_TWICE = 100
"""One seed in so many is run twice (I21)."""


class Seeds(msgspec.Struct, frozen=True, tag=True):
    """Seeds [first, first + number)."""

    first: int
    number: int
    full_every: int
    """Touches of a process between two complete recounts of it."""


class Scripts(msgspec.Struct, frozen=True, tag=True):
    """Small runs, each under given strikes."""

    strikes: tuple[tuple[Strike, ...], ...]


Task = Seeds | Scripts


def run_tasks(tasks: Iterable[Task], num_jobs: int) -> Iterator[Summary]:
    """A summary of each task, in order. Tasks are taken a few ahead of whoever takes the summaries."""
    with ThreadPoolExecutor(num_jobs) as threads:
        children: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        started = [_start() for _ in range(num_jobs)]
        for child in started:
            children.put(child)
        try:
            under_way: deque[Future[Summary]] = deque()
            for task in tasks:
                under_way.append(threads.submit(_ask, children, task))
                if len(under_way) >= 2 * num_jobs:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for child in started:
                child.terminate()  # in the middle of its task, where we are interrupted
            threads.shutdown(cancel_futures=True)
            for child in started:
                with suppress(BrokenPipeError), child:
                    pass  # its pipes are closed, and it is waited for


def _start() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", __spec__.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _ask(children: "SimpleQueue[subprocess.Popen[bytes]]", task: Task) -> Summary:
    child = children.get()
    try:
        if child.stdin is None or child.stdout is None:
            raise RuntimeError("a child without pipes")
        child.stdin.write(msgspec.json.encode(task) + b"\n")
        child.stdin.flush()
        line = child.stdout.readline()
    finally:
        children.put(child)
    if not line:
        raise RuntimeError(f"a simulating process ended with {child.wait()} in {task}")
    return msgspec.json.decode(line, type=Summary)


def perform(task: Task) -> Summary:
    """Do a task in a child process."""
    summary = Summary()
    match task:
        case Seeds():
            for seed in range(task.first, task.first + task.number):
                report = simulate(seed, full_every=task.full_every)
                summary.add(report)
                if seed % _TWICE == 0:
                    summary.compare(report, simulate(seed, full_every=task.full_every))
        case Scripts():
            for strikes in task.strikes:
                report = run_small(strikes)
                summary.num_runs += 1
                if report.breach is not None:
                    summary.breaches.append((str(strikes), report.breach))
    return summary


def main() -> None:
    decoder = msgspec.json.Decoder(Task)
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(msgspec.json.encode(perform(decoder.decode(line))) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
