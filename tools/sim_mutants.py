"""How many simulated runs it takes to find each planted fault (tests/sim/mutants.py).

    python -m tools.sim_mutants [--seeds N] [--jobs J] [--only NAME ...] [--lost] [--save]

Prints one line per mutant, then median and worst. --save writes the killing seeds that CI replays; --lost searches only
for those whose saved seed finds them no more. Exit code 1 when a mutant lives.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.sim.mutants import MUTANTS

ROOT = Path(__file__).resolve().parent.parent
KILLING_SEEDS = ROOT / "tests" / "sim" / "killing_seeds.json"


def search(name: str, first: int, num_seeds: int) -> tuple[str, int | None, str]:
    """(name, killing seed or None, what broke), from a process of its own."""
    command = [sys.executable, "-m", "tests.sim.mutation", name, str(first), str(num_seeds)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    words = done.stdout.split(maxsplit=2)
    if done.returncode or len(words) < 2:
        raise RuntimeError(f"{name}: {done.stderr.strip()[-400:]}")
    return (name, None, "") if words[1] == "lives" else (name, int(words[1]), words[2].strip())


def saved_seeds() -> dict[str, int]:
    return json.loads(KILLING_SEEDS.read_text()) if KILLING_SEEDS.exists() else {}


def lost(names: list[str], pool: ThreadPoolExecutor) -> list[str]:
    """Those without a saved seed that finds them."""
    known = saved_seeds()
    replayed = pool.map(lambda name: search(name, known.get(name, 0), 1), names)
    return [name for name, seed, _ in replayed if seed is None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20_000, help="runs to try on each (default 20000)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", nargs="*", default=[m.name for m in MUTANTS], metavar="NAME")
    parser.add_argument("--lost", action="store_true", help="only those that their saved seeds find no more")
    parser.add_argument("--save", action="store_true", help=f"write {KILLING_SEEDS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    rows = {m.name: m.row for m in MUTANTS}
    seeds: dict[str, int] = {}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        names = lost(arguments.only, pool) if arguments.lost else arguments.only
        for done in as_completed([pool.submit(search, name, 0, arguments.seeds) for name in names]):
            name, seed, breach = done.result()
            print(f"{name:32} {rows[name]:4} {'LIVES' if seed is None else seed:>6} {breach[:90]}", flush=True)
            if seed is not None:
                seeds[name] = seed
    runs = [seed + 1 for seed in seeds.values()]
    if runs:
        found = f"{len(runs)} of {len(names)} found"
        print(f"{found}; runs needed: median {statistics.median(runs):g}, worst {max(runs)}")
    if arguments.save:
        known = saved_seeds()
        KILLING_SEEDS.write_text(json.dumps(dict(sorted((known | seeds).items())), indent=1) + "\n")
    return 0 if len(seeds) == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
