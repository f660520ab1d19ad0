"""Streams a checkpoint into weights, tensor by tensor. Nothing in it is ever executed."""

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from deltaserve.compute.weights.block_matrix import write_rows
from deltaserve.compute.weights.packing import pack
from deltaserve.compute.weights.stored_arrays import StoredArray, stored_arrays
from deltaserve.compute.weights.targets import CodeRows, CodeTable
from deltaserve.compute.weights.weights import DecoderWeights, DraftWeights, allocate, allocate_draft
from deltaserve.core.layout.shard import Shard
from deltaserve.core.quantization import Quantization
from deltaserve.model.code_plan import CODE_RULES, draft_rules, plan_codes, shown_names, stored_kinds
from deltaserve.model.drafts.draft_algorithm import own_inventory
from deltaserve.model.formats.block_forms import BlockForm
from deltaserve.model.known_families import family_named
from deltaserve.model.model_spec import DraftSpec, ModelSpec
from deltaserve.model.open_source import open_source
from deltaserve.model.source import TensorSource
from deltaserve.model.tensors import EMBEDDING, Inventory, as_stored

_log = logging.getLogger(__name__)


class _Loaded(NamedTuple):
    """What a rank holds of one tensor, or a part of that."""

    name: str
    """Canonical name of the tensor."""
    box: tuple[slice, ...]
    """Part of the target that it fills."""
    values: Tensor


def load_weights(
    model_path: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard = Shard(),
    quantization: Quantization = "none",
) -> DecoderWeights:
    """A rank's part of every tensor exactly once, cast to `dtype`, matrices packed. `spec`: of the whole model.

    `quantization`: another than "none" only for the CPU. Raises ConfigError naming file and tensor.
    """
    rules = CODE_RULES[quantization]
    source = open_source(model_path)
    family = family_named(spec.family)
    stored = as_stored(spec, family, source.headers())
    inventory = Inventory.of(family, stored, source.index)
    codes = CodeTable(_planned(source, stored, inventory, shard) if rules.keeps_codes else {}, rules.rounds_inputs)
    weights, targets = allocate(stored, dtype, device, shard, codes)
    _fill(targets, source, inventory, shard, codes.targets)
    if spec.tied_embeddings and not stored.tied_embeddings:
        weights = _tie_equal(weights)
    layers = deque(weights.layers)
    own_draft = _draft_of_its_own(spec.draft, dtype, device, shard)
    draft = weights.draft and weights.draft.packed(rules)
    draft = draft if own_draft is None else own_draft.packed(draft_rules(rules))
    rest = replace(weights, layers=(), lm_head=pack(weights.lm_head, rules), draft=draft)
    del weights, targets, codes, own_draft  # so that a layer's plain matrices go when it is packed
    return replace(rest, layers=tuple(layers.popleft().packed(rules) for _ in range(len(layers))))


def _planned(source: TensorSource, stored: ModelSpec, inventory: Inventory, shard: Shard) -> Mapping[str, BlockForm]:
    """Which tensors stay codes, with a line about those that a rank's share cuts where no run ends."""
    tied = EMBEDDING if stored.tied_embeddings else None
    plan = plan_codes(inventory.parts, stored_kinds(source, inventory.family), shard, tied)
    if plan.uncut:
        names = shown_names(plan.uncut)
        _log.warning("weights: %d tensors are dequantised, for ranks cut them within a run: %s", len(plan.uncut), names)
    return plan.forms


def _draft_of_its_own(
    draft: DraftSpec | None, dtype: torch.dtype, device: torch.device, shard: Shard
) -> DraftWeights | None:
    """Weights of a head with a folder of its own, not packed; None: there is no such head."""
    if draft is None or draft.folder is None:
        return None
    source = open_source(Path(draft.folder))
    weights, targets = allocate_draft(draft, dtype, device, shard)
    _fill(targets, source, own_inventory(draft, source.index), shard)
    return weights


def _fill(
    targets: Mapping[str, Tensor],
    source: TensorSource,
    inventory: Inventory,
    shard: Shard,
    codes: Mapping[str, CodeRows] | None = None,
) -> None:
    """`codes`: where tensors go that are not dequantised; one of both comes twice."""
    for name, box, values in _tensors(source, inventory, shard, _CodeReader(targets, codes or {}, shard)):
        added = inventory.parts[name].added
        targets[name][box].copy_(values.float() + added if added else values)
    inventory.check_complete()
    _name_unused(inventory.unused)


@dataclass(frozen=True, slots=True)
class _CodeReader:
    """Reads tensors that stay codes into their places."""

    targets: Mapping[str, Tensor]
    codes: Mapping[str, CodeRows]
    shard: Shard

    def take(self, array: StoredArray, inventory: Inventory) -> bool:
        """Whether nothing else of it is needed."""
        canonical = inventory.family.canonical(array.header.name)
        if canonical is None or canonical not in self.codes:
            return False
        matrix, row = self.codes[canonical]
        for source, target in inventory.parts[canonical].pieces(self.shard):
            rows, columns = (*source, slice(None), slice(None))[:2]
            first = row + (target[0].start or 0 if target else 0)
            for part in array.codes(rows, columns):
                write_rows(matrix, first, part)
                first += len(part.codes)
        if canonical in self.targets:
            return False
        inventory.take(array.header)
        return True


def _tensors(source: TensorSource, inventory: Inventory, shard: Shard, reader: _CodeReader) -> Iterator[_Loaded]:
    """The tensors that the model needs; of each only what the rank holds."""
    for array in stored_arrays(source):
        canonical = None if reader.take(array, inventory) else inventory.take(array.header)
        pieces = () if canonical is None else inventory.parts[canonical].pieces(shard)
        if canonical is not None and pieces:
            read = array.boxes([piece.source for piece in pieces])
            for piece, values in zip(pieces, read, strict=True):
                yield _Loaded(canonical, piece.target, values)


def _tie_equal(weights: DecoderWeights) -> DecoderWeights:
    """Weights of a config that ties the output matrix to the embedding and a file that holds both."""
    if not isinstance(weights.lm_head, Tensor):
        return weights  # codes: the embedding's values would take more memory, not less
    if torch.equal(weights.lm_head, weights.embedding):
        return replace(weights, lm_head=weights.embedding)
    _log.warning("weights: lm_head.weight differs from the embedding and is used, though tie_word_embeddings is true")
    return weights


def _name_unused(names: list[str]) -> None:
    if names:
        _log.warning("weights: %d tensors of the files are not used: %s", len(names), shown_names(names))
