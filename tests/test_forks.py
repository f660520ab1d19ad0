"""Programs in forks of one process."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Thread
from types import FrameType

import pytest

from tests.forks import Forks
from tests.patience import PATIENCE_S


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    made = Forks.of(("fractions",))
    yield made
    made.close()


SAYS = """
import os, sys
import deltaserve
print(deltaserve.NAME, sys.argv[1:], os.getcwd(), "fractions" in sys.modules, sys.stdin.read())
sys.stderr.write("told")
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_program_has_the_tree_that_it_is_told_of(forks: Forks, tmp_path: Path, name: str) -> None:
    """Also when another has run: nothing of that is left."""
    package = tmp_path / "src" / "deltaserve"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"NAME = {name!r}\n")
    (tmp_path / "program.py").write_text(SAYS)
    for code in ("0", "3"):
        done = forks.run(tmp_path, tmp_path / "program.py", code, limit_s=PATIENCE_S)
        assert done.stdout == f"{name} {[code]} {tmp_path} True \n"
        assert (done.returncode, done.stderr) == (int(code), "told")


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("raise ValueError('of it')", 1, "ValueError: of it\n"),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit('so')", 1, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("import deltaserve.nothing", 1, "ModuleNotFoundError: No module named 'deltaserve.nothing'\n"),
    ],
)
def test_how_a_program_ended_is_told(forks: Forks, tmp_path: Path, text: str, code: int, said: str) -> None:
    (tmp_path / "program.py").write_text(text)
    done = forks.run(tmp_path, tmp_path / "program.py", limit_s=PATIENCE_S)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.endswith(said)


def test_a_program_without_end_is_ended(tmp_path: Path) -> None:
    forks = Forks.of(())
    (tmp_path / "program.py").write_text("while True: pass")
    with pytest.raises(AssertionError, match=r"program.py took more than 0.5 s"):
        forks.run(tmp_path, tmp_path / "program.py", limit_s=0.5)
    forks.close()


class Interrupted(BaseException):
    """What a test's own limit raises wherever the test is."""


def test_a_run_that_is_interrupted_leaves_nothing_to_wait_for(tmp_path: Path) -> None:
    forks, begun = Forks.of(()), tmp_path / "begun"
    (tmp_path / "program.py").write_text(f"import time; open({str(begun)!r}, 'w'); time.sleep(3600)")

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    def interrupt_when_it_has_begun() -> None:
        while not begun.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    former = signal.signal(signal.SIGUSR1, interrupt)
    try:
        Thread(target=interrupt_when_it_has_begun, daemon=True).start()
        with pytest.raises(Interrupted):
            forks.run(tmp_path, tmp_path / "program.py", limit_s=PATIENCE_S)
    finally:
        signal.signal(signal.SIGUSR1, former)
    closing_it = Thread(target=forks.close, daemon=True)
    closing_it.start()
    closing_it.join(PATIENCE_S)
    assert not closing_it.is_alive()


def test_modules_of_one_tree_are_there_before_a_program_begins(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "begun.py").write_text("import os\nPID = os.getpid()\n")
    (tmp_path / "program.py").write_text("import begun, os\nprint(begun.PID == os.getppid())\n")
    with closing(Forks.of(("begun",), tmp_path)) as forks:
        assert forks.run(tmp_path, tmp_path / "program.py", limit_s=PATIENCE_S).stdout == "True\n"
