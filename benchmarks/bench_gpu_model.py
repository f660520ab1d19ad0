"""Checkpoints of published shapes with random weights and a made-up vocabulary, for benchmarks on machines that reach
no model hub.

    python -m benchmarks.bench_gpu_model 0.6b FOLDER [--device cuda]

Weights are drawn on the device, for 16 GB of them take a CPU minutes. Text means nothing.
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

PAD, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_SPREAD = 0.02
_FILE_BYTES = 2 << 30
"""Weight files are written when so much is together: what waits for its file lies in memory."""
CHAT_TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a dense Qwen3 model."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    is_tied: bool

    @property
    def config(self) -> dict[str, object]:
        """What config.json holds."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": 40960,
            "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": self.is_tied,
            "torch_dtype": "bfloat16",
            "bos_token_id": None,
            "pad_token_id": self.vocab_size - 3,
            "eos_token_id": self.vocab_size - 1,
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of each tensor."""
        hidden, inner, width = self.hidden_size, self.intermediate_size, self.head_dim
        queries, keys = self.num_heads * width, self.num_kv_heads * width
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        for layer in range(self.num_layers):
            at = f"model.layers.{layer}"
            yield f"{at}.input_layernorm.weight", (hidden,)
            yield f"{at}.post_attention_layernorm.weight", (hidden,)
            yield f"{at}.self_attn.q_proj.weight", (queries, hidden)
            yield f"{at}.self_attn.k_proj.weight", (keys, hidden)
            yield f"{at}.self_attn.v_proj.weight", (keys, hidden)
            yield f"{at}.self_attn.o_proj.weight", (hidden, queries)
            yield f"{at}.self_attn.q_norm.weight", (width,)
            yield f"{at}.self_attn.k_norm.weight", (width,)
            yield f"{at}.mlp.gate_proj.weight", (inner, hidden)
            yield f"{at}.mlp.up_proj.weight", (inner, hidden)
            yield f"{at}.mlp.down_proj.weight", (hidden, inner)
        yield "model.norm.weight", (hidden,)
        if not self.is_tied:
            yield "lm_head.weight", (self.vocab_size, hidden)

    @property
    def num_values(self) -> int:
        return sum(math.prod(shape) for _, shape in self.tensors())


SHAPES = {
    "tiny": ModelShape(64, 128, 2, 4, 2, 32, 512, is_tied=True),
    "0.6b": ModelShape(1024, 3072, 28, 16, 8, 128, 151_936, is_tied=True),
    "8b": ModelShape(4096, 12_288, 36, 32, 8, 128, 151_936, is_tied=False),
}
"""0.6b and 8b are the shapes of Qwen3-0.6B and Qwen3-8B (their config.json)."""


def make_model(shape: ModelShape, folder: Path, device: torch.device) -> Path:
    """The folder, complete."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(shape, folder, device)
    _write_tokenizer(shape.vocab_size, folder)
    (folder / "config.json").write_text(json.dumps(shape.config))
    return folder


def _write_weights(shape: ModelShape, folder: Path, device: torch.device) -> None:
    torch.manual_seed(0)
    places: dict[str, str] = {}
    waiting: dict[str, Tensor] = {}

    def write() -> None:
        name = f"model-{len(set(places.values())) + 1:05d}.safetensors"
        save_file(waiting, str(folder / name), metadata={"format": "pt"})
        places.update(dict.fromkeys(waiting, name))
        waiting.clear()

    for name, size in shape.tensors():
        waiting[name] = _values(size, device).cpu()
        if sum(values.nbytes for values in waiting.values()) >= _FILE_BYTES:
            write()
    if waiting:
        write()
    index = {"metadata": {"total_size": 2 * shape.num_values}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _values(size: tuple[int, ...], device: torch.device) -> Tensor:
    """bfloat16: ones for a norm, small random values for a matrix."""
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    return torch.randn(size, dtype=torch.bfloat16, device=device) * _SPREAD


def _write_tokenizer(vocab_size: int, folder: Path) -> None:
    """A byte-level vocabulary of so many tokens; those that are no bytes are random words that no merge makes, so that
    answers are as long a text as a real model's."""
    rng = Random(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = dict.fromkeys(alphabet)
    while len(words) < vocab_size - 3:
        length = rng.randint(2, 7)
        words["\u0120" * rng.randint(0, 1) + "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=length))] = None
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, IM_START, IM_END])
    tokenizer.save(str(folder / "tokenizer.json"))
    of_model = {"eos_token": IM_END, "pad_token": PAD, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps({**of_model, "chat_template": CHAT_TEMPLATE}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    make_model(SHAPES[args.shape], args.folder, torch.device(args.device))
    print(f"{args.folder}: {SHAPES[args.shape].num_values / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
