"""Secrets come from files that only their owner can read: never from arguments or the environment."""

from pathlib import Path

from deltaserve.base.errors import ConfigError
from deltaserve.server.private_file import MIN_KEY_BYTES, read_private

MAX_KEY_BYTES = 4096


def read_cluster_key(path: Path) -> bytes:
    """The key all workers share, without surrounding white space. Raises ConfigError, which never shows the key."""
    where = f"--cluster-key-file {path}"
    key = read_private(path, where, MAX_KEY_BYTES).strip()
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(
            f"{where}: {len(key)} bytes, at least {MIN_KEY_BYTES} are needed (head -c 48 /dev/random | base64)"
        )
    return key
