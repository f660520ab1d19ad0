"""A config.json that is silent about a field means what transformers assumes, or is refused: never anything else."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from deltaserve.core.errors import ConfigError
from deltaserve.model.fields import Fields
from deltaserve.model.known_families import family_of
from deltaserve.model.model_spec import ModelSpec
from tests.fixtures.families import FAMILIES as SERVED
from tests.fixtures.tiny_models import VARIANTS
from tests.layer_parts import mla_of, moe_of

FAMILIES = (*SERVED, "qwen3_5_text")
assert set(FAMILIES) <= set(VARIANTS)
MEANS_NOTHING = {"dtype", "eos_token_id"}
"""transformers names no type of weights that a file does not; ends of answers are looked for in other files, too."""


def _built(values: dict[str, Any]) -> Any:
    """The spec, or None where it is refused."""
    fields = Fields(values, "config.json")
    try:
        return family_of(fields).build(fields)
    except ConfigError:
        return None


def _filled(values: dict[str, Any]) -> dict[str, Any]:
    """As transformers understands them."""
    kind = {**values}
    config = transformers.AutoConfig.for_model(kind.pop("model_type"), **kind)
    return {**json.loads(config.to_json_string(use_diff=False)), "architectures": values["architectures"]}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_silent_field_is_what_transformers_assumes(tiny_models: Path, family: str) -> None:
    given = json.loads((tiny_models / family / "config.json").read_text())
    nested = given.get("text_config")
    names = [name for name in nested or given if name not in ("architectures", "model_type", *MEANS_NOTHING)]
    assert _built(given) == _built(_filled(given))
    wrong = {}
    for name in names:
        values = {key: value for key, value in (nested or given).items() if key != name}
        sparse = {**given, "text_config": values} if nested else values
        ours = _built(sparse)
        if ours is not None:
            theirs = _built(_filled(sparse))
            if ours != theirs:
                wrong[name] = (ours, theirs)
    assert not wrong, {name: _difference(*pair) for name, pair in wrong.items()}


def _difference(ours: Any, theirs: Any) -> dict[str, Any]:
    if theirs is None:
        return {"theirs": "refused"}
    return {
        name: (getattr(ours, name), getattr(theirs, name))
        for name in ours.__slots__
        if getattr(ours, name) != getattr(theirs, name)
    }


NULLS: list[tuple[str, str, Callable[[ModelSpec], object], Any]] = [
    (
        "qwen3",
        "head_dim",
        lambda spec: spec.head_dim,
        8,
    ),  # hidden_size 64 by 8 heads, as vLLM; transformers cannot build it
    ("minimax_m2", "head_dim", lambda spec: spec.head_dim, 8),
    ("qwen3_5_text", "head_dim", lambda spec: spec.head_dim, 8),
    ("qwen3", "num_key_value_heads", lambda spec: spec.num_kv_heads, 8),
    ("deepseek_v3", "n_group", lambda spec: moe_of(spec).num_groups, 1),
    ("deepseek_v3", "topk_group", lambda spec: moe_of(spec).kept_groups, 2),
    ("deepseek_v3", "n_shared_experts", lambda spec: moe_of(spec).shared_size, 0),
    ("deepseek_v3", "routed_scaling_factor", lambda spec: moe_of(spec).scale, 1.0),
    ("deepseek_v3", "q_lora_rank", lambda spec: mla_of(spec).q_rank, None),
]


@pytest.mark.parametrize(("family", "field", "found", "value"), NULLS)
def test_null_is_no_silence(
    tiny_models: Path, family: str, field: str, found: Callable[[ModelSpec], object], value: object
) -> None:
    """It says that there is none: what follows from the other fields counts, not the family's default."""
    given = json.loads((tiny_models / family / "config.json").read_text())
    built = _built({**given, field: None})
    assert built is not None
    assert found(built) == value
