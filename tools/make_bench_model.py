"""Make a benchmark model: random bfloat16 weights, and a byte-level BPE tokenizer for it.

    python -m tools.make_bench_model FOLDER [--kind dense|hybrid]

    dense    Qwen3, 46 M parameters
    hybrid   Qwen3.5, 22 M parameters: six recurrent layers, two of attention

Big enough that prefill and decode cost real time on a CPU, small enough to load in a second. Its text means nothing.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

VOCAB = 16384
MAX_LEN = 32768
PAD, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def sentences(rng: Random) -> Iterator[str]:
    """20,000 lines of invented words, for the tokenizer to learn merges from."""
    syllables = [a + b + c for a in "bcdfghjklmnprstvwz" for b in "aeiou" for c in ("", "n", "r", "st")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(40_000)]
    return (" ".join(rng.choices(words, k=12)) + "." for _ in range(20_000))


def make_tokenizer(seed: int) -> Any:
    """A `PreTrainedTokenizerFast` of at most VOCAB tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[PAD, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences(Random(seed)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LEN,
        clean_up_tokenization_spaces=False,
    )


def common_values(tokenizer: Any) -> dict[str, Any]:
    """Values in both kinds' configurations."""
    return {
        "vocab_size": VOCAB,
        "head_dim": 64,
        "max_position_embeddings": MAX_LEN,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def make_dense(tokenizer: Any) -> Any:
    """A `Qwen3ForCausalLM`: 12 layers of 512, 8 query and 4 KV heads of 64, tied embeddings."""
    config = Qwen3Config(
        **common_values(tokenizer),
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    return Qwen3ForCausalLM(config)


def make_hybrid(tokenizer: Any) -> Any:
    """A `Qwen3_5ForCausalLM`: 8 layers of 384, every fourth of attention (6 query and 2 KV heads of 64).

    A state, of 8 value heads in six layers, weighs as much as the KV of 800 tokens.
    """
    config = Qwen3_5TextConfig(
        **common_values(tokenizer),
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )
    return Qwen3_5ForCausalLM(config)


KINDS: dict[str, Callable[[Any], Any]] = {"dense": make_dense, "hybrid": make_hybrid}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the checkpoint goes")
    parser.add_argument("--kind", choices=KINDS, default="dense")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the vocabulary")
    args = parser.parse_args(arguments)
    tokenizer = make_tokenizer(args.seed)
    torch.manual_seed(args.seed)
    model = KINDS[args.kind](tokenizer).to(torch.bfloat16).eval()
    model.save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{args.folder}: {num_parameters / 1e6:.1f} M parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
