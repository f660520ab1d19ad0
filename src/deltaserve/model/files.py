"""Which files of a model folder hold the weights. No torch: the supervisor and the front ask, too."""

import os
import re
from pathlib import Path

from deltaserve.core.branches import FORMATS, words_on
from deltaserve.core.errors import ConfigError
from deltaserve.model.folder_files import in_folder
from deltaserve.model.json_object import read_json
from deltaserve.model.other_layouts import other_layout

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_PLAIN_NAME = re.compile(r"[\w.\-]+\.safetensors")
_UNSAFE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl")


def model_name(path: Path) -> str:
    """What clients call a model: the name of its folder or file, without what only tells the format."""
    endings = [ending for ending in words_on(FORMATS, "suffix") if path.name.endswith(ending)]
    return path.name.removesuffix(endings[0]) if endings else path.name


def weight_files(model_path: Path) -> tuple[list[Path], dict[str, str]]:
    """The safetensors files in name order, and the index's tensor -> file map (empty without an index)."""
    index = model_path / INDEX_NAME
    is_whole = os.path.lexists(model_path / SINGLE_NAME)  # a link that leads nowhere is there, and wrong
    if os.path.lexists(index):
        mapping = _read_index(index)
        names = sorted(set(mapping.values()))
        if not is_whole or all(os.path.lexists(model_path / name) for name in names):
            return [_inside(model_path, name) for name in names], mapping
    if is_whole:  # also beside an index of shards that are not there
        return [_inside(model_path, SINGLE_NAME)], {}
    unsafe = sorted(p.name for p in model_path.glob("*") if p.suffix in _UNSAFE_SUFFIXES)
    if unsafe:
        formats = " and ".join(("safetensors", *words_on(FORMATS, "weights")))
        raise ConfigError(f"{unsafe[0]}: only {formats} weights are loaded; convert the checkpoint")
    what = other_layout(model_path)
    raise ConfigError(f"{SINGLE_NAME}: not found in the model folder, nor {INDEX_NAME}{what}")


def _read_index(index: Path) -> dict[str, str]:
    mapping = read_json(index).values.get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise ConfigError(f"{index.name}: weight_map is missing or empty")
    for name, shard in mapping.items():
        if not isinstance(shard, str) or not _PLAIN_NAME.fullmatch(shard):
            raise ConfigError(
                f"{index.name}: {name[:80]} is in {str(shard)[:80]!r}, which is not a plain .safetensors file name"
            )
    return mapping


def _inside(model_path: Path, name: str) -> Path:
    path = in_folder(model_path / name)
    if not path.is_file():
        raise ConfigError(f"{name}: not found in the model folder")
    return path
