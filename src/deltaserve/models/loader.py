"""Streams a checkpoint into weights, tensor by tensor. Nothing in it is ever executed."""

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from deltaserve.models.checkpoint_config import family_of
from deltaserve.models.dequantised import dequantised
from deltaserve.models.gguf_arrays import gguf_arrays
from deltaserve.models.gguf_model import GgufModel
from deltaserve.models.model_spec import ModelSpec
from deltaserve.models.open_source import Source, open_source
from deltaserve.models.packing import pack, pack_layer
from deltaserve.models.quantised_folder import QuantisedFolder
from deltaserve.models.safetensors_folder import SafetensorsFolder, valid_file
from deltaserve.models.source import TensorHeader
from deltaserve.models.tensors import Inventory, as_stored
from deltaserve.models.weights import DecoderWeights, allocate

_log = logging.getLogger(__name__)
_NAMED_TENSORS = 8


def load_weights(model_path: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
    """Every tensor exactly once, cast to `dtype`, matrices packed. Raises ConfigError naming file and tensor."""
    source = open_source(model_path)
    family = family_of(source.config())
    stored = as_stored(spec, family, source.headers())
    inventory = Inventory.of(family, stored, source.index)
    weights, targets = allocate(stored, dtype, device)
    for name, tensor in _tensors(source, inventory):
        targets[name].copy_(tensor)
    inventory.check_complete()
    _name_unused(inventory.unused)
    if spec.tied_embeddings and not stored.tied_embeddings:
        weights = _tie_equal(weights)
    layers = deque(weights.layers)
    rest = replace(weights, layers=(), lm_head=pack(weights.lm_head))
    del weights, targets  # so that a layer's plain matrices go when it is packed
    return replace(rest, layers=tuple(pack_layer(layers.popleft()) for _ in range(len(layers))))


def _tensors(source: Source, inventory: Inventory) -> Iterator[tuple[str, Tensor]]:
    """(canonical name, tensor) of what the model needs."""
    match source:
        case SafetensorsFolder():
            for shard in source.shards:
                yield from _shard_tensors(shard, inventory)
        case QuantisedFolder():
            for header, read_weight in dequantised(source):
                canonical = inventory.take(header)
                if canonical is not None:
                    yield canonical, read_weight()
        case GgufModel():
            for header, read in gguf_arrays(source):
                canonical = inventory.take(header)
                if canonical is not None:
                    yield canonical, torch.from_numpy(read())


def _shard_tensors(shard: Path, inventory: Inventory) -> Iterator[tuple[str, Tensor]]:
    with valid_file(shard), safe_open(shard, "pt") as reader:
        for name in sorted(reader.keys()):
            entry = reader.get_slice(name)
            header = TensorHeader(shard.name, name, entry.get_dtype(), tuple(entry.get_shape()))
            canonical = inventory.take(header)
            if canonical is not None:
                yield canonical, reader.get_tensor(name)


def _tie_equal(weights: DecoderWeights) -> DecoderWeights:
    """Weights of a config that ties the output matrix to the embedding and a file that holds both."""
    if torch.equal(weights.lm_head, weights.embedding):
        return replace(weights, lm_head=weights.embedding)
    _log.warning("weights: lm_head.weight differs from the embedding and is used, though tie_word_embeddings is true")
    return weights


def _name_unused(names: list[str]) -> None:
    if names:
        more = f" and {len(names) - _NAMED_TENSORS} more" if len(names) > _NAMED_TENSORS else ""
        shown = ", ".join(name[:80] for name in names[:_NAMED_TENSORS])
        _log.warning("weights: %d tensors of the files are not used: %s%s", len(names), shown, more)
