"""Runs programs in forks of a process that has imported what all of them import: each begins at once.

python -P tests/forks.py [--tree FOLDER] MODULE...      a job on each line of stdin, its exit code on one of stdout

Without a tree that process has nothing of deltaserve, so that a program finds the tree that it is told of. With one it
may have modules of it, and all programs are of that tree.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any

_OUTPUTS = ("stdout", "stderr")


@dataclass(frozen=True, slots=True)
class Forks:
    """The process; one program runs at a time."""

    process: subprocess.Popen[str]
    outputs: TemporaryDirectory[str]

    @classmethod
    def of(cls, modules: Sequence[str], tree: Path | None = None) -> "Forks":
        of_tree = [] if tree is None else ["--tree", str(tree)]
        process = subprocess.Popen(
            [sys.executable, "-B", "-P", str(Path(__file__).resolve()), *of_tree, *modules],
            env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return cls(process, TemporaryDirectory())

    def run(self, tree: Path, program: Path, *arguments: str, limit_s: float) -> subprocess.CompletedProcess[str]:
        """A program in that folder, which imports deltaserve, tests and tools of it. AssertionError when the limit is
        over; then all is ended, as it is when whoever waits here is interrupted: by a test's own limit, say."""
        assert self.process.stdin is not None and self.process.stdout is not None
        job = {"tree": str(tree), "argv": [str(program), *arguments], "outputs": self.outputs.name}
        print(json.dumps(job), file=self.process.stdin, flush=True)
        limit = Timer(limit_s, os.killpg, (self.process.pid, signal.SIGKILL))
        limit.start()
        try:
            code = self.process.stdout.readline()
        except BaseException:
            self._kill()
            raise
        finally:
            limit.cancel()
        assert code, f"{program} took more than {limit_s:g} s, or its process ended"
        out, err = (Path(self.outputs.name, name).read_text() for name in _OUTPUTS)
        return subprocess.CompletedProcess(job["argv"], int(code), out, err)

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self._kill()  # it has nothing to put in order
        self.process.wait()
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.outputs.cleanup()

    def _kill(self) -> None:
        """The process, and the program that it waits for."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def main(*words: str) -> None:
    of_tree, modules = (words[:2], words[2:]) if words[:1] == ("--tree",) else ((), words)
    for tree in of_tree[1:]:
        sys.path[:0] = [f"{tree}/src", tree]
    for module in modules:
        with suppress(ImportError):  # what is missing a program misses by itself
            importlib.import_module(module)
    gc.freeze()
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            os._exit(_exit_code(json.loads(line)))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _exit_code(job: dict[str, Any]) -> int:
    """What the program ends with, as Python says it."""
    os.chdir(job["tree"])
    files = [(0, os.devnull, os.O_RDONLY)]
    files += [(number, f"{job['outputs']}/{name}", _WRITTEN) for number, name in enumerate(_OUTPUTS, start=1)]
    for number, file, flags in files:
        os.dup2(os.open(file, flags, 0o600), number)
    sys.path[:0] = [f"{job['tree']}/src", job["tree"]]
    sys.argv = job["argv"]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


_WRITTEN = os.O_WRONLY | os.O_CREAT | os.O_TRUNC

if __name__ == "__main__":
    main(*sys.argv[1:])
