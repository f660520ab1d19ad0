"""A process that forks others of itself on request: those need not load again what it has loaded.

It must have no thread but its own: a fork copies one thread, and locks that others held would stay locked.
"""

import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from deltaserve.process.children.exits import Exit, leave
from deltaserve.process.children.notices import (
    MAX_NOTICE_BYTES,
    PARENT_VARIABLE,
    ForkAnswer,
    ForkRequest,
    decode_from_supervisor,
    encode_notice,
)
from deltaserve.process.children.parent import Parent
from deltaserve.process.children.title import show_command

Run = Callable[[Sequence[str]], None]
"""Do what the program with these arguments does. Ends the process."""

_TASKS = Path("/proc/self/task")
_PID_BYTES = 8
_NUM_DESCRIPTORS = 2


def fork_on_request(parent: Parent, run: Run) -> NoReturn:
    """Fork a process for each request of the supervisor, until that is gone."""
    if len(list(_TASKS.iterdir())) != 1:
        print("nothing can be forked: what was loaded has started threads", file=sys.stderr, flush=True)
        leave(Exit.FAILED)
    parent.ready("", 0)
    channel = parent.take_channel()
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel, MAX_NOTICE_BYTES, _NUM_DESCRIPTORS)
        if not data:
            leave(Exit.OK)
        asked = decode_from_supervisor(data)
        assert isinstance(asked, ForkRequest)
        pid = _fork_away(lambda: _become(asked, descriptors, channel, run))  # noqa: B023  # called before it returns
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(encode_notice(ForkAnswer(pid)))


def _fork_away(become: Callable[[], None]) -> int | None:
    """Id of a new process that is a child of this one's parent, which adopts orphans meanwhile: it sees the end and
    the exit code as of those that it has started. None: it could not be forked.

    A process between the two forks ends at once, and makes the new one an orphan. That waits until it is adopted:
    before, its parent would be the wrong one.
    """
    told, tells = os.pipe()
    waits, go = os.pipe()
    try:
        between = os.fork()
    except OSError:
        between = None
    if between == 0:
        os.close(told)
        _fork_again(tells, waits, go, become)
    os.close(tells)
    os.close(waits)
    pid = 0
    if between is not None:
        os.waitpid(between, 0)
        pid = int.from_bytes(os.read(told, _PID_BYTES), sys.byteorder)
    if pid:
        os.write(go, b"\0")
    os.close(told)
    os.close(go)
    return pid or None


def _fork_again(tells: int, waits: int, go: int, become: Callable[[], None]) -> NoReturn:
    """Be the process between, or the new one. Neither may ever go on as a second preload process."""
    try:
        pid = os.fork()
        if pid:
            os.write(tells, pid.to_bytes(_PID_BYTES, sys.byteorder))
            os._exit(Exit.OK)
        os.close(go)
        if os.read(waits, 1):  # else the preload process has ended: nobody knows this one
            os.close(waits)
            os.close(tells)
            become()
    finally:
        os._exit(Exit.FAILED)


def _become(asked: ForkRequest, descriptors: Sequence[int], channel: socket.socket, run: Run) -> None:
    """Be a process as `asked.argv` would have started it: session, streams, environment, arguments. Returns where the
    supervisor has not adopted it: that starts another one in its place, and knows nothing of this one."""
    if os.getppid() != asked.supervisor:
        return
    channel.close()
    os.setsid()
    output, own_channel = descriptors
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.update(asked.env)
    os.environ[PARENT_VARIABLE] = f"{own_channel}:{asked.supervisor}"
    show_command(asked.argv)
    sys.argv = list(asked.argv[2:])
    run(sys.argv)
