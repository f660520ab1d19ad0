"""Streams safetensors into weights, tensor by tensor. Only safetensors: nothing in the folder is ever executed."""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deltaserve.models.config import load_family
from deltaserve.models.files import weight_files
from deltaserve.models.packing import pack, pack_layer
from deltaserve.models.spec import ModelSpec
from deltaserve.models.tensors import Inventory, not_safetensors
from deltaserve.models.weights import DecoderWeights, allocate


def load_weights(model_path: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
    """Every tensor exactly once, cast to `dtype`, matrices packed. Raises ConfigError naming file and tensor."""
    shards, index = weight_files(model_path)
    inventory = Inventory.of(load_family(model_path), spec, index)
    weights, targets = allocate(spec, dtype, device)
    for shard in shards:
        for name, tensor in _tensors(shard, inventory):
            targets[name].copy_(tensor)
    inventory.check_complete()
    layers = deque(weights.layers)
    rest = replace(weights, layers=(), lm_head=pack(weights.lm_head))
    del weights, targets  # so that a layer's plain matrices go when it is packed
    return replace(rest, layers=tuple(pack_layer(layers.popleft()) for _ in range(len(layers))))


def _tensors(shard: Path, inventory: Inventory) -> Iterator[tuple[str, Tensor]]:
    """(canonical name, tensor) of what the model needs from one file."""
    try:
        with safe_open(shard, "pt") as reader:
            for name in sorted(reader.keys()):
                entry = reader.get_slice(name)
                canonical = inventory.take(shard.name, name, entry.get_dtype(), tuple(entry.get_shape()))
                if canonical is not None:
                    yield canonical, reader.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise not_safetensors(shard, error) from None
