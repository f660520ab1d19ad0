"""Which tensors a checkpoint must hold, by name and shape, and whether its files do. No torch: the launcher asks too.

Canonical names are those of the Llama files without the leading `model.`; a family's rename table leads there.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

from deltaserve.core.errors import ConfigError
from deltaserve.model.family import DRAFT_PREFIX, Family
from deltaserve.model.layers.layer_spec import LayerSpec
from deltaserve.model.model_spec import DraftSpec, HeadForm, ModelSpec
from deltaserve.model.shard_rules import REPLICATED, PaddedRows
from deltaserve.model.source import TensorHeader
from deltaserve.model.tensor_part import Entry, TensorPart, named_parts

INDEX_DTYPES = ("I64", "I32")
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
GUESSABLE = "d2t"
"""Tensor of offsets: for each token that a draft head chooses among, how far behind its own index it stands in the
model's vocabulary."""
_CENTRED = re.compile(r"((mtp\.)?norm|mtp\.pre_fc_norm_\w+|.*layernorm|.*\.[qk]_norm)\.weight")
"""Norms whose weights may be stored less 1."""


class NormNames(NamedTuple):
    """Names of a layer's norms; None: it has no such norm."""

    before_attention: str
    before_mlp: str
    after_attention: str | None = None
    after_mlp: str | None = None

    @classmethod
    def of(cls, spec: ModelSpec) -> "NormNames":
        first, second = "input_layernorm.weight", "post_attention_layernorm.weight"
        if not spec.post_norms:
            return cls(first, second)
        return cls(first, "pre_feedforward_layernorm.weight", second, "post_feedforward_layernorm.weight")


def tensor_parts(spec: ModelSpec) -> dict[str, TensorPart]:
    """Canonical name |-> tensor, for everything a checkpoint of `spec` may hold."""
    table: Entry = (spec.vocab_size, spec.hidden_size), PaddedRows()
    norm: Entry = (spec.hidden_size,), REPLICATED
    entries = {EMBEDDING: table, "norm.weight": norm}
    if not spec.tied_embeddings:
        entries[HEAD] = table
    parts = _centred(spec, named_parts(entries))
    for index, layer in enumerate(spec.layers):
        parts |= _layer_parts(spec, layer, f"layers.{index}")
    if spec.draft is not None and spec.draft.folder is None:
        parts |= draft_parts(spec.draft)
    return parts


def draft_parts(draft: DraftSpec) -> dict[str, TensorPart]:
    """Parts that a draft head has of its own."""
    names, layer = draft.names, draft.layer
    hidden, num_guessable = layer.hidden_size, draft.num_guessable or layer.vocab_size
    num_merged = 2 * hidden if draft.form is HeadForm.MERGED else len(draft.read_layers) * draft.read_size
    norms = (names.hidden_norm, names.norm, names.embedding_norm)
    entries: dict[str, Entry] = {f"{name}.weight": ((hidden,), REPLICATED) for name in norms if name is not None}
    entries[f"{names.merge}.weight"] = (hidden, num_merged), REPLICATED
    if draft.own_embedding:
        entries[EMBEDDING] = (layer.vocab_size, hidden), PaddedRows()
    if draft.folder is not None:
        entries[HEAD] = (num_guessable, hidden), PaddedRows()
    parts = _centred(layer, named_parts(entries)) | _layer_parts(layer, layer.layers[0], names.layer)
    if draft.num_guessable is not None:
        parts[GUESSABLE] = TensorPart((num_guessable,), (GUESSABLE,), dtypes=INDEX_DTYPES)
    return parts


def _layer_parts(spec: ModelSpec, layer: LayerSpec, prefix: str) -> dict[str, TensorPart]:
    norm: Entry = (spec.hidden_size,), REPLICATED
    norms = {name: norm for name in NormNames.of(spec) if name is not None}
    return _centred(spec, named_parts(norms, prefix) | layer.parts(spec.hidden_size, prefix))


def _centred(spec: ModelSpec, parts: dict[str, TensorPart]) -> dict[str, TensorPart]:
    """The parts with what files leave out of the weights of norms."""
    if not spec.zero_centred_norms:
        return parts
    return {name: replace(part, added=float(bool(_CENTRED.fullmatch(name)))) for name, part in parts.items()}


@dataclass(slots=True)
class Inventory:
    """Books which tensors were found. Each is found once; none is missing."""

    family: Family
    parts: Mapping[str, TensorPart]
    index: Mapping[str, str]
    """Tensor |-> file, as the folder's index says; empty without one."""
    num_values: int = 0
    """Elements of all tensors taken."""
    may_be_unused: tuple[str, ...] = ()
    """What the names of tensors begin with that files may hold beside `parts`."""
    unused: list[str] = field(default_factory=list)
    """Tensors of the files that the model does not need."""
    _found: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, family: Family, spec: ModelSpec, index: Mapping[str, str]) -> "Inventory":
        """Nothing found yet. `spec` is `as_stored`."""
        drafts = range(spec.num_layers, spec.num_layers + spec.num_draft_layers)
        unused = (DRAFT_PREFIX, *(f"layers.{layer}." for layer in drafts))
        return cls(family, tensor_parts(spec), index, may_be_unused=unused)

    def take(self, header: TensorHeader) -> str | None:
        """The canonical name of a file's tensor, None for one to skip. Raises ConfigError naming file and tensor."""
        shown = f"{header.file}: {header.name[:80]}"
        told = self.index.get(header.name, "nothing")
        if self.index and told != header.file:
            raise ConfigError(f"{shown} is in this file, but the index says {told[:80]}")
        canonical = self.family.canonical(header.name)
        part = None if canonical is None else self.parts.get(canonical)
        if canonical is None or (part is None and canonical.startswith(self.may_be_unused)):
            self.unused.append(header.name)
            return None
        if part is None:
            raise ConfigError(f"{shown} is not a tensor of this model")
        if header.dtype not in part.dtypes:
            raise ConfigError(f"{shown} has dtype {header.dtype}, expected one of {', '.join(part.dtypes)}")
        if not self._found.isdisjoint(part.covers):
            raise ConfigError(f"{shown} is given twice")
        if header.shape != part.shape:
            raise ConfigError(f"{shown} has shape {list(header.shape)}, expected {list(part.shape)}")
        self._found.update(part.covers)
        self.num_values += prod(header.shape)
        return canonical

    def check_complete(self) -> None:
        """Raises ConfigError unless everything was found."""
        missing = sorted({name for part in self.parts.values() for name in part.covers} - self._found)
        if missing:
            raise ConfigError(f"weights: {len(missing)} tensors are missing, first {missing[0]}")


def as_stored(spec: ModelSpec, family: Family, headers: Iterable[TensorHeader]) -> ModelSpec:
    """`spec`, untied where the files hold an output matrix of their own: it may differ from the embedding.

    transformers uses it then, whatever `tie_word_embeddings` says.
    """
    if not spec.tied_embeddings:
        return spec
    has_head = any(family.canonical(header.name) == HEAD for header in headers)
    return replace(spec, tied_embeddings=not has_head)


def check_weights(headers: Iterable[TensorHeader], inventory: Inventory) -> None:
    """Against what the model needs; no weight is read. Raises ConfigError."""
    for header in headers:
        inventory.take(header)
    inventory.check_complete()
