"""Reading a secret: from a regular file that nobody else can reach, never more than a bounded part of it.

Of files that belong to root the group may read: so Kubernetes mounts a secret for a process that is not root (fsGroup),
and so a service gets one on a machine of its own. Container runtimes mount theirs in /run/secrets, for all to read.
"""

import os
import stat
from pathlib import Path

from deltaserve.core.errors import ConfigError

_ROOT = 0
_MOUNTED = Path("/run/secrets")
MIN_KEY_BYTES = 32
"""Fewest bytes of any secret: shorter ones can be guessed."""
MAX_KEY_BYTES = 4096
"""Most bytes of a file that holds one secret."""
MAX_KEY_FILE_BYTES = 1 << 20
"""Most bytes of a file of API keys, which server and clients read."""


def read_key(path: Path, where: str) -> bytes:
    """The one secret that the file holds, without surrounding white space. Raises ConfigError that begins with `where`
    and never shows it."""
    key = read_private(path, where, MAX_KEY_BYTES).strip()
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(
            f"{where}: {len(key)} bytes, at least {MIN_KEY_BYTES} are needed (head -c 48 /dev/random | base64)"
        )
    return key


def read_private(path: Path, where: str, max_bytes: int) -> bytes:
    """The file's content. Raises ConfigError that begins with `where` and never shows the content."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer must not block
        with open(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            check_owner_alone(status, path.resolve(), where)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{where}: not a regular file")
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror or error}") from None
    except ValueError:
        raise ConfigError(f"{where}: a name that no file can have") from None
    if len(content) > max_bytes:
        raise ConfigError(f"{where}: more than {max_bytes} bytes, at most {max_bytes} are allowed")
    return content


def check_owner_alone(status: os.stat_result, path: Path, where: str) -> None:
    """Raises ConfigError when others can reach the file. `path`: where it really is."""
    mode, allowed = status.st_mode, 0
    if status.st_uid == _ROOT:
        allowed = stat.S_IRGRP | stat.S_IROTH if _MOUNTED in path.parents else stat.S_IRGRP
    if mode & (stat.S_IRWXG | stat.S_IRWXO) & ~allowed:
        text = f"mode {stat.S_IMODE(mode):04o}, others can reach it; at most 0600 is allowed (0640 for a file of root)"
        raise ConfigError(f"{where}: {text}")
