"""Every planted fault is found by its kept seed, or by one of a few others. `make sim-mutants` searches anew."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forks import Forks
from tests.patience import PATIENCE_S
from tests.sim.mutants import FOUND_BY_TESTS, MUTANTS, Mutant
from tests.sim.mutation import mutated

ROOT = Path(__file__).parents[2]
KILLING_SEEDS: dict[str, int] = json.loads((Path(__file__).parent / "killing_seeds.json").read_text())


def test_there_are_enough_and_each_has_its_seed() -> None:
    assert len({m.name for m in MUTANTS}) == len(MUTANTS) >= 40
    assert KILLING_SEEDS.keys() | FOUND_BY_TESTS.keys() == {m.name for m in MUTANTS}
    assert not KILLING_SEEDS.keys() & FOUND_BY_TESTS.keys()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_each_changes_one_place(mutant: Mutant) -> None:
    source = ROOT / "src" / Path(*mutant.module.split(".")).with_suffix(".py")
    assert mutated(source.read_text(), mutant) != source.read_text()


NUM_FRESH = 150
"""Seeds tried where the kept one finds nothing any more: a change of the code changes what a seed draws."""


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    made = Forks.of(("pytest", "msgspec", "numpy", "xxhash"))
    yield made
    made.close()


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.name in KILLING_SEEDS], ids=lambda m: m.name)
def test_each_is_found(forks: Forks, mutant: Mutant) -> None:
    seed = KILLING_SEEDS[mutant.name]
    assert _finds(forks, mutant, seed, 1) or _finds(forks, mutant, 0, NUM_FRESH), "make sim-mutants"


@pytest.mark.parametrize("name", FOUND_BY_TESTS)
def test_those_too_rare_for_drawn_runs_are_found_by_a_test(name: str) -> None:
    test = Path(__file__).parents[1] / FOUND_BY_TESTS[name]
    command = [sys.executable, "-m", "tests.sim.mutation", name, str(test)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout


def _finds(forks: Forks, mutant: Mutant, first: int, num_seeds: int) -> bool:
    program = ROOT / "tests" / "sim" / "mutation.py"
    done = forks.run(ROOT, program, mutant.name, str(first), str(num_seeds), limit_s=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[1] != "lives"
