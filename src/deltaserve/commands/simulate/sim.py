"""`deltaserve sim`: the production control planes in virtual time, under faults.

deltaserve sim faults --seeds 20000          fresh seeds; exit code 1 when one breaks an invariant
deltaserve sim faults --seed 4711 --trace    one run, event by event; the same seed is the same run
"""

import argparse
import json
import os
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import msgspec

from deltaserve.commands.simulate.exhaustive import take_apart
from deltaserve.commands.simulate.pool import Seeds, run_tasks
from deltaserve.core.errors import ConfigError
from deltaserve.core.files.result_file import check_place, write_result
from deltaserve.sim.knobs import draw_knobs
from deltaserve.sim.rig import simulate
from deltaserve.sim.summary import Summary

_BATCH = 50
_PROGRESS_S = 5.0
_TRACE_LINES = 100_000
_FULL_EVERY = 32
"""Touches of a process between two complete recounts of it; --paranoid: every one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "what",
        choices=("faults", "exhaustive"),
        metavar="faults|exhaustive",
        help="random chaos, or one small run taken apart",
    )
    parser.add_argument("--seeds", type=int, default=2000, metavar="N", help="number of seeds (default 2000)")
    parser.add_argument("--from", type=int, dest="first", metavar="S", help="first seed (default: fresh, by the clock)")
    parser.add_argument("--seed", type=int, metavar="S", help="run this seed only")
    parser.add_argument("--trace", action="store_true", help="with --seed: print every event")
    parser.add_argument("--paranoid", action="store_true", help="recount everything after every event")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="J", help="processes (default: cores)")
    parser.add_argument("--minutes", type=float, default=20.0, help="exhaustive: time for pairs (default 20; 0: none)")
    parser.add_argument("--gates", action="store_true", help="name cells and faults hit too rarely, with exit code 1")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")


def run(arguments: argparse.Namespace) -> int:
    for flag, value in (("--seeds", arguments.seeds), ("--jobs", arguments.jobs)):
        if value < 1:
            raise ConfigError(f"{flag}: {value}, must be at least 1")
    if arguments.trace and arguments.seed is None:
        raise ConfigError("--trace: needs --seed, the run to print")
    if arguments.json is not None:
        check_place(arguments.json, "--json")
    if arguments.what == "exhaustive":
        return take_apart(arguments.jobs, arguments.minutes)
    return _run_one(arguments) if arguments.seed is not None else _run_many(arguments)


def _run_one(arguments: argparse.Namespace) -> int:
    """Run one seed, and tell it in full."""
    full_every = 1 if arguments.paranoid else _FULL_EVERY
    report = simulate(arguments.seed, keep_lines=_TRACE_LINES if arguments.trace else 0, full_every=full_every)
    print(f"{draw_knobs(arguments.seed)}\n")
    for line in report.trace:
        print(line)
    print(f"seed {report.seed}: {report.num_events} events, {report.num_requests} requests, trace {report.digest}")
    if report.error is None:
        return 0
    print("".join(traceback.format_exception(report.error)))
    return 1


def _run_many(arguments: argparse.Namespace) -> int:
    first = arguments.first if arguments.first is not None else int(time.time()) * 10_000
    end = first + arguments.seeds
    print(f"seeds {first} to {end - 1}, {arguments.jobs} processes", flush=True)
    summary, started, told = Summary(), time.monotonic(), time.monotonic()
    for part in run_tasks(_batches(first, end, arguments), arguments.jobs):
        summary.merge(part)
        for run, breach in part.breaches:
            print(f"  {run}: {breach}", flush=True)
        if time.monotonic() - told > _PROGRESS_S:
            told = time.monotonic()
            rate = summary.num_runs / (told - started)
            print(f"  {summary.num_runs:,} runs, {rate:.0f} runs/s, {len(summary.breaches)} breaches", flush=True)
    seconds = time.monotonic() - started
    problem = None
    if arguments.json is not None:  # before all else: nothing may lose it
        figures = {"first_seed": first, "seconds": round(seconds, 1), **msgspec.to_builtins(summary)}
        problem = write_result(arguments.json, "--json", json.dumps(figures, indent=1) + "\n")
    print("\n".join(summary.lines()))
    print(f"{summary.num_runs / seconds:.1f} runs/s over {arguments.jobs} processes, {seconds:.0f} s")
    gaps = summary.gaps() if arguments.gates else []  # a few seeds hit little: without gates that is no finding
    for gap in gaps:
        print(f"too rare: {gap}")
    for run, _ in summary.breaches[:3]:
        print(f"to see it: deltaserve sim faults --{run} --trace")
    if problem is not None:
        print(problem)
    return 1 if summary.breaches or gaps or problem is not None else 0


def _batches(first: int, end: int, arguments: argparse.Namespace) -> Iterator[Seeds]:
    full_every = 1 if arguments.paranoid else _FULL_EVERY
    for start in range(first, end, _BATCH):
        yield Seeds(start, min(_BATCH, end - start), full_every)
