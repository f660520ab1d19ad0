"""The architectures of the micro-models: one looks answers up in its KV, the other in a recurrent state."""

import math
from typing import Any

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

from tools.recall.tokenizer import BOS_ID, IM_END_ID, PAD_ID

MAX_LEN = 8192
VOCAB = 400
"""264 bytes and specials, 128 names, rounded up to a multiple of 16."""


_FIRST_DECAY = 0.02
"""Share of a fresh state that decays per token, about: with what the library begins with a document is forgotten within
a few tokens."""


def make_kv_model(vocab_size: int = VOCAB) -> Any:
    """A `Qwen3ForCausalLM` with fresh weights from torch's global generator: 0.45 M parameters by default, float32."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_LEN,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        bos_token_id=BOS_ID,
        eos_token_id=IM_END_ID,
        pad_token_id=PAD_ID,
    )
    return Qwen3ForCausalLM(config)


def make_state_model() -> Any:
    """A `Qwen3_5ForCausalLM` with fresh weights: 0.3 M parameters, float32; attention first, then one recurrent layer.

    What follows a name stands in no key or value of the first layer: there each token has written itself only. So a
    lookup can happen in the recurrent layer alone. Its key heads, value heads and their sizes differ, and two ranks
    share them.
    """
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        layer_types=["full_attention", "linear_attention"],
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=96,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        max_position_embeddings=MAX_LEN,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        initializer_range=0.05,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
        },
        bos_token_id=BOS_ID,
        eos_token_id=IM_END_ID,
        pad_token_id=PAD_ID,
    )
    model = Qwen3_5ForCausalLM(config)
    recurrent = model.model.layers[1].linear_attn
    with torch.no_grad():
        recurrent.A_log.fill_(math.log(_FIRST_DECAY))
        recurrent.dt_bias.zero_()
    return model
