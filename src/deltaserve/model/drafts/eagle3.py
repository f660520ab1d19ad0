"""EAGLE-3: a draft head with a folder and a configuration of its own. It reads what enters three layers of its model,
chooses among a part of the vocabulary, and may bring an embedding.

Names and fields as published heads have them, and as vLLM and SGLang read them (llama_eagle3.py of both).
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from deltaserve.core.errors import ConfigError
from deltaserve.model.drafts.draft_algorithm import DraftAlgorithm, HeadFolder
from deltaserve.model.family import MAX_HIDDEN, MAX_VOCAB, Family, Rename, decoder_spec, dense_mlp, gqa_spec
from deltaserve.model.fields import Fields
from deltaserve.model.fingerprint import model_fingerprint
from deltaserve.model.layers.gqa import QkNorm
from deltaserve.model.layers.layer_spec import LayerSpec
from deltaserve.model.model_spec import DraftNames, DraftSpec, HeadForm, ModelSpec
from deltaserve.model.open_source import open_source
from deltaserve.model.tensors import EMBEDDING, GUESSABLE, Inventory, draft_parts

_NAMES = DraftNames("midlayer", "fc", hidden_norm="midlayer.hidden_norm", norm="norm")
_NUM_READ = 3
_READ_LAYERS = "eagle_aux_hidden_state_layer_ids"
_FROM_TARGETS = "t2d"
"""Tensor that tells, for each token of the vocabulary, whether the head chooses it; GUESSABLE tells it too."""


def _build(fields: Fields) -> ModelSpec:
    fields.integer("num_hidden_layers", 1, 1)
    if fields.flag("norm_before_residual", False):
        raise fields.error("norm_before_residual", "false")
    attention = replace(gqa_spec(fields, QkNorm.NONE), num_inputs=2)
    return decoder_spec(fields, "eagle3", [LayerSpec(attention, dense_mlp(fields))])


_EAGLE3 = Family(
    "eagle3",
    "LlamaForCausalLMEagle3",
    _build,
    (
        Rename(re.compile(r"(?:model\.)?(?:midlayer|layers\.0)\.(.*)"), r"midlayer.\1"),
        Rename(re.compile(r"model\.(.*)"), r"\1"),
    ),
)


def eagle3_head(model: ModelSpec, model_path: Path, folder: Path | None) -> DraftSpec:
    """Raises ConfigError where the folder holds none, or one that is not for this model."""
    assert folder is not None  # settings/rules.py
    try:
        return _read(folder, model)
    except (ConfigError, OSError) as error:
        raise ConfigError(f"draft model {folder.name}: {error}") from None


def eagle3_inventory(draft: DraftSpec, index: Mapping[str, str]) -> Inventory:
    """Inventory of the head's tensors, with nothing found yet."""
    return Inventory(_EAGLE3, draft_parts(draft), index, may_be_unused=(_FROM_TARGETS, GUESSABLE))


def _read(folder: Path, model: ModelSpec) -> DraftSpec:
    source = open_source(folder)
    fields = source.config()
    names = fields.values.get("architectures")
    if names != [_EAGLE3.architecture]:
        raise fields.error("architectures", f"[{_EAGLE3.architecture}]")
    layer = _EAGLE3.build(fields)
    if layer.vocab_size != model.vocab_size:
        raise fields.error("vocab_size", f"the model's {model.vocab_size}")
    read_size = fields.integer("target_hidden_size", 1, MAX_HIDDEN, default=layer.hidden_size)
    if read_size != model.hidden_size:
        name = "target_hidden_size" if fields.has("target_hidden_size") else "hidden_size"
        raise fields.error(name, f"the model's {model.hidden_size}")
    own_embedding = any(_EAGLE3.canonical(header.name) == EMBEDDING for header in source.headers())
    if not own_embedding and layer.hidden_size != model.hidden_size:
        raise fields.error("hidden_size", f"the model's {model.hidden_size} where the head has no embedding of its own")
    num_guessable = fields.integer("draft_vocab_size", 1, MAX_VOCAB, default=layer.vocab_size)
    return DraftSpec(
        algorithm="EAGLE3",
        form=HeadForm.SIDE_BY_SIDE,
        layer=layer,
        names=_NAMES,
        read_layers=_read_layers(fields, model.num_layers),
        read_size=read_size,
        num_guessable=None if num_guessable == layer.vocab_size else num_guessable,
        own_embedding=own_embedding,
        group=f"draft-{model_fingerprint(folder)[:16]}",
        folder=str(folder),
    )


def _read_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """SGLang's form (within `eagle_config`) names the layers whose outputs are read, vLLM's those that they enter."""
    nested = fields.table("eagle_config")
    if not nested.flag("use_aux_hidden_state", True):
        raise nested.error("use_aux_hidden_state", "true")
    holder = nested if nested.has(_READ_LAYERS) else fields
    named = holder.integers(_READ_LAYERS)
    layers = tuple(layer + 1 for layer in named) if holder is nested else named
    layers = tuple(sorted(layers or (2, num_layers // 2, num_layers - 3)))
    if len(set(layers)) != _NUM_READ or not all(0 <= layer < num_layers for layer in layers):
        found = ", ".join(map(str, layers))
        raise ConfigError(
            f"{holder.where}: {_READ_LAYERS}: the head would read what enters layers {found}, "
            f"expected {_NUM_READ} of the model's {num_layers}"
        )
    return layers


ALGORITHM = DraftAlgorithm(folder=HeadFolder.REQUIRED, head=eagle3_head, inventory=eagle3_inventory)
