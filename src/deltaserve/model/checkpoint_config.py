"""What a checkpoint says of itself (config.json, GGUF metadata) -> ModelSpec."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from deltaserve.core.errors import ConfigError
from deltaserve.model.config_overrides import idle_keys, overridden, read_overrides
from deltaserve.model.fields import shown
from deltaserve.model.known_families import family_of
from deltaserve.model.model_spec import ModelSpec
from deltaserve.model.open_source import open_source
from deltaserve.model.source import TensorSource


def load_spec(model_path: Path, overrides: str | None = None) -> ModelSpec:
    """The spec of a folder or a GGUF file. Raises ConfigError, one line naming file and field, where it cannot be
    served."""
    return spec_of(open_source(model_path), overrides)


def spec_of(source: TensorSource, overrides: str | None = None) -> ModelSpec:
    """`overrides`: JSON object that replaces keys of config.json (see `overridden`). Raises ConfigError."""
    return _spec_with(source, read_overrides(overrides))


def idle_overrides(source: TensorSource, overrides: str | None) -> list[str]:
    """Keys of `overrides` that nothing reads: of a model that can be built with them. Raises ConfigError for a slip."""

    def outcome(changes: Mapping[str, Any]) -> ModelSpec | str:
        try:
            return _spec_with(source, changes)
        except ConfigError as error:
            return str(error)

    return idle_keys(read_overrides(overrides), source.config(), outcome)


def _spec_with(source: TensorSource, changes: Mapping[str, Any]) -> ModelSpec:
    fields = overridden(source.config(), changes)
    family = family_of(fields)
    spec = family.build(fields)
    ends = [(token, fields.where) for token in (*spec.eos_token_ids, *fields.token_ids("eos_token_id"))]
    generation = source.generation()
    if generation is not None:
        ends += [(token, generation.where) for token in generation.token_ids("eos_token_id")]
    for token, where in ends:
        if not 0 <= token < spec.vocab_size:
            found = shown(token)
            text = f"{where}: eos_token_id {found} is outside the vocabulary of {spec.vocab_size}"
            raise ConfigError(f"{text}; correct it, or remove it")
    ids = tuple(sorted({token for token, _ in ends}))
    return replace(spec, family=family.model_type, eos_token_ids=ids)
