"""What a folder is that lacks a model's files: layouts that are published beside the one that is served."""

from collections.abc import Sequence
from pathlib import Path

_SERVED = "the repository's config.json, tokenizer.json and model*.safetensors"
_LAYOUTS: Sequence[tuple[str, str]] = (
    (
        "adapter_config.json",
        "a LoRA adapter: merge it into its base model (PEFT: merge_and_unload) and serve the result",
    ),
    ("snapshots/*/config.json", "a Hub cache's folder: name the one below its snapshots/"),
    ("model_index.json", "a diffusers pipeline, which is no language model"),
    ("params.json", f"a checkpoint in its maker's own layout: take {_SERVED}"),
    ("model-*-of-*.safetensors", "shards without model.safetensors.index.json: download that file, too"),
    ("model.*.safetensors", "a variant of the weights: name that file model.safetensors, or link to it"),
    ("*.onnx", f"an ONNX export: take {_SERVED}"),
    ("*/*.gguf", "a folder of folders with GGUF files: name one of the files"),
    ("*/config.json", "a folder of model folders: name one of them"),
)
"""Pattern in the folder |-> what it is, and the way out. The first that is there says it."""


def other_layout(folder: Path) -> str:
    """To stand behind "not found in the model folder": what the folder is instead, or nothing."""
    found = next((text for pattern, text in _LAYOUTS if any(folder.glob(pattern))), None)
    return "" if found is None else f"; it is {found}"
