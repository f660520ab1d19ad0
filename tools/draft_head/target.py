"""The model that a head is trained for, computed by the server's own decoder; what the head reads of it comes along."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deltaserve.compute.attention.attention import Batch, Query
from deltaserve.compute.attention.attention_choice import make_attention, open_native
from deltaserve.compute.layers.decoder import Decoder
from deltaserve.compute.layers.layer_kind import LastTokens
from deltaserve.compute.layers.native_ops import usable_quantization
from deltaserve.compute.layers.ops_choice import make_step_ops
from deltaserve.compute.memory.element_conversion import torch_dtype
from deltaserve.compute.memory.kv_pool import KvPool
from deltaserve.compute.memory.page_table import PageTable
from deltaserve.compute.weights.loader import load_weights
from deltaserve.core.errors import ConfigError
from deltaserve.core.ids import PageId, PoolId
from deltaserve.core.layout.shard import Shard
from deltaserve.model.checkpoint_config import load_spec
from deltaserve.model.model_spec import DraftNames, DraftSpec, HeadForm, ModelSpec

PAGE_SIZE, SPLIT_TOKENS = 16, 256
CPU = torch.device("cpu")
NUM_READ = 3


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that one row computes, behind `start` that it has computed before."""

    line: int
    start: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Computed:
    """What one step computed."""

    logits: Tensor  # [rows, V] float32, behind the last token of each
    normed: Tensor  # [rows, hidden]: what the output matrix read there
    read: Tensor  # [T, 3 * hidden]: what entered the layers that a head reads, of all tokens


def read_layers(spec: ModelSpec) -> tuple[int, ...]:
    """Layers whose inputs a head reads: an early one, the middle, and the last, which knows most of the next token.

    Raises ConfigError for a model with too few.
    """
    layers = tuple(sorted({min(2, spec.num_layers // 4), spec.num_layers // 2, spec.num_layers - 1}))
    if len(layers) != NUM_READ:
        raise ConfigError(f"a head reads {NUM_READ} layers, and the model has {spec.num_layers}")
    return layers


def trainable_spec(model: Path) -> ModelSpec:
    """Raises ConfigError where a head cannot be trained for the model by these tools."""
    spec = load_spec(model)
    if spec.recurrent:
        raise ConfigError(f"{model.name}: heads are trained for models of attention layers alone")
    return spec


class Target:
    """Computes on one thread. Pages of a row are its own, and a line is used again from its start."""

    def __init__(self, model: Path, num_rows: int, max_len: int) -> None:
        """Raises ConfigError for a model that cannot be read."""
        spec = trainable_spec(model)
        dtype = torch_dtype(spec.dtype)
        native = open_native("auto", CPU, 1)
        ops = make_step_ops(native, dtype)
        weights = load_weights(model, spec, dtype, CPU, quantization=usable_quantization("auto", ops))
        self._decoder = Decoder(_reading(spec), weights, ops)
        cache = spec.cache_spec(PAGE_SIZE, spec.dtype)
        each = cache.num_pages(max_len)
        pool = KvPool(cache, (num_rows * each,) * cache.num_pools, CPU)
        tables = PageTable(cache.num_pools, num_rows, each)
        for number in range(cache.num_pools):
            for line in range(num_rows):
                tables.write(PoolId(number), line, 0, tuple(PageId(line * each + page) for page in range(each)))
        self._attention = make_attention("auto", native, pool, tables, spec.local(Shard()).query_heads)

    @torch.inference_mode()
    def compute(self, pieces: Sequence[Piece]) -> Computed:
        """One step of rows, each with some tokens."""
        lens = np.array([len(piece.tokens) for piece in pieces])
        batch = _batch([Query(piece.line, piece.start, len(piece.tokens)) for piece in pieces])
        ends = [Query(piece.line, piece.start + len(piece.tokens) - 1, 1) for piece in pieces]
        last = None
        if batch.num_tokens > len(pieces):
            last = LastTokens(torch.from_numpy(lens.cumsum() - 1), self._attention.begin_step(_batch(ends)))
        tokens = torch.tensor([token for piece in pieces for token in piece.tokens])
        attention = self._attention.begin_step(batch)
        hidden = self._decoder.forward(tokens, torch.from_numpy(batch.positions()), attention, last)
        assert hidden.read is not None
        return Computed(self._decoder.logits(hidden.normed), hidden.normed, hidden.read)


def _batch(queries: Sequence[Query]) -> Batch:
    return Batch(tuple(queries), SPLIT_TOKENS)


def _reading(spec: ModelSpec) -> ModelSpec:
    """The model with its reads for a head that is not there yet."""
    draft = DraftSpec(
        algorithm="EAGLE3",
        form=HeadForm.SIDE_BY_SIDE,
        layer=spec,
        names=DraftNames("midlayer", "fc", "midlayer.hidden_norm", "norm"),
        read_layers=read_layers(spec),
        read_size=spec.hidden_size,
    )
    return replace(spec, draft=draft)
