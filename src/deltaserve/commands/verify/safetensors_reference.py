"""The model of a Hugging Face folder in transformers."""

from typing import Any

import torch
import transformers

from deltaserve.model.formats.safetensors_folder import SafetensorsFolder


def load(source: SafetensorsFolder, dtype: torch.dtype) -> Any:
    """The model as transformers loads it."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(source.path, dtype=dtype, local_files_only=True, trust_remote_code=False).eval()
