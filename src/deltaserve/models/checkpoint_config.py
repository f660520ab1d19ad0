"""What a checkpoint says of itself (config.json, GGUF metadata) -> Family and ModelSpec."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deltaserve.base.errors import ConfigError
from deltaserve.models.deepseek_v3 import DEEPSEEK_V3
from deltaserve.models.eagle3 import eagle3_head
from deltaserve.models.family import Family, draft_head
from deltaserve.models.fields import Fields, shown
from deltaserve.models.gemma3 import GEMMA3, GEMMA3_WRAPPED
from deltaserve.models.gpt_oss import GPT_OSS
from deltaserve.models.llama import LLAMA
from deltaserve.models.minimax_m2 import MINIMAX_M2
from deltaserve.models.model_spec import ModelSpec
from deltaserve.models.open_source import open_source
from deltaserve.models.qwen3 import QWEN3
from deltaserve.models.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT
from deltaserve.models.qwen3_moe import QWEN3_MOE
from deltaserve.models.qwen3_next import QWEN3_NEXT
from deltaserve.models.source import TensorSource

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    QWEN3,
    QWEN3_MOE,
    MINIMAX_M2,
    DEEPSEEK_V3,
    GEMMA3,
    GEMMA3_WRAPPED,
    GPT_OSS,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_TEXT,
    QWEN3_5_MOE,
    QWEN3_5_MOE_TEXT,
)


@dataclass(frozen=True, slots=True)
class HeadFrom:
    """Where the weights of a draft head are."""

    folder: Path | None
    """None: among the model's own."""


def load_spec(model_path: Path, overrides: str | None = None, head: HeadFrom | None = None) -> ModelSpec:
    """Of a folder or a GGUF file. Raises ConfigError, one line naming file and field, where it cannot be served."""
    return with_draft(spec_of(open_source(model_path), overrides), model_path, head)


def spec_of(source: TensorSource, overrides: str | None = None) -> ModelSpec:
    """`overrides`: JSON object that replaces keys of config.json (see `_override`). Raises ConfigError."""
    fields = _override(source.config(), overrides)
    spec = family_of(fields).build(fields)
    ends = [(token, fields.where) for token in (*spec.eos_token_ids, *fields.integers("eos_token_id"))]
    generation = source.generation()
    if generation is not None:
        ends += [(token, generation.where) for token in generation.integers("eos_token_id")]
    for token, where in ends:
        if not 0 <= token < spec.vocab_size:
            found = shown(token)
            raise ConfigError(f"{where}: eos_token_id {found} is outside the vocabulary of {spec.vocab_size}")
    return replace(spec, eos_token_ids=tuple(sorted({token for token, _ in ends})))


def with_draft(spec: ModelSpec, model_path: Path, head: HeadFrom | None) -> ModelSpec:
    """The model with a head that drafts tokens: the one among its own weights (MTP), or an EAGLE-3 head in a folder.

    Raises ConfigError where there is none, or it is not one for this model. Its tensors are asked for when weights are.
    """
    if head is None:
        return spec
    if head.folder is not None:
        return replace(spec, draft=eagle3_head(head.folder, spec))
    fields = open_source(model_path).config()
    family = family_of(fields)
    if family.draft is None:
        raise ConfigError(f"{fields.where}: models of {family.model_type} bring no head that drafts tokens (MTP)")
    return replace(spec, draft=draft_head(spec, family.draft(spec)))


_NESTED = "text_config"


def _override(fields: Fields, overrides: str | None) -> Fields:
    """A key is replaced whole: of config.json, or of its `text_config` where that alone has it."""
    if not overrides:
        return fields
    try:
        changes = json.loads(overrides, parse_constant=_no_number)
    except (ValueError, RecursionError):
        changes = None
    if not isinstance(changes, dict):
        raise ConfigError(f"--json-model-override-args {overrides[:80]!r}: must be a JSON object")
    for name in ("architectures", "model_type"):
        if name in changes:
            raise ConfigError(f"--json-model-override-args: {name} belongs to the weights and cannot be replaced")
    values, nested = {**fields.values}, fields.values.get(_NESTED)
    if isinstance(nested, dict):  # what the wrapper of a text model does not have is meant for that
        inner = {name: changes.pop(name) for name in list(changes) if name not in values}
        values[_NESTED] = _into_table(inner, nested | inner)
    return Fields(_into_table(changes, values | changes), fields.where)


def _no_number(name: str) -> None:
    """NaN and the infinities are no JSON, and no setting of a model."""
    raise ValueError(name)


_IN_TABLE = ("rope_theta", "partial_rotary_factor", "rope_scaling", "rope_local_base_freq")
"""Older names of what `rope_parameters` holds, which wins where a file has both."""


def _into_table(changes: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """`values`, the changes among them, with those by an older name in `rope_parameters`, too, where that is there."""
    table = values.get("rope_parameters")
    given = {name: changes[name] for name in _IN_TABLE if name in changes}
    if not given or not isinstance(table, dict) or not table:
        return values
    scaling = given.pop("rope_scaling", table)
    per_layer = any(isinstance(value, dict) for value in table.values())
    if per_layer or "rope_parameters" in changes or "rope_local_base_freq" in given or not isinstance(scaling, dict):
        name = next(name for name in _IN_TABLE if name in changes)
        whole = json.dumps({"rope_parameters": table})[:200]
        raise ConfigError(
            f"--json-model-override-args: {name} has no effect beside rope_parameters; replace that whole, now {whole}"
        )
    kept = {name: table[name] for name in ("rope_theta", "partial_rotary_factor") if name in table}
    return {**values, "rope_parameters": {**kept, **scaling, **given}}


def load_family(model_path: Path) -> Family:
    return family_of(open_source(model_path).config())


def family_of(fields: Fields) -> Family:
    """By the class named in `architectures`; nothing is guessed from other fields."""
    names = fields.values.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise fields.error("architectures", "a list with one class name")
    for family in FAMILIES:
        if family.architecture == names[0]:
            return family
    supported = ", ".join(dict.fromkeys(family.architecture.partition("For")[0] for family in FAMILIES))
    raise ConfigError(f"{fields.where}: architecture {names[0][:80]!r} is not supported; supported: {supported}")
