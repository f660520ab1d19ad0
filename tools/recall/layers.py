"""A recall model with more layers that compute the same: what a deep model's step costs beside its draft head's.

Behind each layer stand as many that add nothing to what passes through them: their output matrices are zero, the rest
is drawn, and each costs what any layer does.

    python -m tools.recall.layers MODEL OUT NUM_LAYERS
"""

import json
import re
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
_STD = 0.05


def with_layers(folder: Path, out: Path, num_layers: int) -> Path:
    """Writes the model of `folder`, of attention layers alone, to `out`, which must not be there; returns it.

    Raises ValueError where `num_layers` is not a multiple of the model's.
    """
    config = json.loads((folder / "config.json").read_text())
    each, rest = divmod(num_layers, config["num_hidden_layers"])
    if rest or each < 1:
        raise ValueError(f"{num_layers} layers: expected a multiple of the model's {config['num_hidden_layers']}")
    shutil.copytree(folder, out)
    config |= {
        "num_hidden_layers": num_layers,
        "layer_types": [kind for kind in config["layer_types"] for _ in range(each)],
    }
    (out / "config.json").write_text(json.dumps(config, indent=2))
    tensors: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for key, value in load_file(folder / "model.safetensors").items():
        if (found := _LAYER.fullmatch(key)) is None:
            tensors[key] = value
            continue
        first, name = int(found[1]) * each, found[2]
        tensors[f"model.layers.{first}.{name}"] = value
        for index in range(first + 1, first + each):
            tensors[f"model.layers.{index}.{name}"] = _adding_nothing(name, value, generator)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def _adding_nothing(name: str, value: Tensor, generator: torch.Generator) -> Tensor:
    if name in _OUTPUTS:
        return torch.zeros_like(value)
    if value.dim() == 1:
        return torch.ones_like(value)
    return torch.randn(value.shape, generator=generator).to(value.dtype) * _STD


if __name__ == "__main__":
    with_layers(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
