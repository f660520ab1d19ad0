"""`--json-model-override-args`: a JSON object that replaces keys of config.json, and which of its keys say nothing."""

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deltaserve.core.errors import ConfigError
from deltaserve.model.fields import Fields

FLAG = "--json-model-override-args"
_NESTED = "text_config"
_OF_WEIGHTS = ("quantization_config", "compression_config")
_IN_TABLE = ("rope_theta", "partial_rotary_factor", "rope_scaling", "rope_local_base_freq")
"""Older names of what `rope_parameters` holds, which wins where a file has both."""
_NEWER = {"torch_dtype": "dtype", "num_local_experts": "num_experts", "num_mtp_layers": "num_nextn_predict_layers"}
"""Key |-> the one that wins where a file has both."""


def read_overrides(text: str | None) -> dict[str, Any]:
    """Empty without one. Raises ConfigError."""
    if not text:
        return {}
    try:
        changes = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        changes = None
    if not isinstance(changes, dict):
        raise ConfigError(f"{FLAG} {text[:80]!r}: must be a JSON object")
    for name in _OF_WEIGHTS:
        if name in changes:
            raise ConfigError(f"{FLAG}: {name} belongs to the weights and cannot be replaced")
    return changes


def _no_number(name: str) -> None:
    """NaN and the infinities are no JSON, and no setting of a model."""
    raise ValueError(name)


def overridden(fields: Fields, changes: Mapping[str, Any]) -> Fields:
    """The fields with each key replaced whole, but `text_config` key by key. A key that the text part of a multimodal
    file has, or that the file has nowhere, is replaced there. Raises ConfigError."""
    if not changes:
        return fields
    values, nested, where = dict(fields.values), fields.values.get(_NESTED), f"{fields.where} with {FLAG}"
    if not isinstance(nested, dict):
        return Fields(_changed(values, changes), where)
    inner = {name: value for name, value in changes.items() if name in nested or name not in values}
    outer = {name: value for name, value in changes.items() if name in values}
    text = outer.pop(_NESTED, {})
    if not isinstance(text, dict):
        raise ConfigError(f"{FLAG}: {_NESTED} must be an object")
    return Fields({**_changed(values, outer), _NESTED: _changed(nested, {**inner, **text})}, where)


def _changed(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    named = {
        newer if newer in values and newer not in changes else name: value for name, newer, value in _aged(changes)
    }
    return _into_table(named, {**values, **named})


def _aged(changes: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    return ((name, _NEWER.get(name, name), value) for name, value in changes.items())


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
        raise ConfigError(f"{FLAG}: {name} has no effect beside rope_parameters; replace that whole, now {whole}")
    kept = {name: table[name] for name in ("rope_theta", "partial_rotary_factor") if name in table}
    return {**values, "rope_parameters": {**kept, **scaling, **given}}


# ---------------------------------------------------------------- keys that say nothing

_Path = tuple[str, ...]
_NONSENSE: tuple[Any, ...] = ("\0", ["\0"])
"""Values that no key may have: what reads one gives something else, or an error, than without the key."""
_OFTEN_SILENT = """
architectures attention_bias dtype eos_token_id head_dim hidden_act layer_types max_position_embeddings mlp_bias
norm_topk_prob num_experts num_experts_per_tok num_key_value_heads num_local_experts partial_rotary_factor
rms_norm_eps rope_parameters rope_scaling rope_theta rotary_dim sliding_window sliding_window_pattern text_config
tie_word_embeddings torch_dtype use_sliding_window vocab_size

attention_factor beta_fast beta_slow factor high_freq_factor low_freq_factor mscale mscale_all_dim
original_max_position_embeddings rope_type truncate type full_attention sliding_attention
"""
"""Keys that files may leave out, and those in tables of the rotary embedding: what a misspelt one may have meant."""
_LIKENESS = 0.9
"""Least likeness of a misspelt key: one wrong letter in a short name. Less alike are keys of other models."""


Outcome = Callable[[Mapping[str, Any]], object]
"""What changes come to, an error among it."""


def idle_keys(changes: Mapping[str, Any], fields: Fields, outcome: Outcome) -> list[str]:
    """Keys, as `rope_scaling.factor`, with which the model is as without them, whatever their values.

    Raises ConfigError for one that is a slip of a key that counts.
    """
    paths = [path for name, value in changes.items() for path in _idle_below((name,), value, changes, outcome)]
    for idle in [*paths, *(below for path in paths for below in _below(path, changes))]:
        meant = _meant(idle, changes, fields, outcome)
        if meant is not None:
            raise ConfigError(f"{FLAG}: unknown key {'.'.join(idle)[:80]}; did you mean {meant}?")
    return [".".join(path) for path in paths]


def _idle_below(path: _Path, value: object, changes: Mapping[str, Any], outcome: Outcome) -> list[_Path]:
    """`path` itself where nothing below it counts."""
    if not isinstance(value, dict) or not value:
        return [] if _counts(path, changes, outcome) else [path]
    below = [found for name, inner in value.items() for found in _idle_below((*path, name), inner, changes, outcome)]
    children = [(*path, name) for name in value]
    return [path] if below == children else below


def _below(path: _Path, changes: Mapping[str, Any]) -> Iterator[_Path]:
    value: object = changes
    for name in path:
        value = value[name] if isinstance(value, dict) else None
    for name in value if isinstance(value, dict) else ():
        yield from ((*path, name), *_below((*path, name), changes))


def _counts(path: _Path, changes: Mapping[str, Any], outcome: Outcome) -> bool:
    without = outcome(_without(changes, path))
    return any(outcome(_replaced(changes, path, value)) != without for value in _NONSENSE)


def _meant(path: _Path, changes: Mapping[str, Any], fields: Fields, outcome: Outcome) -> str | None:
    """The name in place of the last of `path` that is like it and counts; None: a key of the file, or of another
    model."""
    *above, name = path
    known = _names(fields.values)
    if name in known:
        return None
    rest, likeness = _without(changes, path), min(_LIKENESS, 1 - 1 / max(len(name), 2))
    for like in difflib.get_close_matches(name[:80], [*known, *_OFTEN_SILENT.split()], n=3, cutoff=likeness):
        if _counts((*above, like), _replaced(rest, (*above, like), None), outcome):
            return like
    return None


def _names(values: Mapping[str, Any]) -> set[str]:
    """Names of the keys of all levels."""
    tables = [value for value in values.values() if isinstance(value, dict)]
    return {*values, *(name for table in tables for name in _names(table))}


def _without(changes: Mapping[str, Any], path: _Path) -> dict[str, Any]:
    name, *rest = path
    if not rest:
        return {key: value for key, value in changes.items() if key != name}
    return {**changes, name: _without(changes[name], tuple(rest))}


def _replaced(changes: Mapping[str, Any], path: _Path, value: object) -> dict[str, Any]:
    name, *rest = path
    return {**changes, name: _replaced(changes[name], tuple(rest), value) if rest else value}
