"""Secrets come from files that only their owner can read: never from arguments or the environment."""

import re
from pathlib import Path

from deltaserve.core.errors import ConfigError
from deltaserve.core.files.private_file import MAX_KEY_FILE_BYTES, MIN_KEY_BYTES, read_key, read_private
from deltaserve.core.ids import Namespace
from deltaserve.server.settings import ApiKey, Right

NO_CLUSTER_KEY = (
    "--cluster-key-file: missing; the router and its workers must share one key: "
    "(umask 077; head -c 48 /dev/random | base64 > cluster.key)"
)
_NAMESPACE = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")


def read_cluster_key(path: Path) -> bytes:
    """The key all workers share, without surrounding white space. Raises ConfigError, which never shows the key."""
    return read_key(path, f"--cluster-key-file {path}")


def read_api_keys(path: Path) -> tuple[ApiKey, ...]:
    """Keys of a file readable by its owner only. Raises ConfigError naming the file and the line, never the key."""
    where = f"--api-key-file {path}"
    try:
        text = read_private(path, where, MAX_KEY_FILE_BYTES).decode("utf-8-sig")  # some editors begin with a mark
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: not UTF-8") from None
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            key = _parse_key(line, f"{path}:{number}")
            if keys.setdefault(key.secret, key) is not key:
                raise ConfigError(f"{path}:{number}: this key stands in an earlier line as well")
    if not keys:
        raise ConfigError(f"{where}: holds no key")
    return tuple(keys.values())


def _parse_key(line: str, where: str) -> ApiKey:
    """`SECRET NAMESPACE [admin]`: an admin key may use both listeners."""
    secret, *rest = line.split()
    if not rest or len(rest) > 2 or (len(rest) == 2 and rest[1] != Right.ADMIN.value):
        raise ConfigError(f"{where}: a line is `SECRET NAMESPACE [admin]`")
    if not _NAMESPACE.match(rest[0]):
        raise ConfigError(f"{where}: a namespace is 1 to 64 of A-Z a-z 0-9 _ . -")
    if not secret.isprintable():
        raise ConfigError(f"{where}: the key holds a character that cannot be printed")
    if len(secret.encode()) < MIN_KEY_BYTES:
        raise ConfigError(f"{where}: the key has {len(secret.encode())} bytes, at least {MIN_KEY_BYTES} are needed")
    return ApiKey(secret, Namespace(rest[0]), frozenset(Right) if len(rest) == 2 else frozenset({Right.API}))
