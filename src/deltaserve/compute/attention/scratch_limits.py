"""What bounds the partial results of attention. No torch: the launcher counts it."""

from deltaserve.model.model_spec import ModelSpec
from deltaserve.settings.resolve import StepSizes

MAX_TILED_LEN = 16
"""Positions of a query that is computed in tiles."""
MAX_PIECE_RESULTS = 128
"""Partial results (positions times pieces of keys) of a query of several positions in kernels for GPUs, unless it has
more positions: those are one piece then."""


def part_bytes(spec: ModelSpec, sizes: StepSizes) -> int:
    """Bytes of partial results in float32, of decoding rows by split and of others by piece, and of the work list."""
    rows, splits = sizes.max_rows, sizes.context_len // sizes.split_tokens + 2
    results = rows * max(MAX_PIECE_RESULTS, splits) + sizes.step_len
    per_result = spec.num_heads * (spec.head_dim + 1) * 4
    tiles = results * -(-spec.num_heads // (16 * spec.num_kv_heads)) * 8
    pages = (rows + 1) * (sizes.context_len // sizes.page_size + 1)
    return results * per_result + (tiles + pages + 4 * (sizes.step_len + rows)) * 4
