"""Weights of a model on one rank, and where a checkpoint's tensors go in them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltaserve.compute.layers.layer_kind import MixerWeights, MlpWeights
from deltaserve.compute.weights.block_matrix import Matrix
from deltaserve.compute.weights.packing import pack
from deltaserve.compute.weights.targets import CodeTable, Linear, TargetTable
from deltaserve.core.branches import LAYERS
from deltaserve.core.files.branch_code import load_branch
from deltaserve.core.layout.shard import Shard
from deltaserve.model.code_plan import CODE_RULES, CodeRules
from deltaserve.model.layers.layer_spec import LayerSpec
from deltaserve.model.model_spec import DraftSpec, ModelSpec
from deltaserve.model.tensors import EMBEDDING, GUESSABLE, HEAD, NormNames, draft_parts, tensor_parts


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: Tensor  # [hidden]
    attention: MixerWeights
    mlp_norm: Tensor  # [hidden]
    mlp: MlpWeights
    after_attention: Tensor | None = None  # [hidden], norm of what is added to the residual stream
    after_mlp: Tensor | None = None  # [hidden]

    def packed(self, rules: CodeRules = CODE_RULES["none"]) -> "LayerWeights":
        """All matrices laid out for products, but those of which there is one per head."""
        return replace(self, attention=self.attention.packed(rules), mlp=self.mlp.packed(rules))


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """Weights of a draft head; what is None here is the model's."""

    merge: Linear  # [hidden, 2 hidden] of embedding and hidden state, or [hidden, layers read * their size]
    embedding_norm: Tensor | None  # [hidden]; None: the layer's first norm
    hidden_norm: Tensor  # [hidden]
    layer: LayerWeights
    norm: Tensor  # [hidden]
    embedding: Tensor | None = None  # [V, hidden]
    lm_head: Matrix | None = None  # [tokens it chooses among, hidden]
    guessable: Tensor | None = None  # [the same] int64: how far behind its index each stands in the vocabulary

    def packed(self, rules: CodeRules = CODE_RULES["none"]) -> "DraftWeights":
        lm_head = None if self.lm_head is None else pack(self.lm_head, rules)
        return replace(self, layer=self.layer.packed(rules), merge=self.merge.packed(rules), lm_head=lm_head)


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Tensor  # [V, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    lm_head: Matrix  # [V, hidden]; the embedding itself when tied and not packed
    draft: DraftWeights | None = None


def allocate(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard = Shard(),
    codes: CodeTable | None = None,
) -> tuple[DecoderWeights, dict[str, Tensor]]:
    """Uninitialised weights of one rank of the model `spec`, and canonical name |-> where what is held of it goes.

    `codes`: what is to be kept as codes; it is told the same of that. A tied embedding has values, too.
    """
    table = TargetTable(tensor_parts(spec), shard, dtype, device, codes=codes or CodeTable())
    local = spec.local(shard)
    embedding = table.whole(EMBEDDING)
    layers = tuple(_layer(table, local, layer, f"layers.{index}") for index, layer in enumerate(local.layers))
    norm = table.whole("norm.weight")
    if not spec.tied_embeddings:
        head = table.matrix(HEAD)
    else:
        head = table.matrix(EMBEDDING) if EMBEDDING in table.codes.forms else embedding
    draft = None if local.draft is None or local.draft.folder is not None else _draft(table, local.draft)
    return DecoderWeights(embedding, layers, norm, head, draft), table.targets


def allocate_draft(
    draft: DraftSpec, dtype: torch.dtype, device: torch.device, shard: Shard = Shard()
) -> tuple[DraftWeights, dict[str, Tensor]]:
    """Allocate weights of a draft head that has a folder of its own."""
    table = TargetTable(draft_parts(draft), shard, dtype, device)
    return _draft(table, draft.local(shard)), table.targets


def _draft(table: TargetTable, draft: DraftSpec) -> DraftWeights:
    names = draft.names
    indexes = replace(table, dtype=torch.int64)
    return DraftWeights(
        merge=Linear(table.whole(f"{names.merge}.weight"), None),
        embedding_norm=None if names.embedding_norm is None else table.whole(f"{names.embedding_norm}.weight"),
        hidden_norm=table.whole(f"{names.hidden_norm}.weight"),
        layer=_layer(table, draft.layer, draft.layer.layers[0], names.layer),
        norm=table.whole(f"{names.norm}.weight"),
        embedding=table.whole(EMBEDDING) if draft.own_embedding else None,
        lm_head=None if draft.folder is None else table.whole(HEAD),
        guessable=None if draft.num_guessable is None else indexes.whole(GUESSABLE),
    )


def _layer(table: TargetTable, spec: ModelSpec, layer: LayerSpec, prefix: str) -> LayerWeights:
    norms = [None if name is None else table.whole(f"{prefix}.{name}") for name in NormNames.of(spec)]
    attention_norm, mlp_norm, after_attention, after_mlp = norms
    assert attention_norm is not None
    assert mlp_norm is not None
    mixer, mlp = (load_branch(LAYERS[part.kind]).allocate(table, part, prefix) for part in layer)
    return LayerWeights(attention_norm, mixer, mlp_norm, mlp, after_attention, after_mlp)
