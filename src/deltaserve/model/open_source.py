"""Which format of checkpoint a path is in, and the rest of what reads that format."""

from pathlib import Path
from types import ModuleType

from deltaserve.core.branches import FORMATS
from deltaserve.core.errors import ConfigError
from deltaserve.core.files.branch_code import load_branch, load_half
from deltaserve.model.source import TensorSource


def open_source(path: Path) -> TensorSource:
    """A model folder, or a file that holds all of a model. Raises ConfigError for anything else."""
    for branch in FORMATS.values():
        source: TensorSource | None = load_branch(branch).open_path(path)
        if source is not None:
            return source
    raise ConfigError(f"MODEL {path.name[:200]}: in no format that is read")


def format_half(source: TensorSource, purpose: str) -> ModuleType | None:
    """What reads a source for `weights`, `text` or as `reference`. None: the format has nothing of its own for it."""
    return load_half(FORMATS[source.format], purpose)
