"""A line for an output that nobody reads is lost; whoever wrote it goes on."""

import fcntl
import io
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deltaserve.process.children.unblocked import unblocked
from tests.patience import PATIENCE_S

_MANY = 2000
_WRITERS = {
    "say": "from deltaserve.process.children.terminal import say as write",
    "say_in_json": """
import sys
from deltaserve.process.children.terminal import say_in_json
write = say_in_json("x", sys.stderr)""",
    "start_log": """
import logging
from deltaserve.process.children.terminal import LogSpec, start_log
start_log("x", LogSpec(), None)
write = logging.getLogger("x").info""",
}


def _pipe() -> tuple[int, int]:
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
    return ours, theirs


def _sockets() -> tuple[int, int]:
    ours, theirs = socket.socketpair()
    return ours.detach(), theirs.detach()


def _terminal() -> tuple[int, int]:
    return os.openpty()


@pytest.mark.parametrize("make", [_pipe, _sockets, _terminal])
@pytest.mark.parametrize("writer", _WRITERS)
def test_many_lines_that_nobody_reads(writer: str, make: Callable[[], tuple[int, int]]) -> None:
    ours, theirs = make()
    program = f"{_WRITERS[writer]}\nfor number in range({_MANY}):\n    write('line %d ' % number + 'x' * 200)\n"
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], stdin=subprocess.DEVNULL, stderr=theirs, timeout=PATIENCE_S, check=True
        )
        assert done.returncode == 0
        assert b"line 0 " in os.read(ours, 4096)
    finally:
        os.close(ours)
        os.close(theirs)


def test_what_was_lost_is_counted_when_somebody_reads_again() -> None:
    ours, theirs = _pipe()
    with os.fdopen(theirs, "w") as stream:
        out = unblocked(stream)
        for _ in range(100):
            out.write("x" * 99 + "\n")
        whole = os.read(ours, 1 << 16)
        out.write("again\n")
        out.write("and on\n")
        told = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert told == f"({100 - whole.count(b'x' * 99)} lines were lost here: nobody read them)\nagain\nand on\n"


def test_the_flag_of_others_who_share_the_output_stays() -> None:
    ours, theirs = _pipe()
    with os.fdopen(theirs, "w") as stream:
        unblocked(stream).write("x\n")
        assert os.get_blocking(theirs)
    os.close(ours)


def test_a_file_and_memory_are_written_to_as_they_are(tmp_path: Path) -> None:
    memory = io.StringIO()
    assert unblocked(memory) is memory
    with (tmp_path / "log").open("w") as stream:
        assert unblocked(stream) is stream


def test_a_reader_that_left_is_an_error_that_writers_know() -> None:
    ours, theirs = _pipe()
    with os.fdopen(theirs, "w") as stream:
        os.close(ours)
        with pytest.raises(BrokenPipeError):
            unblocked(stream).write("x\n")
