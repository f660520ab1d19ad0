"""config.json -> ModelSpec, and the one line a bad folder gets."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from deltaserve.compute.layers.rope import inverse_frequencies
from deltaserve.core.errors import ConfigError
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.kv import pool_page_bytes
from deltaserve.core.layout.spec import PageGroup
from deltaserve.model.checkpoint_config import load_spec
from deltaserve.model.fields import Fields
from deltaserve.model.layers.gqa import QkNorm
from deltaserve.model.layers.layer_spec import Activation, RopeKind
from deltaserve.model.layers.moe import ClampedGlu, RouterKind
from deltaserve.model.model_spec import ModelSpec
from deltaserve.model.rope_fields import rope_spec
from tests.layer_parts import dense_of, gqa_of, have_experts, mla_of, moe_of, ropes_of, windows_of

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}


def _minimax(**changes: Any) -> dict[str, Any]:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    return {"architectures": ["MiniMaxM2ForCausalLM"], "head_dim": 16, **experts, **changes}


def _yarn(**changes: object) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0} | changes}


def _deepseek(**changes: Any) -> dict[str, Any]:
    latents = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
    choice = {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
    return {"architectures": ["DeepseekV3ForCausalLM"], **latents, **experts, **choice, **changes}


def spec_of(folder: Path, **changes: Any) -> ModelSpec:
    values = {key: value for key, value in {**BASE, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(values))
    return load_spec(folder)


def test_llama(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, eos_token_id=[7, 9], rope_theta=5e5)
    assert (spec.family, spec.dtype, gqa_of(spec).qk_norm) == ("llama", DType.BFLOAT16, QkNorm.NONE)
    assert (spec.head_dim, spec.num_heads, spec.num_kv_heads) == (16, 4, 2)
    assert (spec.attention.rope.kind, spec.attention.rope.theta, spec.eos_token_ids) == (RopeKind.DEFAULT, 5e5, (7, 9))
    assert (spec.tied_embeddings, spec.num_experts) == (False, 0)


def test_defaults_and_older_names(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, num_key_value_heads=..., dtype=..., torch_dtype="float16", head_dim=32)
    assert (spec.num_kv_heads, spec.dtype, spec.head_dim) == (4, DType.FLOAT16, 32)
    assert spec_of(tmp_path, dtype=...).dtype is DType.FLOAT32


def test_head_dim_that_the_file_does_not_name_is_what_transformers_assumes(tmp_path: Path) -> None:
    assert spec_of(tmp_path, architectures=["Qwen3ForCausalLM"]).head_dim == transformers.Qwen3Config().head_dim
    assert spec_of(tmp_path, architectures=["LlamaForCausalLM"]).head_dim == 16


def test_qwen3_moe(tmp_path: Path) -> None:
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    sparse = {"decoder_sparse_step": 2, "mlp_only_layers": [3], "num_hidden_layers": 6}
    spec = spec_of(tmp_path, architectures=["Qwen3MoeForCausalLM"], **moe, **sparse)
    assert (moe_of(spec).num_experts, moe_of(spec).experts_per_token, moe_of(spec).renormalise) == (8, 2, True)
    assert have_experts(spec) == [False, True, False, False, False, True]
    assert gqa_of(spec).qk_norm is QkNorm.HEAD


def test_minimax_m2(tmp_path: Path) -> None:
    """`rotary_dim`: the published files' name of what transformers calls partial_rotary_factor."""
    spec = spec_of(tmp_path, **_minimax(rotary_dim=8, num_mtp_modules=3, sliding_window=None))
    assert (gqa_of(spec).qk_norm, spec.attention.rope.dim, spec.head_dim) == (QkNorm.ALL, 8, 16)
    assert (moe_of(spec).router, moe_of(spec).intermediate_size) == (RouterKind.SIGMOID, 128)
    assert have_experts(spec) == [True, True]
    assert spec.num_draft_layers == 3
    assert spec_of(tmp_path, **_minimax(partial_rotary_factor=0.5, num_mtp_modules=3)) == spec


def test_deepseek_v3(tmp_path: Path) -> None:
    """The fields of the published config, with its yarn."""
    yarn = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    yarn |= {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    groups = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}
    spec = spec_of(tmp_path, **_deepseek(rope_scaling=yarn, num_nextn_predict_layers=1, **groups))
    assert (spec.attention.rope.kind, spec.attention.rope.dim, spec.attention.rope.attention_factor) == (
        RopeKind.YARN,
        8,
        1.0,
    )
    assert spec.attention.softmax_scale == pytest.approx(24**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert have_experts(spec) == [False, True]
    assert (moe_of(spec).num_groups, moe_of(spec).kept_groups, moe_of(spec).scale, spec.num_draft_layers) == (
        4,
        2,
        2.5,
        1,
    )
    plain = spec_of(tmp_path, **_deepseek(q_lora_rank=None))
    assert (mla_of(plain).q_rank, plain.attention.softmax_scale) == (None, 24**-0.5)


def test_a_latent_is_all_that_is_kept_per_token(tmp_path: Path) -> None:
    """32 channels of the latent and 8 that turn, once for all heads, in both layers."""
    spec = spec_of(tmp_path, **_deepseek())
    assert pool_page_bytes(spec.cache_spec(1, DType.BFLOAT16)) == (2 * (32 + 8) * 2,)


_GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 64,
    "sliding_window": 512,
    "num_hidden_layers": 8,
}


def test_gemma3_by_the_older_names(tmp_path: Path) -> None:
    """Those of the published files: a period, a theta of the windows' own, a scaling of the others'."""
    ropes = {"rope_theta": 1e6, "rope_local_base_freq": 2e4, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    spec = spec_of(tmp_path, **_GEMMA, **ropes, sliding_window_pattern=3, head_dim=32, tie_word_embeddings=...)
    far, near = ropes_of(spec)[2], ropes_of(spec)[0]
    assert windows_of(spec) == [512, 512, None, 512, 512, None, 512, 512]
    assert (far.kind, far.theta, far.factor) == (RopeKind.LINEAR, 1e6, 8.0)
    assert (near.kind, near.theta) == (RopeKind.DEFAULT, 2e4)
    assert (spec.attention.softmax_scale, spec.embedding_scale, spec.tied_embeddings) == (0.125, 8.0, True)
    assert (dense_of(spec).activation, spec.zero_centred_norms, spec.post_norms) == (Activation.GELU_TANH, True, True)


def test_gemma3_in_its_multimodal_wrapper(tmp_path: Path) -> None:
    """The text model's fields are few; transformers' own defaults stand for the rest."""
    text = {"hidden_size": 2560, "num_hidden_layers": 12, "sliding_window": 1024, "model_type": "gemma3_text"}
    values = {"architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps({**values, "eos_token_id": [1, 106]}))
    spec = load_spec(tmp_path)
    assumed = transformers.Gemma3TextConfig(**text)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, assumed.vocab_size)
    windows = [None if kind == "full_attention" else 1024 for kind in assumed.layer_types]
    assert windows_of(spec) == windows
    assert (spec.dtype, spec.eos_token_ids) == (DType.BFLOAT16, (1, 106))


def test_gpt_oss_as_published(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 4, "swiglu_limit": 7.0}
    changes = {
        "architectures": ["GptOssForCausalLM"],
        "rope_scaling": yarn,
        "rope_theta": 150000,
        "sliding_window": 128,
    }
    spec = spec_of(tmp_path, **changes, **experts, dtype=..., num_hidden_layers=4)
    assert windows_of(spec) == [128, None, 128, None]
    assert (spec.dtype, gqa_of(spec).sinks, spec.attention.bias) == (DType.BFLOAT16, True, True)
    assert (moe_of(spec).clamped, moe_of(spec).renormalise) == (ClampedGlu(1.702, 7.0), True)
    assert (ropes_of(spec)[0].truncate, ropes_of(spec)[0].theta) == (False, 150000)


def test_every_file_names_end_ids(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 3]}')
    assert spec_of(tmp_path, eos_token_id=7).eos_token_ids == (3, 4, 7)


def test_cache_spec(tmp_path: Path) -> None:
    cache = spec_of(tmp_path).cache_spec(16, DType.FP8_E4M3)
    (group,) = cache.groups
    assert isinstance(group, PageGroup)
    assert (cache.page_size, group.num_layers, group.num_kv_heads, group.head_dim) == (16, 2, 2, 16)
    assert (group.dtype, group.planes) == (DType.FP8_E4M3, 2)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "supported: Llama, Qwen3, Qwen3Moe"),
        ({"architectures": []}, "architectures is []"),
        ({**_GEMMA, "layer_types": ["full_attention"]}, "layer_types is ['full_attention'], expected 8 times"),
        ({**_GEMMA, "layer_types": ["sliding_attention"] * 8}, "expected at least one full_attention"),
        ({**_GEMMA, "sliding_window": 0}, "sliding_window is 0"),
        ({**_GEMMA, "final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, expected null"),
        ({**_GEMMA, "use_bidirectional_attention": True}, "use_bidirectional_attention is True, expected false"),
        ({**_GEMMA, "hidden_activation": "silu"}, "hidden_activation is 'silu', expected gelu_pytorch_tanh"),
        ({"architectures": ...}, "architectures is None"),
        ({"num_hidden_layers": 513}, "num_hidden_layers is 513, expected 1 .. 512"),
        ({"vocab_size": 2**22 + 1}, "vocab_size"),
        ({"hidden_size": 2**17 + 1}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size is '64', expected a whole number"),
        ({"hidden_size": True}, "hidden_size is True, expected a whole number"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"num_key_value_heads": 3}, "a divisor of num_attention_heads 4"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        ({"head_dim": 15}, "head_dim is 15, expected an even number"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected silu"),
        ({"dtype": "float64"}, "dtype is 'float64'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0, expected a positive number"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes', expected true or false"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised as 'awq'"),
        ({"eos_token_id": 100}, "eos_token_id 100 is outside the vocabulary of 100"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x', expected ids of tokens such as 2 or [2, 5]; correct it"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type is 'longrope', expected one of default, linear"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": 3}, "rope_scaling is 3, expected an object"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta is -1"),
        ({"rope_theta": 1e-320}, "rope_theta is 1e-320, expected a positive number"),
        ({"rope_theta": math.nan}, "rope_theta is nan, expected a positive number"),
        (_yarn(rope_theta=1.0), "rope_theta is 1.0, expected more than 1"),
        (_yarn(beta_fast=1e308), "beta_fast is 1e+308, expected a positive number"),
        (_yarn(beta_slow=1e-320), "beta_slow is 1e-320, expected a positive number"),
        (_yarn(factor=1e-40), "factor is 1e-40, expected a positive number"),
        (_yarn(attention_factor=math.inf), "attention_factor is inf, expected a positive number"),
        (_yarn(mscale=1.0, mscale_all_dim=math.nan), "mscale_all_dim is nan, expected a number between"),
        (_yarn(mscale=1.0, mscale_all_dim=-1e9), "mscale_all_dim is -1000000000.0, expected a value that scales by"),
        (
            _yarn(mscale=1e9, mscale_all_dim=1.0),
            "mscale is 1000000000.0, expected a value that scales by 0.001 .. 1000",
        ),
        (_deepseek(**_yarn(mscale_all_dim=1e9)), "mscale_all_dim is 1000000000.0, expected a value that scales by"),
        ({"partial_rotary_factor": 0.5}, "config.json: partial_rotary_factor is 0.5, expected 1.0 for this family"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.25}},
            "config.json: rope_parameters: partial_rotary_factor is 0.25, expected 1.0",
        ),
        ({"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True}, "windowed attention"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "num_local_experts is missing"),
        (_deepseek(scoring_func="softmax"), "scoring_func is 'softmax', expected sigmoid"),
        (_deepseek(topk_method="greedy"), "topk_method is 'greedy', expected noaux_tc"),
        (_deepseek(moe_layer_freq=2), "moe_layer_freq is 2"),
        (_deepseek(qk_rope_head_dim=7), "qk_rope_head_dim is 7, expected an even number"),
        (_deepseek(kv_lora_rank=...), "kv_lora_rank is missing"),
        (_deepseek(n_group=3), "n_group is 3, expected a divisor of n_routed_experts 8"),
        (_deepseek(n_group=8), "with two experts in a group"),
        (_deepseek(n_group=4, topk_group=1, num_experts_per_tok=3), "num_experts_per_tok is 3, expected 1 .. 2"),
        (_deepseek(q_lora_rank=None, attention_bias=True), "attention_bias is True, expected false where q_lora_rank"),
        (_minimax(scoring_func="softmax"), "scoring_func is 'softmax', expected sigmoid"),
        (_minimax(qk_norm_type="per_head"), "qk_norm_type is 'per_head', expected per_layer"),
        (_minimax(use_qk_norm=False), "use_qk_norm is False, expected true"),
        (_minimax(shared_intermediate_size=8), "shared_intermediate_size is 8"),
        (_minimax(rotary_dim=18), "rotary_dim is 18, expected 2 .. 16"),
        (_minimax(rotary_dim=7), "rotary_dim is 7, expected an even number"),
        (_minimax(partial_rotary_factor=0.2), "partial_rotary_factor is 0.2, expected an even number of the 16"),
    ],
)
def test_bad_config_is_one_clear_line(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spec_of(tmp_path, **changes)
    message = str(caught.value)
    assert message.startswith("config.json: ")
    assert text in message
    assert "\n" not in message
    assert str(tmp_path) not in message


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{", "not readable as JSON"),
        (b"\xff\xfe", "not readable as JSON"),
        (b"[1]", "expected a JSON object"),
        (b"[" * 100_000, "not readable as JSON"),
        (b"{" + b" " * (17 << 20) + b"}", "more than"),
    ],
)
def test_unreadable_config(tmp_path: Path, content: bytes, text: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=f"config.json: .*{text}"):
        load_spec(tmp_path)


def test_missing_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not found in the model folder"):
        load_spec(tmp_path)


def test_code_in_the_folder_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "modeling_evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    spec_of(tmp_path, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 3.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "truncate": False},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "attention_factor": 1.3,
        },
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "mscale": 0.7,
            "mscale_all_dim": 1.1,
        },
    ],
)
def test_rope_frequencies_equal_transformers(scaling: dict[str, Any]) -> None:
    values = {"rope_parameters": {"rope_theta": 1e5, **scaling}, "max_position_embeddings": 512}
    config = transformers.LlamaConfig(**values, head_dim=64, num_attention_heads=4)
    want, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    spec = rope_spec(Fields(values, "config.json"), 512, 64)
    torch.testing.assert_close(inverse_frequencies(spec), want, rtol=1e-6, atol=0.0)
    assert spec.attention_factor == pytest.approx(factor)


def test_older_rope_scaling_is_understood() -> None:
    fields = Fields({"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2}}, "config.json")
    spec = rope_spec(fields, 512, 64)
    assert (spec.kind, spec.theta, spec.factor) == (RopeKind.LINEAR, 1e6, 2.0)


def test_overrides_replace_keys(tiny_models: Path) -> None:
    spec = load_spec(tiny_models / "llama", '{"max_position_embeddings": 77}')
    assert spec.max_position == 77
    assert load_spec(tiny_models / "llama").max_position != 77


@pytest.mark.parametrize("overrides", ["[1]", "{", '{"architectures": ["X"]}', '{"hidden_size": -1}'])
def test_wrong_overrides_are_named(tiny_models: Path, overrides: str) -> None:
    with pytest.raises(ConfigError, match=r"json-model-override-args|hidden_size"):
        load_spec(tiny_models / "llama", overrides)


_LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_theta": 5000.0}, (RopeKind.LINEAR, 5000.0, 4.0)),
        ({"rope_scaling": _LINEAR}, (RopeKind.LINEAR, 1e6, 2.0)),
        ({"rope_scaling": _LINEAR, "rope_theta": 5000.0}, (RopeKind.LINEAR, 5000.0, 2.0)),
        ({"rope_scaling": {"rope_type": "default"}}, (RopeKind.DEFAULT, 1e6, 1.0)),
        ({"rope_parameters": {**_LINEAR, "rope_theta": 7.0}}, (RopeKind.LINEAR, 7.0, 2.0)),
    ],
    ids=str,
)
def test_an_override_by_an_older_name_reaches_the_table(
    tmp_path: Path, changes: dict[str, Any], rope: tuple[RopeKind, float, float]
) -> None:
    table = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "rope_parameters": table}))
    found = load_spec(tmp_path, json.dumps(changes)).attention.rope
    assert (found.kind, found.theta, found.factor) == rope


@pytest.mark.parametrize(
    ("table", "changes"),
    [
        ({"rope_theta": 1e6}, {"rope_theta": 5000.0, "rope_parameters": {"rope_theta": 7.0}}),
        ({"rope_theta": 1e6}, {"rope_scaling": None}),
        ({"rope_theta": 1e6}, {"rope_local_base_freq": 7.0}),
        ({"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}, {"rope_theta": 5000.0}),
    ],
    ids=str,
)
def test_an_override_that_a_table_would_win_over_is_refused(
    tmp_path: Path, table: dict[str, Any], changes: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "rope_parameters": table}))
    with pytest.raises(ConfigError, match=r"no effect beside rope_parameters; replace that whole, now \{") as caught:
        load_spec(tmp_path, json.dumps(changes))
    assert f"--json-model-override-args: {next(iter(changes))} has" in str(caught.value)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_an_override_that_is_no_number(tmp_path: Path, number: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    with pytest.raises(ConfigError, match=r"--json-model-override-args .*: must be a JSON object"):
        load_spec(tmp_path, f'{{"unused": {number}}}')


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({}, 512),
        ({"rope_type": "default"}, 512),
        ({"type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "linear", "factor": 0.5}, 256),
        ({"rope_type": "linear", "factor": 1e17}, 2**26),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 400}, 1600),
        ({"rope_type": "yarn", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 512),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            512,
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_the_context_counts_rope_scaling(tmp_path: Path, field: str, rope: dict[str, Any], expected: int) -> None:
    assert spec_of(tmp_path, **{field: rope}).max_position == expected


def test_the_context_of_qwen3_with_the_yarn_of_its_card(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    qwen = {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 40960}
    assert spec_of(tmp_path, **qwen, rope_scaling=yarn).max_position == 131072


def test_gemma3_names_the_scaled_context(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    assert spec_of(tmp_path, **_GEMMA, rope_scaling=linear, max_position_embeddings=131072).max_position == 131072


def test_an_override_lifts_the_context(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    assert load_spec(tmp_path, '{"max_position_embeddings": 4096}').max_position == 4096
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}
    assert load_spec(tmp_path, json.dumps({"rope_scaling": yarn})).max_position == 1024


def test_an_override_reaches_the_text_part(tmp_path: Path) -> None:
    """An override of a multimodal file's text part is taken; what its wrapper has is replaced there."""
    wrapper = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": 1, "dtype": "float32"}
    text = {key: value for key, value in BASE.items() if key not in ("architectures", "dtype")}
    (tmp_path / "config.json").write_text(json.dumps({**wrapper, "text_config": {**text, "num_hidden_layers": 6}}))
    spec = load_spec(tmp_path, '{"max_position_embeddings": 77, "vocab_size": 200, "eos_token_id": 5}')
    assert (spec.max_position, spec.vocab_size, spec.eos_token_ids) == (77, 200, (5,))


FOREIGN: list[tuple[dict[str, Any], str | None]] = [
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, expected null"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    ({"clip_qkv": 8.0}, "clip_qkv is 8.0"),
    ({"attention_multiplier": 0.0078125}, "attention_multiplier is 0.0078125"),
    ({"residual_multiplier": 0.22}, "residual_multiplier is 0.22, expected 1"),
    ({"embedding_multiplier": 12}, "embedding_multiplier is 12"),
    ({"logits_scaling": 8.0}, "logits_scaling is 8.0"),
    ({"logit_scale": 0.0625}, "logit_scale is 0.0625"),
    ({"qk_layernorm": True}, "qk_layernorm is True"),
    ({"no_rope_layers": [1, 0]}, "no_rope_layers is [1, 0]"),
    ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}, "layer_types is"),
    ({"use_sliding_window": True}, "use_sliding_window is true"),
    ({"attn_logit_softcapping": None, "clip_qkv": None, "no_rope_layers": None}, None),
    ({"residual_multiplier": 1.0, "embedding_multiplier": 1, "logits_scaling": 1.0, "qk_layernorm": False}, None),
    ({"no_rope_layers": [1, 1], "layer_types": ["full_attention"] * 2, "sliding_window": 4096}, None),
    ({"use_sliding_window": False, "max_window_layers": 2}, None),
]


@pytest.mark.parametrize(("fields", "message"), FOREIGN, ids=str)
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "MiniMaxM2", "DeepseekV3"])
def test_fields_of_other_families_are_no_matter_of_silence(
    tmp_path: Path, family: str, fields: dict[str, Any], message: str | None
) -> None:
    """As a GGUF file with them is refused. Values that change nothing are taken."""
    own = {"MiniMaxM2": _minimax(), "DeepseekV3": _deepseek()}.get(family, {"architectures": [f"{family}ForCausalLM"]})
    if message is None:
        spec_of(tmp_path, **own, **fields)
        return
    with pytest.raises(ConfigError, match=f"^config.json: {re.escape(message)}"):
        spec_of(tmp_path, **own, **fields)


@pytest.mark.parametrize("kinds", [[0, 1], [1, 1], 1])
def test_layers_of_minimax_with_linear_attention(tmp_path: Path, kinds: object) -> None:
    if kinds == [0, 1]:
        with pytest.raises(ConfigError, match="attn_type_list"):
            spec_of(tmp_path, **_minimax(attn_type_list=kinds))
    else:
        spec_of(tmp_path, **_minimax(attn_type_list=kinds))


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4", "W4A8_AWQ", "MIXED_PRECISION"])
def test_modelopt_beside_a_silent_config_is_refused_by_name(tmp_path: Path, algorithm: str) -> None:
    quantisation = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantisation))
    with pytest.raises(
        ConfigError, match=rf"^hf_quant_config\.json: weights quantised as {algorithm} of modelopt are not"
    ):
        spec_of(tmp_path)


def test_modelopt_that_quantises_no_weights_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text(
        '{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}'
    )
    assert spec_of(tmp_path).vocab_size == 100
