"""Secrets come from files that only their owner can read: never from arguments or the environment."""

import stat
from pathlib import Path

from deltaserve.base.errors import ConfigError

MIN_KEY_BYTES = 32
MAX_KEY_BYTES = 4096


def read_cluster_key(path: Path) -> bytes:
    """The key all workers share, without surrounding white space. Raises ConfigError, which never shows the key."""
    where = f"--cluster-key-file {path}"
    try:
        mode = path.stat().st_mode
        with path.open("rb") as file:
            content = file.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror or error}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{where}: mode {stat.S_IMODE(mode):04o}, others can reach it; at most 0600 is allowed")
    if len(content) > MAX_KEY_BYTES:
        raise ConfigError(f"{where}: more than {MAX_KEY_BYTES} bytes, at most {MAX_KEY_BYTES} are allowed")
    key = content.strip()
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(
            f"{where}: {len(key)} bytes, at least {MIN_KEY_BYTES} are needed (head -c 48 /dev/random | base64)"
        )
    return key
