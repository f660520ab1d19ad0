"""The entry of this backend: see `AttentionKind`."""

from deltaserve.compute.attention.registry import AttentionKind
from deltaserve.compute.attention.scratch_limits import (
    BLOCK_BYTES,
    CAUSAL_POSITIONS,
    MAX_KEYS,
    MAX_POSITIONS,
    MAX_TILED_LEN,
    MAX_TILED_PARTS,
    SCORE_BYTES,
    TILE_ROWS,
)
from deltaserve.model.model_spec import ModelSpec
from deltaserve.settings.resolve import StepSizes

_FLOAT = 4


def _scratch(spec: ModelSpec, sizes: StepSizes) -> int:
    return _tiled(spec, sizes) + _long(spec, sizes)


def _tiled(spec: ModelSpec, sizes: StepSizes) -> int:
    """Bytes of decoding rows and short extends: partial results, their gathered copy, index tensors, blocks of keys."""
    parts = sizes.max_rows * max(MAX_TILED_PARTS, sizes.context_len // sizes.split_tokens + 1)
    results = 3 * parts * spec.num_heads * (spec.head_dim + 1) * _FLOAT
    rows, pages = max(TILE_ROWS, spec.num_heads // spec.num_kv_heads), sizes.split_tokens // sizes.page_size
    indexes = parts * spec.num_kv_heads * (2 * rows + pages) * 8
    item = 2 * spec.num_kv_heads * sizes.split_tokens * spec.head_dim * _FLOAT  # as wide as the next power of two
    if len(spec.windows) > 1:  # a tail may be all that a window holds, if that is no whole split
        item = 2 * item + spec.num_kv_heads * 4 * MAX_TILED_LEN * spec.head_dim * _FLOAT
    return results + indexes + 6 * max(BLOCK_BYTES[sizes.device], item)


def _long(spec: ModelSpec, sizes: StepSizes) -> int:
    """Bytes of one extend: queries and results of its positions, keys and values, scores and weights."""
    results = 6 * MAX_POSITIONS * spec.num_heads * (spec.head_dim + 1) * _FLOAT
    keys = 4 * MAX_KEYS * spec.num_kv_heads * spec.head_dim * _FLOAT
    group = spec.num_heads // spec.num_kv_heads
    scores = 2 * max(SCORE_BYTES[sizes.device], group * CAUSAL_POSITIONS * MAX_KEYS * _FLOAT)
    return results + keys + scores


KIND = AttentionKind(
    name="torch",
    devices=("cpu", "cuda"),
    module="deltaserve.compute.attention.reference.torch_attention",
    scratch=_scratch,
)
