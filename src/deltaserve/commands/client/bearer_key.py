"""The key that a client of a server with keys sends: the first of a file in the server's own form."""

import codecs
from pathlib import Path

from deltaserve.core.errors import ConfigError
from deltaserve.core.files.private_file import MAX_KEY_FILE_BYTES, read_private


def authorization(path: Path | None) -> dict[str, str]:
    """The header that carries the file's first key; none without a file. Raises ConfigError, which never shows it."""
    if path is None:
        return {}
    where = f"--api-key-file {path}"
    lines = read_private(path, where, MAX_KEY_FILE_BYTES).removeprefix(codecs.BOM_UTF8).splitlines()
    keys = [line.split()[0] for line in lines if line.strip() and not line.lstrip().startswith(b"#")]
    if not keys or not keys[0].isascii():
        raise ConfigError(f"{where}: holds no key")
    return {"Authorization": f"Bearer {keys[0].decode()}"}
