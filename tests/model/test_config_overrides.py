"""Keys of --json-model-override-args: one that counts works, a misspelt one is refused, an idle one named.

What counts is not said twice: a key counts where nonsense in its place makes another model, or none.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deltaserve.commands.doctor.model import check_model
from deltaserve.compute.weights.loader import load_weights
from deltaserve.core.errors import ConfigError
from deltaserve.launch.compose import Checkpoint
from deltaserve.model.checkpoint_config import idle_overrides, load_spec, spec_of
from deltaserve.model.layers.layer_spec import RopeKind
from deltaserve.model.open_source import open_source
from deltaserve.settings.flags.merge import load
from tests.fixtures.families import FAMILIES
from tests.layer_parts import ropes_of

OF_NO_MODEL = {
    *("attention_dropout", "bos_token_id", "initializer_range", "max_window_layers", "model_type"),
    *("output_router_logits", "pad_token_id", "pretraining_tp", "qk_head_dim", "router_aux_loss_coef"),
    *("router_jitter_noise", "transformers_version", "use_cache", "vision_config", "_sliding_window_pattern"),
    *("image_token_id", "video_token_id", "vision_end_token_id", "vision_start_token_id", "mrope_interleaved"),
    *("mrope_section",),
}
"""Keys of the tiny models' files that say nothing about how text is computed."""
NOT_AS_SET = {"qwen3": {"sliding_window"}, "qwen3_moe": {"sliding_window"}}
"""Further ones, for the file turns them off."""


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_5_text"])
def test_every_key_of_a_published_file_counts_or_is_named(tiny_models: Path, family: str) -> None:
    source = open_source(tiny_models / family)
    values = source.config().values
    known = OF_NO_MODEL | NOT_AS_SET.get(family, set())
    for name, value in {**values, **values.get("text_config", {})}.items():
        if name != "text_config":
            idle = idle_overrides(source, json.dumps({name: value}))
            assert {key.rpartition(".")[2] for key in idle} <= known, idle
            assert bool(idle) or name not in OF_NO_MODEL, name


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
IDLE: list[tuple[str, dict[str, Any], list[str]]] = [
    ("llama", {"max_position_embeddings": 77, "rope_scaling": YARN, "rope_theta": 5e5}, []),
    ("llama", {"rope_parameters": {**YARN, "rope_theta": 5e5}}, []),
    ("llama", {"architectures": ["LlamaForCausalLM"], "eos_token_id": [1, 2], "dtype": "float16"}, []),
    ("llama", {"torch_dtype": "float16"}, []),
    ("llama", {"attn_logit_softcapping": None, "no_rope_layers": None, "layer_types": None}, []),
    ("llama", {"model_type": "llama", "use_cache": False}, ["model_type", "use_cache"]),
    ("llama", {"index_topk": 4, "vision_config": {"depth": 2, "deep": {"a": 1}}}, ["index_topk", "vision_config"]),
    ("llama", {"rope_scaling": {**YARN, "mrope_section": [1], "rope_type": "linear"}}, [
        "rope_scaling.original_max_position_embeddings", "rope_scaling.mrope_section"]),
    ("llama", {"text_config": {"max_position_embeddings": 77}}, ["text_config"]),
    ("llama", {"": 1}, [""]),
    ("qwen3_moe", {"num_local_experts": 8}, []),
    ("qwen3_5", {"text_config": {"max_position_embeddings": 77}}, []),
    ("qwen3_5", {"max_position_embeddings": 77, "depth": 3}, ["depth"]),
    ("gpt_oss", {"swiglu_limit": 5.0, "swiglu_beta": [1]}, ["swiglu_beta"]),
    ("gemma3_text", {"query_pre_attn_scalar": 16, "cache_implementation": "hybrid"}, ["cache_implementation"]),
]  # fmt: skip


@pytest.mark.parametrize(("family", "changes", "idle"), IDLE, ids=str)
def test_keys_that_nothing_reads_are_named(
    tiny_models: Path, family: str, changes: dict[str, Any], idle: list[str]
) -> None:
    source = open_source(tiny_models / family)
    spec_of(source, json.dumps(changes))
    assert idle_overrides(source, json.dumps(changes)) == idle


SLIPS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"max_positon_embeddings": 77}, "max_positon_embeddings; did you mean max_position_embeddings?"),
    ("llama", {"max_position_embedding": 77}, "max_position_embedding; did you mean max_position_embeddings?"),
    ("llama", {"rope_scalling": YARN}, "rope_scalling; did you mean rope_scaling?"),
    ("llama", {"rope_theta_": 5.0}, "rope_theta_; did you mean rope_theta?"),
    ("llama", {"rope_scaling": {**YARN, "beta_fst": 3}}, "rope_scaling.beta_fst; did you mean beta_fast?"),
    ("llama", {"rope_scaling": {**YARN, "rope_typ": "x"}}, "rope_scaling.rope_typ; did you mean rope_type?"),
    ("llama", {"rope_parameters": {**YARN, "atention_factor": 1}}, "atention_factor; did you mean attention_factor?"),
    ("llama", {"architecture": ["LlamaForCausalLM"]}, "architecture; did you mean architectures?"),
    ("llama", {"eos_tokenid": 3}, "eos_tokenid; did you mean eos_token_id?"),
    ("llama", {"hidden_sze": 3}, "hidden_sze; did you mean hidden_size?"),
    ("qwen3_moe", {"num_experts_per_token": 1}, "num_experts_per_token; did you mean num_experts_per_tok?"),
    ("qwen3_5", {"max_positon_embeddings": 77}, "max_positon_embeddings; did you mean max_position_embeddings?"),
    ("qwen3_5", {"text_config": {"hidden_sze": 7}}, "text_config.hidden_sze; did you mean hidden_size?"),
    ("qwen3_5", {"text_confg": {"hidden_size": 7}}, "text_confg; did you mean text_config?"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "changes", "text"), SLIPS, ids=str)
def test_a_slip_is_refused(tiny_models: Path, family: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Checkpoint.open(str(tiny_models / family), json.dumps(changes))
    message = str(caught.value)
    assert f"--json-model-override-args: unknown key {text}" in message or f".{text}" in message
    assert "\n" not in message


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config belongs to the weights"),
    ("llama", {"architectures": ["Qwen2ForCausalLM"]}, "architecture 'Qwen2ForCausalLM' is not supported"),
    ("llama", {"architectures": "LlamaForCausalLM"}, "expected a list with one class name"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "facter": 4.0}}, "factor is missing"),
    ("qwen3_5", {"text_config": 3}, "text_config must be an object"),
]


@pytest.mark.parametrize(("family", "changes", "text"), REFUSED, ids=str)
def test_what_cannot_be_replaced(tiny_models: Path, family: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Checkpoint.open(str(tiny_models / family), json.dumps(changes))
    assert text in str(caught.value)


def test_a_class_of_another_name_is_served_as_the_one_given(tiny_models: Path, tmp_path: Path) -> None:
    """From the weights on, and with the same answers."""
    folder = tmp_path / "renamed"
    folder.mkdir()
    for file in (tiny_models / "qwen3_moe").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["OurQwenForCausalLM"]}))
    given = json.dumps({"architectures": ["Qwen3MoeForCausalLM"]})
    with pytest.raises(ConfigError, match="architecture 'OurQwenForCausalLM' is not supported"):
        Checkpoint.open(str(folder))
    assert Checkpoint.open(str(folder), given).spec == Checkpoint.open(str(tiny_models / "qwen3_moe")).spec
    ours, theirs = (
        load_weights(path, load_spec(path, overrides), torch.float32, torch.device("cpu"))
        for path, overrides in ((folder, given), (tiny_models / "qwen3_moe", None))
    )
    assert torch.equal(ours.embedding, theirs.embedding)


def test_a_text_part_is_replaced_key_by_key(tiny_models: Path) -> None:
    whole = load_spec(tiny_models / "qwen3_5")
    spec = load_spec(tiny_models / "qwen3_5", '{"text_config": {"max_position_embeddings": 77}}')
    assert (spec.max_position, spec.layers, spec.hidden_size) == (77, whole.layers, whole.hidden_size)


def test_a_key_of_both_parts_is_replaced_in_both(tiny_models: Path, tmp_path: Path) -> None:
    values = json.loads((tiny_models / "gemma3_text" / "config.json").read_text())
    text = {key: value for key, value in values.items() if key != "architectures"}
    wrapper = {"architectures": ["Gemma3ForConditionalGeneration"], "dtype": "float32", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(wrapper))
    assert load_spec(tmp_path, '{"dtype": "float16"}').dtype.value == "float16"


def test_an_override_of_a_table_per_layer_kind(tiny_models: Path) -> None:
    far, near = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}, {"rope_theta": 7.0}
    changes = json.dumps({"rope_parameters": {"full_attention": far, "sliding_attention": {**near, "x": 1}}})
    source = open_source(tiny_models / "gemma3_text")
    ropes = {*ropes_of(spec_of(source, changes))}
    assert {(rope.kind, rope.theta) for rope in ropes} == {(RopeKind.LINEAR, 5.0), (RopeKind.DEFAULT, 7.0)}
    assert idle_overrides(source, changes) == ["rope_parameters.sliding_attention.x"]


def test_the_user_is_told_once(tiny_models: Path) -> None:
    """By what opens a checkpoint: serve, a worker, a router and doctor say it."""
    folder = str(tiny_models / "llama")
    note = "--json-model-override-args: nothing here reads use_cache, a.b, so it changes nothing"
    settings = load("serve", "", [folder, "--json-model-override-args", '{"use_cache": 1, "a.b": 2}'], {}).settings
    assert [line.text for line in check_model(settings) if "reads" in line.text] == [note]
    assert Checkpoint.open(folder, '{"rope_theta": 5.0}').notes == ()
