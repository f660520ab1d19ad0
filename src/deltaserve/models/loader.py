"""Streams safetensors into weights, tensor by tensor. Only safetensors: nothing in the folder is ever executed."""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deltaserve.base.errors import ConfigError
from deltaserve.models.config import load_family
from deltaserve.models.family import Family
from deltaserve.models.files import weight_files
from deltaserve.models.packing import pack, pack_layer
from deltaserve.models.spec import ModelSpec
from deltaserve.models.weights import DecoderWeights, Slot, allocate

_FLOAT_DTYPES = ("F32", "F16", "BF16")


def load_weights(model_path: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
    """Every tensor exactly once, cast to `dtype`, matrices packed. Raises ConfigError naming file and tensor."""
    family = load_family(model_path)
    shards, mapping = weight_files(model_path)
    weights, slots = allocate(spec, dtype, device)
    filler = _Filler(family, slots, mapping, tied=spec.tied_embeddings)
    for shard in shards:
        for name, tensor in _tensors(shard):
            filler.fill(shard.name, name, tensor)
    filler.check_complete()
    layers = deque(weights.layers)
    rest = replace(weights, layers=(), lm_head=pack(weights.lm_head))
    del weights, slots, filler  # so that a layer's plain matrices go when it is packed
    return replace(rest, layers=tuple(pack_layer(layers.popleft()) for _ in range(len(layers))))


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
