"""Any JSON value in any field of any family: a spec, or one line that names the file. Never another exception."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deltaserve.core.errors import ConfigError
from deltaserve.model.checkpoint_config import load_spec
from deltaserve.model.fields import Fields
from deltaserve.model.known_families import family_of
from tests.fixtures.families import FAMILIES

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 10**400, 1.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "x", "1", "\0", "\ud800", "full_attention", "default", "a" * 5000),
    *([], [None], [True], [1, None], ["x"], [[1]], [[]], [{}], ["full_attention", ["x"]], [0] * 3000),
    *({}, {"a": 1}, {"rope_type": []}, {"rope_theta": None}, {"rope_type": "yarn", "factor": True}, {"": {"": []}}),
)
BESIDE = (
    *("attn_type_list", "clip_qkv", "eos_token_id", "layer_types", "mlp_only_layers", "no_rope_layers", "torch_dtype"),
    *("quantization_config", "rope_parameters", "rope_scaling", "rotary_dim", "sliding_window", "text_config"),
    *("num_nextn_predict_layers", "partial_rotary_factor", "sliding_window_pattern", "use_sliding_window"),
)
"""Fields that files of other models have."""


def _changed(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """With each field in turn as each of ODD; fields and items within it, too."""
    for name in (*values, *BESIDE):
        yield from ({**values, name: odd} for odd in ODD)
        inner = values.get(name)
        if isinstance(inner, dict):
            yield from ({**values, name: {**inner, key: odd}} for key in inner for odd in ODD)
        elif isinstance(inner, list) and inner:
            yield from ({**values, name: [odd, *inner[1:]]} for odd in ODD)


def _succeeds(build: Callable[[], object]) -> bool:
    try:
        build()
        return True
    except ConfigError as error:
        assert str(error).startswith(("config.json: ", "generation_config.json: "))
        assert "\n" not in str(error)
        assert len(str(error)) < 600
        return False


def _is_built(config: dict[str, Any]) -> bool:
    fields = Fields(config, "config.json")
    return _succeeds(lambda: family_of(fields).build(fields))


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_5_text", "gemma3_text_scaled", "deepseek_v3_yarn"])
def test_any_value_in_any_field(tiny_models: Path, family: str) -> None:
    given = json.loads((tiny_models / family / "config.json").read_text())
    assert _is_built(given)
    assert {_is_built(config) for config in _changed(given)} == {True, False}


@pytest.mark.parametrize("odd", ODD, ids=lambda value: repr(value)[:30])
def test_any_end_of_sequence(tiny_models: Path, tmp_path: Path, odd: Any) -> None:
    """Absent and null say nothing, whole numbers of the vocabulary are ends; all else is no end, and refused."""
    given = json.loads((tiny_models / "llama" / "config.json").read_text())
    items = odd if isinstance(odd, list) else [odd]
    is_good = odd is None or all(type(item) is int and 0 <= item < given["vocab_size"] for item in items)
    for config, generation in ((given, {"eos_token_id": odd}), ({**given, "eos_token_id": odd}, {})):
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        assert _succeeds(lambda: load_spec(tmp_path)) == is_good


_NO_IDS = (
    ("2", "is '2', expected ids of tokens such as 2"),
    (2.0, "is 2.0, expected ids of tokens such as 2"),
    (-1, "-1 is outside the vocabulary of 272"),
    (True, "is True, expected ids"),
    ([[2]], "is [[2]], expected ids"),
)


@pytest.mark.parametrize(("odd", "told"), _NO_IDS)
def test_an_end_that_is_no_id_says_what_to_do(tiny_models: Path, tmp_path: Path, odd: Any, told: str) -> None:
    given = json.loads((tiny_models / "llama" / "config.json").read_text())
    for name in ("config.json", "generation_config.json"):
        (tmp_path / "config.json").write_text(json.dumps(given))
        (tmp_path / "generation_config.json").unlink(missing_ok=True)
        fields = given if name == "config.json" else {}
        (tmp_path / name).write_text(json.dumps({**fields, "eos_token_id": odd}))
        with pytest.raises(ConfigError) as caught:
            load_spec(tmp_path)
        text = str(caught.value)
        assert text.startswith(f"{name}: eos_token_id {told}") and text.endswith("; correct it, or remove it")
