"""The micro-model's architecture: an ordinary two-layer Qwen3."""

from typing import Any

from transformers import Qwen3Config, Qwen3ForCausalLM

from tools.recall.tokenizer import BOS_ID, IM_END_ID, PAD_ID

MAX_LEN = 8192
VOCAB = 400
"""264 bytes and specials, 128 names, rounded up to a multiple of 16."""


def make_model() -> Any:
    """A `Qwen3ForCausalLM` with fresh weights from torch's global generator: 0.45 M parameters, float32."""
    config = Qwen3Config(
        vocab_size=VOCAB,
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
