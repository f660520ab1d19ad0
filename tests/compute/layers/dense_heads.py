"""Heads that draft tokens in dense arithmetic, without pages: an MTP head's layer is transformers' own."""

import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
import transformers
from safetensors.torch import load_file
from torch import Tensor

from deltaserve.model.checkpoint_config import load_spec
from deltaserve.model.drafts.draft_algorithm import with_head
from deltaserve.model.model_spec import ModelSpec
from tests.fixtures.tiny_models import DRAFTED, EAGLE3_HEAD, EAGLE3_MODEL

HEADS = (*DRAFTED, EAGLE3_HEAD)
NUM_GUESSES = 3
Features = Callable[[Sequence[int]], Tensor]
Dense = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def drafting(tiny_models: Path, name: str) -> tuple[Path, ModelSpec]:
    """A model's folder, and its spec with the head of that name."""
    if name == EAGLE3_HEAD:
        path = tiny_models / EAGLE3_MODEL
        return path, with_head(load_spec(path), path, "EAGLE", tiny_models / EAGLE3_HEAD)
    path = tiny_models / name
    return path, with_head(load_spec(path), path, "EAGLE", None)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


@cache
def reference_model(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def model_hidden(path: Path, tokens: Sequence[int]) -> tuple[Tensor, ...]:
    """[T, hidden] of transformers: what enters each layer, then the states after the final norm."""
    found = reference_model(path)(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
    return tuple(state[0] for state in found)


def dense_mtp(path: Path) -> tuple[Features, Dense]:
    """The head's layer is transformers' own, as a model of one layer."""
    raw = load_file(path / "model.safetensors")
    config = transformers.AutoConfig.from_pretrained(path).get_text_config()
    is_qwen = "mtp.fc.weight" in raw
    prefix = "mtp.layers.0." if is_qwen else f"model.layers.{config.num_hidden_layers}."
    names = [prefix + name for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm")]
    if is_qwen:
        names = ["mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"]
    fc, norm_e, norm_h, norm = (raw[f"{name}.weight"] for name in names)
    base = one_layer(config, raw, prefix, norm)
    (table,) = (value for key, value in raw.items() if key.endswith("embed_tokens.weight") and ".layers." not in key)

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight + float(is_qwen), config.rms_norm_eps)

    @torch.inference_mode()
    def head(tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.cat((rms(table[tokens], norm_e), rms(features, norm_h)), -1) @ fc.T
        normed = base(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
        return normed @ raw["lm_head.weight"].T, normed, torch.arange(len(table))

    return lambda tokens: model_hidden(path, tokens)[-1], head


def one_layer(config: Any, raw: dict[str, Tensor], prefix: str, norm: Tensor) -> Any:
    config.num_hidden_layers = 1
    for name, value in (("layer_types", ["full_attention"]), ("first_k_dense_replace", 0)):
        if name in config.to_dict():
            config.update({name: value})
    base = transformers.AutoModel.from_config(config).eval()
    layer = {key.removeprefix(prefix): value for key, value in raw.items() if key.startswith(prefix)}
    count = sum(key.endswith("gate_proj.weight") and ".experts." in key for key in layer)

    def stacked(kind: str) -> Tensor:
        return torch.stack([layer[f"mlp.experts.{expert}.{kind}_proj.weight"] for expert in range(count)])

    if count:
        layer["mlp.experts.gate_up_proj"] = torch.cat((stacked("gate"), stacked("up")), 1)
        layer["mlp.experts.down_proj"] = stacked("down")
    own = base.layers[0].state_dict()
    base.layers[0].load_state_dict({key: layer[key] for key in own})
    base.norm.load_state_dict({"weight": norm})
    return base


def dense_eagle3(path: Path, folder: Path) -> tuple[Features, Dense]:
    w, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    w = {name: value.float() if value.is_floating_point() else value for name, value in w.items()}
    table = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    heads, kv_heads, dim = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))

    def rms(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, w[f"{name}.weight"], config["rms_norm_eps"])

    def turned(x: Tensor) -> Tensor:
        """[T, H, D]: channel i turns with i + D/2"""
        speeds = config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        angles = (torch.arange(len(x))[:, None] * speeds)[:, None]
        a, b = x.chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    @torch.inference_mode()
    def head(tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        both = torch.cat((rms(table[tokens], "midlayer.input_layernorm"), rms(features, "midlayer.hidden_norm")), -1)
        q, k, v = (both @ w[f"midlayer.self_attn.{name}_proj.weight"].T for name in "qkv")
        q, k, v = q.view(-1, heads, dim), k.view(-1, kv_heads, dim), v.view(-1, kv_heads, dim)
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (turned(k), v))
        scores = torch.einsum("qhd,khd->hqk", turned(q), k) / math.sqrt(dim)
        later = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -math.inf).softmax(-1), v).flatten(1)
        x = features + mixed @ w["midlayer.self_attn.o_proj.weight"].T
        normed = rms(x, "midlayer.post_attention_layernorm")
        gate, up, down = (w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        x = x + (functional.silu(normed @ gate) * (normed @ up)) @ down
        targets = torch.arange(config["draft_vocab_size"]) + w["d2t"]
        return rms(x, "norm") @ w["lm_head.weight"].T, x, targets

    def features(tokens: Sequence[int]) -> Tensor:
        hidden = model_hidden(path, tokens)
        made: Tensor = torch.cat(hidden[1:4], -1) @ w["fc.weight"].T  # of what layers 0, 1 and 2 give
        return made

    return features, head


def dense_drafted(model: tuple[Features, Dense], prompt: Sequence[int]) -> tuple[Tensor, list[int]]:
    """As `drafted`, of one prompt."""
    features, head = model
    made = features(prompt)
    before = torch.cat((torch.zeros(1, made.shape[1]), made[:-1]))
    tokens = torch.tensor(list(prompt))
    logits, own, targets = head(tokens, before)
    guesses = []
    for _ in range(NUM_GUESSES):
        guess = targets[logits[-1].argmax()]
        guesses.append(int(guess))
        tokens, before = torch.cat((tokens, guess[None])), torch.cat((before, own[-1:]))
        step, own, _ = head(tokens, before)
        logits = torch.cat((logits, step[-1:]))
    return logits, guesses


@cache
def dense_head(tiny_models: Path, name: str) -> tuple[Features, Dense]:
    if name == EAGLE3_HEAD:
        return dense_eagle3(tiny_models / EAGLE3_MODEL, tiny_models / EAGLE3_HEAD)
    return dense_mtp(tiny_models / name)
