"""How much memory a step takes beside weights and pages, at most. No torch: the launcher asks first."""

from deltaserve.compute.attention.registry import attention_kinds
from deltaserve.compute.executor.recordable_models import (
    most_piece_tokens,
    token_buckets,
    why_no_pieces,
    why_not_recordable,
)
from deltaserve.compute.executor.row_rules import BIAS_WIDTH, MOST_BIASES
from deltaserve.model.layers.layer_spec import StepLens
from deltaserve.model.model_spec import DraftSpec, ModelSpec
from deltaserve.settings.resolve import StepSizes

LOGPROB_POSITIONS = 64
"""Prompt positions whose logits [n, V] exist at once."""
_FLOAT = _COUNT = 4
_WORD = 8
_PIECE_BYTES = 100 << 10
"""What CUDA keeps of a graph of about ten kernels (reckoned)."""
_LOGIT_COPIES = 5
"""Logits, their scaled form, probabilities, and what a rule makes of them."""


def scratch_bytes(spec: ModelSpec, sizes: StepSizes) -> int:
    """An upper bound; the real peak is less, since not all of it is needed at the same time."""
    tokens = sizes.step_len + sizes.max_rows
    own = _activations(spec, tokens) + _logits(spec, sizes) + attention_bytes(spec, sizes)
    own += _adjustments(spec, sizes)
    if _is_recorded(spec, sizes):
        own += _recorded(spec, sizes) + (pieces_bytes(spec, sizes) if why_no_pieces(spec) is None else 0)
    own += max(layer.mixer.scratch_floats(StepLens(tokens, sizes.max_rows)) for layer in spec.layers) * _FLOAT
    return own if spec.draft is None else own + _draft(spec, spec.draft, sizes)


def _is_recorded(spec: ModelSpec, sizes: StepSizes) -> bool:
    return sizes.device != "cpu" and sizes.may_record and why_not_recordable(spec) is None


def attention_bytes(spec: ModelSpec, sizes: StepSizes) -> int:
    """Bytes of attention by whichever backend of the device needs most."""
    return max(kind.scratch(spec, sizes) for kind in attention_kinds().values() if sizes.device in kind.devices)


def _activations(spec: ModelSpec, num_tokens: int) -> int:
    """Bytes in float32 of residual stream, projections and the widest hidden layer, for all tokens of a step."""
    inner = max(layer.mlp.scratch_floats(spec.hidden_size) for layer in spec.layers)
    return _projections(spec, num_tokens) + num_tokens * inner * _FLOAT


def _projections(spec: ModelSpec, num_tokens: int) -> int:
    """Bytes of the residual stream and projections among those."""
    heads = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    return num_tokens * (4 * spec.hidden_size + 2 * heads) * _FLOAT


def _recorded(spec: ModelSpec, sizes: StepSizes) -> int:
    """Bytes of recorded steps (recorded_steps.py): the activations of the largest, which lie apart, scaled logits, and
    partial results, for which there is room for a power of two, while smaller steps keep what they had before: each
    doubles."""
    results = sizes.max_rows * (sizes.context_len // sizes.split_tokens + 2)
    floats = sizes.max_rows * spec.vocab_size + 4 * results * spec.num_heads * (spec.head_dim + 1)
    floats += max(layer.mixer.scratch_floats(StepLens(sizes.max_rows, sizes.max_rows)) for layer in spec.layers)
    return _activations(spec, sizes.max_rows) + floats * _FLOAT


def _adjustments(spec: ModelSpec, sizes: StepSizes) -> int:
    """Bytes that a GPU keeps of rows to change their logits (resident_adjustments.py)."""
    num_lines = 0 if sizes.device == "cpu" else sizes.max_rows + 1
    return num_lines * (spec.vocab_size * _COUNT + MOST_BIASES * BIAS_WIDTH * _WORD)


def pieces_bytes(spec: ModelSpec, sizes: StepSizes) -> int:
    """Bytes of steps that are recorded in pieces (step_pieces.py): activations of the largest, what stands between
    pieces, and the recordings."""
    tokens = most_piece_tokens(spec, sizes.step_len + sizes.max_rows)
    mixer = max(layer.mixer.scratch_floats(StepLens(tokens, 1)) for layer in spec.layers) * _FLOAT
    num_pieces = len(token_buckets(tokens)) * (len(spec.layers) + 1)
    return _activations(spec, tokens) + _projections(spec, tokens) + mixer + num_pieces * _PIECE_BYTES


def _logits(spec: ModelSpec, sizes: StepSizes) -> int:
    return max(sizes.max_rows, LOGPROB_POSITIONS) * spec.vocab_size * _LOGIT_COPIES * _FLOAT


def _draft(spec: ModelSpec, draft: DraftSpec, sizes: StepSizes) -> int:
    """A layer beside those of the model, and what it reads of them: all tokens of a step, and of a recorded one."""
    read = len(draft.read_layers) * draft.read_size or spec.hidden_size
    inputs = (sizes.step_len + 2 * sizes.max_rows) * (read + 5 * draft.layer.hidden_size) * _FLOAT
    return (
        inputs
        + (_recorded(draft.layer, sizes) if _is_recorded(spec, sizes) else 0)
        + _activations(draft.layer, sizes.step_len + sizes.max_rows)
        + _logits(draft.layer, sizes)
        + attention_bytes(draft.layer, sizes)
    )
