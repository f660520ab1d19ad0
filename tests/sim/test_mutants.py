"""Every planted fault is found by its kept seed, or by one of a few others. `make sim-mutants` searches anew."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.forks import Forks
from tests.patience import PATIENCE_S
from tests.sim.mutants import FOUND_BY_TESTS, MUTANTS, Mutant
from tests.sim.mutation import mutated

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "sim" / "mutation.py"
KILLING_SEEDS: dict[str, int] = json.loads((Path(__file__).parent / "killing_seeds.json").read_text())


def test_there_are_enough_and_each_has_its_seed() -> None:
    assert len({m.name for m in MUTANTS}) == len(MUTANTS) >= 40
    assert KILLING_SEEDS.keys() | FOUND_BY_TESTS.keys() == {m.name for m in MUTANTS}
    assert not KILLING_SEEDS.keys() & FOUND_BY_TESTS.keys()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_each_changes_one_place(mutant: Mutant) -> None:
    source = ROOT / "src" / Path(*mutant.module.split(".")).with_suffix(".py")
    assert mutated(source.read_text(), mutant) != source.read_text()


LIBRARIES = ("pytest", "hypothesis", "psutil", "msgspec", "numpy", "xxhash")
NUM_FRESH = 150
"""Seeds tried where the kept one finds nothing any more: a change of the code changes what a seed draws."""


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with closing(Forks.of((*LIBRARIES, "tests.sim.mutants", "deltaserve.sim.rig"), ROOT)) as made:
        yield made


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.name in KILLING_SEEDS], ids=lambda m: m.name)
def test_each_is_found(forks: Forks, mutant: Mutant) -> None:
    seed = KILLING_SEEDS[mutant.name]
    assert _finds(forks, mutant, seed, 1) or _finds(forks, mutant, 0, NUM_FRESH), "make sim-mutants"


@pytest.mark.parametrize("name", FOUND_BY_TESTS)
def test_those_too_rare_for_drawn_runs_are_found_by_a_test(forks: Forks, name: str) -> None:
    test = Path(__file__).parents[1] / FOUND_BY_TESTS[name]
    done = forks.run(ROOT, PROGRAM, name, str(test), limit_s=PATIENCE_S)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "\n1 failed" in done.stdout, done.stderr  # an exception, too, ends a program with 1


NOTHING = """
import sys
from tests.sim import mutation
from tests.sim.mutants import MUTANTS, Mutant
nothing = Mutant("nothing", "", MUTANTS[0].module, MUTANTS[0].old, MUTANTS[0].old)
assert mutation.first_kill(nothing, 0, 3) is None
sys.exit(mutation.exit_code_of(nothing, sys.argv[1]))
"""


def test_without_a_fault_nothing_is_found(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "nothing.py").write_text(NOTHING)
    test = Path(__file__).parents[1] / FOUND_BY_TESTS["parked_for_ever"]
    done = forks.run(ROOT, tmp_path / "nothing.py", str(test), limit_s=PATIENCE_S)
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr


def _finds(forks: Forks, mutant: Mutant, first: int, num_seeds: int) -> bool:
    done = forks.run(ROOT, PROGRAM, mutant.name, str(first), str(num_seeds), limit_s=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[1] != "lives"
