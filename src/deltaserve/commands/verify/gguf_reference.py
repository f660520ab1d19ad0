"""The model of a GGUF file in transformers."""

from typing import Any

import torch
import transformers

from deltaserve.compute.weights.gguf_arrays import arrays
from deltaserve.model.family import ZERO_CENTRED
from deltaserve.model.formats.gguf_model import GgufModel


@torch.no_grad()
def load(source: GgufModel, dtype: torch.dtype) -> Any:
    """The model of transformers with the values of a GGUF file: our reading of the file, their computation.

    Their own reader of GGUF needs another package (accelerate) and leaves the file's rope factors out.
    """
    values = dict(source.config().values)
    rope = dict(values.pop("rope_parameters"))
    added = 0.0 if values.pop(ZERO_CENTRED, True) else 1.0
    factors = rope.pop("factors", None)
    if factors is not None:
        rope["rope_type"] = "default"
    model_type = values.pop("model_type")
    config = transformers.AutoConfig.for_model(model_type, **values, rope_parameters=rope)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    own = model.state_dict()
    for array in arrays(source):
        name = array.header.name
        own[name].copy_(torch.from_numpy(array.values()) - (added if name.endswith("norm.weight") else 0.0))
    if factors is not None:
        model.model.rotary_emb.inv_freq /= torch.tensor(factors)
    return model.eval()
