"""Streams safetensors into weights, tensor by tensor. Only safetensors: nothing in the folder is ever executed."""

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deltaserve.base.errors import ConfigError
from deltaserve.models.config import load_family, read_json
from deltaserve.models.family import Family
from deltaserve.models.spec import ModelSpec
from deltaserve.models.weights import DecoderWeights, Slot, allocate

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_FLOAT_DTYPES = ("F32", "F16", "BF16")
_PLAIN_NAME = re.compile(r"[\w.\-]+\.safetensors")
_UNSAFE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".gguf")


def load_weights(model_path: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
    """Every tensor exactly once, cast to `dtype`. Raises ConfigError naming file and tensor."""
    family = load_family(model_path)
    shards, mapping = weight_files(model_path)
    weights, slots = allocate(spec, dtype, device)
    filler = _Filler(family, slots, mapping, tied=spec.tied_embeddings)
    for shard in shards:
        for name, tensor in _tensors(shard):
            filler.fill(shard.name, name, tensor)
    filler.check_complete()
    return weights


def weight_files(model_path: Path) -> tuple[list[Path], dict[str, str]]:
    """The safetensors files in name order, and the index's tensor -> file map (empty without an index)."""
    index = model_path / INDEX_NAME
    if index.exists():
        mapping = _read_index(index)
        return [_inside(model_path, name) for name in sorted(set(mapping.values()))], mapping
    if (model_path / SINGLE_NAME).exists():
        return [_inside(model_path, SINGLE_NAME)], {}
    unsafe = sorted(p.name for p in model_path.glob("*") if p.suffix in _UNSAFE_SUFFIXES)
    if unsafe:
        raise ConfigError(f"{unsafe[0]}: only safetensors weights are loaded; convert the checkpoint")
    raise ConfigError(f"{SINGLE_NAME}: not found in the model folder, nor {INDEX_NAME}")


def _read_index(index: Path) -> dict[str, str]:
    mapping = read_json(index).values.get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise ConfigError(f"{index.name}: weight_map is missing or empty")
    for name, shard in mapping.items():
        if not isinstance(shard, str) or not _PLAIN_NAME.fullmatch(shard):
            raise ConfigError(f"{index.name}: {name[:80]}: {str(shard)[:80]!r} is not a plain .safetensors file name")
    return mapping


def _inside(model_path: Path, name: str) -> Path:
    """The file, which must lie in the folder, or (Hugging Face cache) in the `blobs` of the same snapshot."""
    path, folder = model_path / name, model_path.resolve()
    if not path.is_file():
        raise ConfigError(f"{name}: not found in the model folder")
    parents = path.resolve().parents
    in_cache = folder.parent.name == "snapshots" and folder.parent.parent / "blobs" in parents
    if folder not in parents and not in_cache:
        raise ConfigError(f"{name}: a link that leads out of the model folder")
    return path


def _tensors(shard: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(shard, "pt") as reader:
            for name in sorted(reader.keys()):
                found = reader.get_slice(name).get_dtype()
                if found not in _FLOAT_DTYPES:
                    expected = ", ".join(_FLOAT_DTYPES)
                    raise ConfigError(f"{shard.name}: {name[:80]} has dtype {found}, expected one of {expected}")
                yield name, reader.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{shard.name}: not a valid safetensors file: {str(error)[:120]}") from None


class _Filler:
    """Books which slots are filled. Each is filled once; none is left."""

    def __init__(self, family: Family, slots: dict[str, Slot], mapping: dict[str, str], *, tied: bool) -> None:
        self._family = family
        self._slots = slots
        self._mapping = mapping
        self._skipped = {"lm_head.weight"} if tied else set()
        self._filled: set[str] = set()

    def fill(self, shard: str, name: str, tensor: Tensor) -> None:
        shown = f"{shard}: {name[:80]}"
        if self._mapping and self._mapping.get(name) != shard:
            raise ConfigError(f"{shown} is in this file, but the index says {self._mapping.get(name, 'nothing')[:80]}")
        canonical = self._family.canonical(name)
        if canonical is None or canonical in self._skipped:
            return
        slot = self._slots.get(canonical)
        if slot is None:
            raise ConfigError(f"{shown} is not a tensor of this model")
        if not self._filled.isdisjoint(slot.covers):
            raise ConfigError(f"{shown} is given twice")
        if tuple(tensor.shape) != slot.shape:
            raise ConfigError(f"{shown} has shape {list(tensor.shape)}, expected {list(slot.shape)}")
        slot.target.copy_(tensor)
        self._filled.update(slot.covers)

    def check_complete(self) -> None:
        missing = sorted({part for slot in self._slots.values() for part in slot.covers} - self._filled)
        if missing:
            raise ConfigError(f"weights: {len(missing)} tensors are missing, first {missing[0]}")
