"""What a process lacks when it starts is told in one line, by whoever noticed; other errors stay what they are."""

import errno
import os

import pytest
import zmq

from deltaserve.core.errors import ConfigError
from deltaserve.process.children.shortage import telling_shortage

_LACKS = (
    (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "there is no more memory", "--num-pages"),
    (OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)), "no more threads may be started", "ulimit -u"),
    (OSError(errno.EFBIG, os.strerror(errno.EFBIG)), "no file may be so large", "ulimit -f"),
    (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "no more files may be open", "ulimit -n"),
    (OSError(errno.ENFILE, os.strerror(errno.ENFILE)), "no more files may be open", "fs.file-max"),
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "a disk is full", "TMPDIR"),
    (MemoryError(), "there is no more memory", "(MemoryError)"),
    (RuntimeError("can't start new thread"), "no more threads may be started", "ulimit -u"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "there is no more memory", "you tried"),
    (zmq.ZMQError(errno.EMFILE), "no more files may be open", "ulimit -n"),
    (RuntimeError("Authenticator thread failed to start"), "no more files may be open", "ulimit -n"),
    (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "there is no more memory", "2 GiB"),
)


@pytest.mark.parametrize(("error", "begins", "names"), _LACKS, ids=repr)
def test_a_shortage_is_one_line(error: Exception, begins: str, names: str) -> None:
    with pytest.raises(ConfigError) as caught, telling_shortage():
        raise error
    message = str(caught.value)
    assert message.startswith(begins) and names in message and "\n" not in message


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "x"), RuntimeError("shapes differ"), ValueError("memory")], ids=repr
)
def test_another_error_is_none(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, telling_shortage():
        raise error
    assert caught.value is error


def test_what_is_told_already_stays_so() -> None:
    with pytest.raises(ConfigError, match=r"^--port 1: can't allocate memory$"), telling_shortage():
        raise ConfigError("--port 1: can't allocate memory")
