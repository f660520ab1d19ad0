"""A head between its folder and the tools: how it begins, and what is written for `serve`."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as functional
from safetensors.torch import save_file
from torch import Tensor, nn

from deltaserve.compute.weights.loader import load_weights
from deltaserve.model.layers.dense import DenseSpec
from deltaserve.model.model_spec import ModelSpec
from tools.draft_head.chats import Chat
from tools.draft_head.head import HeadShape, TrainedHead
from tools.draft_head.target import CPU, NUM_READ, read_layers
from tools.draft_head.train import TargetTables

_RIDGE = 1e-3
"""Regularisation, as a share of the mean square of what is read."""
_MOST_CHATS = 300
"""That least squares look at: many more tokens than what is read has channels."""


def head_shape(spec: ModelSpec, num_guessable: int) -> HeadShape:
    """Heads of attention as the model's queries, each with keys and values of its own: embeddings pass through them. A
    feed-forward part as the model's dense ones, if it has any."""
    dense = (layer.mlp for layer in spec.layers if isinstance(layer.mlp, DenseSpec))
    return HeadShape(
        hidden=spec.hidden_size,
        inner=max((mlp.inner for mlp in dense), default=3 * spec.hidden_size),
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_heads,
        head_dim=spec.head_dim,
        num_guessable=num_guessable,
        num_read=NUM_READ,
        norm_eps=spec.norm_eps,
    )


def target_tables(model: Path, spec: ModelSpec, guessable: Tensor) -> tuple[TargetTables, Tensor]:
    """And the model's final norm."""
    weights = load_weights(model, spec, torch.float32, CPU)
    output = weights.embedding if spec.tied_embeddings else weights.lm_head
    assert isinstance(output, Tensor)
    output = output.to_dense() if output.is_mkldnn else output
    tables = TargetTables(weights.embedding, output[guessable].clone(), guessable, spec.attention.rope)
    return tables, weights.norm


def new_head(shape: HeadShape, tables: TargetTables, norm: Tensor, chats: Sequence[Chat], seed: int) -> TrainedHead:
    """As good as a linear map can be, found by least squares: of what the model made of one token, and the embedding of
    the next, to what its output matrix reads there. `norm`: the model's final one.

    The map of what was read is the head's own; that of the embedding goes through attention, which begins as looking at
    the token itself. Final norm and output matrix are the model's, and the matrix stays so.
    """
    torch.manual_seed(seed)
    head = TrainedHead(shape)
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
    of_read, of_embedding = _least_squares(tables.embedding, norm, shape, chats)
    attention, width = head.midlayer.self_attn, shape.num_heads * shape.head_dim
    with torch.no_grad():
        head.lm_head.weight.copy_(tables.output)
        head.norm.weight.copy_(norm)
        head.fc.weight.copy_(of_read)
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight[:, : shape.hidden] += torch.eye(width, shape.hidden)
        attention.v_proj.weight[:, : shape.hidden] += torch.eye(width, shape.hidden)
        attention.o_proj.weight[:, : min(width, shape.hidden)] += of_embedding[:, : min(width, shape.hidden)]
    head.lm_head.weight.requires_grad_(False)
    return head


def _least_squares(embedding: Tensor, norm: Tensor, shape: HeadShape, chats: Sequence[Chat]) -> tuple[Tensor, Tensor]:
    """[hidden, 3 hidden], [hidden, hidden] float32: maps of what is read at j - 1 and of the normalised embedding at j,
    to what is in the model at j before the weight of its final norm."""
    sizes = shape.num_read * shape.hidden, shape.hidden
    square = torch.zeros(sum(sizes), sum(sizes))
    mixed = torch.zeros(sum(sizes), shape.hidden)
    for chat in chats[:_MOST_CHATS]:
        embedded = embedding[list(chat.tokens[chat.first : -1])]
        embedded = functional.rms_norm(embedded, embedded.shape[1:], eps=shape.norm_eps)
        inputs = torch.cat((chat.read[chat.first - 1 : -1].float(), embedded), 1)
        square += inputs.T @ inputs
        mixed += inputs.T @ (chat.normed.float() / norm)
    square += torch.eye(len(square)) * (_RIDGE * square.diagonal().mean())
    found = torch.linalg.solve(square, mixed).T
    return found[:, : sizes[0]].clone(), found[:, sizes[0] :].clone()


def write_head(folder: Path, head: TrainedHead, spec: ModelSpec, tables: TargetTables) -> None:
    """config.json and model.safetensors as published heads have them."""
    folder.mkdir(parents=True, exist_ok=True)
    guessable, shape = tables.guessable, head.shape
    tensors = {name: value.detach().bfloat16().contiguous() for name, value in head.state_dict().items()}
    tensors["d2t"] = guessable - torch.arange(len(guessable))
    tensors["t2d"] = torch.zeros(spec.vocab_size, dtype=torch.bool).index_fill(0, guessable, True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": shape.num_guessable,
        "hidden_size": shape.hidden,
        "target_hidden_size": shape.hidden,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.inner,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": tables.rope.theta,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": list(read_layers(spec)),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
