"""Streams a checkpoint into weights, tensor by tensor. Nothing in it is ever executed."""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from deltaserve.layout.shard import Shard
from deltaserve.models.checkpoint_config import family_of
from deltaserve.models.dequantised import dequantised
from deltaserve.models.gguf_arrays import Array, gguf_arrays
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


class _Loaded(NamedTuple):
    """What a rank holds of one tensor, or a part of that."""

    name: str
    """Canonical."""
    box: tuple[slice, ...]
    """Of the target that it fills."""
    values: Tensor


def load_weights(
    model_path: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device, shard: Shard = Shard()
) -> DecoderWeights:
    """A rank's part of every tensor exactly once, cast to `dtype`, matrices packed. `spec`: of the whole model.

    Raises ConfigError naming file and tensor.
    """
    source = open_source(model_path)
    family = family_of(source.config())
    stored = as_stored(spec, family, source.headers())
    inventory = Inventory.of(family, stored, source.index)
    weights, targets = allocate(stored, dtype, device, shard)
    for name, box, values in _tensors(source, inventory, shard):
        added = inventory.parts[name].added
        targets[name][box].copy_(values.float() + added if added else values)
    inventory.check_complete()
    _name_unused(inventory.unused)
    if spec.tied_embeddings and not stored.tied_embeddings:
        weights = _tie_equal(weights)
    layers = deque(weights.layers)
    rest = replace(weights, layers=(), lm_head=pack(weights.lm_head))
    del weights, targets  # so that a layer's plain matrices go when it is packed
    return replace(rest, layers=tuple(pack_layer(layers.popleft()) for _ in range(len(layers))))


def _tensors(source: Source, inventory: Inventory, shard: Shard) -> Iterator[_Loaded]:
    """What the model needs."""
    match source:
        case SafetensorsFolder():
            for file in source.shards:
                yield from _file_tensors(file, inventory, shard)
        case QuantisedFolder():
            for header, read_weight in dequantised(source):
                yield from _cut(header, read_weight, inventory, shard)
        case GgufModel():
            for header, read in gguf_arrays(source):
                yield from _cut(header, partial(_array_tensor, read), inventory, shard)


def _file_tensors(file: Path, inventory: Inventory, shard: Shard) -> Iterator[_Loaded]:
    """Of a tensor only what the rank holds is read."""
    with valid_file(file), safe_open(file, "pt") as reader:
        for name in sorted(reader.keys()):
            entry = reader.get_slice(name)
            header = TensorHeader(file.name, name, entry.get_dtype(), tuple(entry.get_shape()))
            canonical = inventory.take(header)
            if canonical is not None:
                for box, target in inventory.parts[canonical].pieces(shard):
                    yield _Loaded(canonical, target, entry[box] if box else reader.get_tensor(name))


def _array_tensor(read: Callable[[], Array]) -> Tensor:
    return torch.from_numpy(read())


def _cut(header: TensorHeader, read: Callable[[], Tensor], inventory: Inventory, shard: Shard) -> Iterator[_Loaded]:
    """Of a tensor that can only be read whole."""
    canonical = inventory.take(header)
    pieces = () if canonical is None else inventory.parts[canonical].pieces(shard)
    if canonical is not None and pieces:
        whole = read()
        for box, target in pieces:
            yield _Loaded(canonical, target, whole[box])


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
