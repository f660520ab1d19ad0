"""How much memory a step takes beside weights and pages, at most. No torch: the launcher asks first."""

from deltaserve.compute.attention.scratch_limits import (
    BLOCK_BYTES,
    CAUSAL_POSITIONS,
    CHUNK_LEN,
    CHUNKS_AT_ONCE,
    FLASHINFER_BYTES,
    MAX_KEYS,
    MAX_PIECE_RESULTS,
    MAX_POSITIONS,
    MAX_TILED_LEN,
    MAX_TILED_PARTS,
    SCORE_BYTES,
    TILE_ROWS,
)
from deltaserve.compute.executor.recordable_models import why_not_recordable
from deltaserve.model.model_spec import DraftSpec, ModelSpec
from deltaserve.settings.resolve import StepSizes

LOGPROB_POSITIONS = 64
"""Prompt positions whose logits [n, V] exist at once."""
_FLOAT = 4
_INDEX = 4
_LOGIT_COPIES = 5
"""Logits, their scaled form, probabilities, and what a rule makes of them."""


def scratch_bytes(spec: ModelSpec, sizes: StepSizes) -> int:
    """An upper bound; the real peak is less, since not all of it is needed at the same time."""
    tokens = sizes.step_len + sizes.max_rows
    own = _activations(spec, tokens) + _logits(spec, sizes) + attention_bytes(spec, sizes) + _recurrent(spec, sizes)
    own += _recorded(spec, sizes)
    return own if spec.draft is None else own + _draft(spec, spec.draft, sizes)


def attention_bytes(spec: ModelSpec, sizes: StepSizes) -> int:
    """Bytes of attention by whichever backend needs most."""
    reference = _tiled(spec, sizes) + _long(spec, sizes)
    if sizes.device == "cpu":
        return reference
    return max(reference, kernel_bytes(spec, sizes) + len(spec.windows) * FLASHINFER_BYTES)


def kernel_bytes(spec: ModelSpec, sizes: StepSizes) -> int:
    """Bytes of Triton's kernels: partial results, of decoding rows by split and of others by piece, and the work list.

    FlashInfer's have no more partial results, with their queries beside them, both in 16 bits.
    """
    rows, splits = sizes.max_rows, sizes.context_len // sizes.split_tokens + 2
    results = rows * max(MAX_PIECE_RESULTS, splits) + sizes.step_len
    per_result = spec.num_heads * (spec.head_dim + 1) * _FLOAT
    tiles = results * -(-spec.num_heads // (16 * spec.num_kv_heads)) * 8
    pages = (rows + 1) * (sizes.context_len // sizes.page_size + 1)
    return results * per_result + (tiles + pages + 4 * (sizes.step_len + rows)) * _INDEX


def _activations(spec: ModelSpec, num_tokens: int) -> int:
    """Bytes in float32 of residual stream, projections and the widest hidden layer, for all tokens of a step; in an
    expert group all members' tokens may come to the experts of one."""
    heads = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    inner = 3 * spec.intermediate_size
    if spec.moe is not None:
        routed = spec.moe.experts_per_token * (3 * spec.hidden_size + 3 * spec.moe.intermediate_size)
        routed *= spec.moe.placement.member.size
        inner = max(inner, routed + 3 * spec.moe.shared_size)
    return num_tokens * (4 * spec.hidden_size + 2 * heads + inner) * _FLOAT


def _recorded(spec: ModelSpec, sizes: StepSizes) -> int:
    """Bytes of recorded decode steps (step_graphs.py): the activations of the largest, which lie apart, and partial
    results, for which there is room for a power of two, while smaller steps keep what they had before: each doubles."""
    if sizes.device == "cpu" or why_not_recordable(spec) is not None:
        return 0
    results = sizes.max_rows * (sizes.context_len // sizes.split_tokens + 2)
    return _activations(spec, sizes.max_rows) + 4 * results * spec.num_heads * (spec.head_dim + 1) * _FLOAT


def _logits(spec: ModelSpec, sizes: StepSizes) -> int:
    return max(sizes.max_rows, LOGPROB_POSITIONS) * spec.vocab_size * _LOGIT_COPIES * _FLOAT


def _draft(spec: ModelSpec, draft: DraftSpec, sizes: StepSizes) -> int:
    """A layer beside those of the model, and what it reads of them: all tokens of a step."""
    read = len(draft.read_layers) * draft.read_size or spec.hidden_size
    inputs = (sizes.step_len + sizes.max_rows) * (read + 5 * draft.layer.hidden_size) * _FLOAT
    return (
        inputs
        + _activations(draft.layer, sizes.step_len + sizes.max_rows)
        + _logits(draft.layer, sizes)
        + attention_bytes(draft.layer, sizes)
    )


def _recurrent(spec: ModelSpec, sizes: StepSizes) -> int:
    """Bytes of one layer with states: what its tokens bring, all rows' states read and written, a request's chunks."""
    delta = spec.delta
    if delta is None:
        return 0
    per_token = 4 * sum(delta.channels) + 4 * delta.num_value_heads * delta.value_dim
    states = 3 * sizes.max_rows * delta.num_value_heads * delta.key_dim * delta.value_dim
    squares = 4 * CHUNK_LEN * CHUNK_LEN + 4 * CHUNK_LEN * (delta.key_dim + delta.value_dim)
    chunks = CHUNKS_AT_ONCE * delta.num_value_heads * squares
    return ((sizes.step_len + sizes.max_rows) * per_token + states + chunks) * _FLOAT


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
