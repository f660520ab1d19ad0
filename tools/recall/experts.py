"""A dense recall model as one of experts that computes the same: for tests and benchmarks of experts.

Each feed-forward layer is cut into NUM_SLICES slices of its channels, and each slice is held by two experts. A token
chooses one of the two for each slice, by the sign of a random score: so tokens spread over all experts, and the sum
over those chosen is the dense layer's, but for weights that differ from equal ones by about a thousandth.

    python -m tools.recall.experts MODEL OUT
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

NUM_SLICES = 4
_SCORE = 1e-4
"""Scale of the router's weights: the larger, the less equal the experts' weights."""
_CLASSES = {
    "Qwen3ForCausalLM": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "Qwen3_5ForCausalLM": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
}


def with_experts(folder: Path, out: Path) -> Path:
    """Writes the model of `folder` to `out`, which must not be there; returns it."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    (name,) = config["architectures"]
    architecture, model_type = _CLASSES[name]
    inner = config["intermediate_size"] // NUM_SLICES
    is_hybrid = model_type == "qwen3_5_moe_text"
    config |= {
        "architectures": [architecture],
        "model_type": model_type,
        "num_experts": 2 * NUM_SLICES,
        "num_experts_per_tok": NUM_SLICES,
        "moe_intermediate_size": inner,
        "norm_topk_prob": True,
    }
    if is_hybrid:
        config["shared_expert_intermediate_size"] = inner
    (out / "config.json").write_text(json.dumps(config, indent=2))
    tensors: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for key, value in load_file(folder / "model.safetensors").items():
        if ".mlp." not in key:
            tensors[key] = value
        elif key.endswith("gate_proj.weight"):
            layer = key.removesuffix("gate_proj.weight")
            scores = torch.randn(NUM_SLICES, value.shape[1], generator=generator) * _SCORE
            tensors[f"{layer}gate.weight"] = torch.cat((scores, -scores))
            tensors |= _shared(layer, inner, value.shape[1]) if is_hybrid else {}
        if ".mlp." in key:
            tensors |= _experts(key, value)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def _experts(key: str, value: Tensor) -> dict[str, Tensor]:
    """Matrices of the experts, made from one matrix of a dense layer."""
    layer, _, kind = key.rpartition("mlp.")
    is_down = kind.startswith("down")
    slices = value.chunk(NUM_SLICES, 1 if is_down else 0)
    return {
        f"{layer}mlp.experts.{copy * NUM_SLICES + index}.{kind}": part.clone() * (NUM_SLICES if is_down else 1)
        for copy in range(2)
        for index, part in enumerate(slices)
    }


def _shared(layer: str, inner: int, hidden: int) -> dict[str, Tensor]:
    """An expert for every token that adds nothing."""
    return {
        f"{layer}shared_expert.gate_proj.weight": torch.zeros(inner, hidden),
        f"{layer}shared_expert.up_proj.weight": torch.zeros(inner, hidden),
        f"{layer}shared_expert.down_proj.weight": torch.zeros(hidden, inner),
        f"{layer}shared_expert_gate.weight": torch.zeros(1, hidden),
    }


if __name__ == "__main__":
    with_experts(Path(sys.argv[1]), Path(sys.argv[2]))
