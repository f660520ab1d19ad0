"""Files of a model folder: one rule for links, whatever a file holds.

What is in a folder was often made by others (an archive, a repository): a link in it could bring any file of the
machine's owner into prompts and answers. So links are followed within the folder, and into the blobs of a Hugging
Face cache, which hold files of models alone. What the operator names (the folder itself, a GGUF file) may be a link.
"""

from pathlib import Path

from deltaserve.core.errors import ConfigError
from deltaserve.core.files.regular_file import read_if_there

MAX_JSON_BYTES = 16 << 20
_BLOBS, _SNAPSHOTS, _REPOSITORY = "blobs", "snapshots", "models--"
"""A cache has `models--OWNER--NAME/blobs/HASH`; links to those are in its snapshots, and in folders of older tools."""


def in_folder(path: Path) -> Path:
    """`path` itself, of a file in the folder above it. Raises ConfigError for a link that leads elsewhere."""
    try:
        folder, target = path.parent.resolve(), path.resolve()
    except (OSError, RuntimeError):  # a ring of links: reading it says so
        return path
    blobs = target.parent
    in_cache = blobs.name == _BLOBS and blobs.parent.name.startswith(_REPOSITORY)
    in_same = folder.parent.name == _SNAPSHOTS and blobs == folder.parent.parent / _BLOBS
    if folder in target.parents or in_cache or in_same:
        return path
    raise ConfigError(
        f"{path.name}: a link that leads out of the model folder; put the file itself in its place (cp -L, or ln for "
        "a hard link), or name the folder that it lies in"
    )


def read_in_folder(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes | None:
    """The file's content; None when nothing has this name. Raises ConfigError, which names the file and not its
    folder."""
    try:
        return read_if_there(in_folder(path), max_bytes)
    except OSError as error:
        raise ConfigError(f"{path.name}: {error.strerror}") from None
