"""What bounds the scratch memory of attention and recurrent layers. No torch: the launcher counts it."""

from deltaserve.model.model_spec import ModelSpec
from deltaserve.settings.resolve import StepSizes

TILE_ROWS = 8
"""The GQA heads of one decoding row in most models; smaller tiles make many readers of a split slower."""
MAX_TILED_LEN = 16
"""Positions of a query that is computed in tiles."""
MAX_TILED_PARTS = 64
"""Partial results (positions times splits) of a query of several positions that is computed in tiles."""
MAX_PIECE_RESULTS = 128
"""Partial results (positions times pieces of keys) of a query of several positions in kernels for GPUs, unless it has
more positions: those are one piece then."""
BLOCK_BYTES = {"cpu": 1 << 20, "cuda": 256 << 20}
"""Keys of one block of tiles, and scores of one pass, in float32. On the CPU about the size of a core's L2 cache."""
MAX_POSITIONS = 1024
"""Positions of a long query whose results are kept in float32 at once."""
MAX_KEYS = 2048
"""Keys and values of a long query that are in float32 at once."""
CAUSAL_POSITIONS = 128
"""Positions in one product of a long query: its scores above the diagonal are computed in vain."""
SCORE_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}
"""Bytes of scores in one product of a long query, by device, unless a single KV head needs more."""


def part_bytes(spec: ModelSpec, sizes: StepSizes) -> int:
    """Bytes of partial results in float32, of decoding rows by split and of others by piece, and of the work list."""
    rows, splits = sizes.max_rows, sizes.context_len // sizes.split_tokens + 2
    results = rows * max(MAX_PIECE_RESULTS, splits) + sizes.step_len
    per_result = spec.num_heads * (spec.head_dim + 1) * 4
    tiles = results * -(-spec.num_heads // (16 * spec.num_kv_heads)) * 8
    pages = (rows + 1) * (sizes.context_len // sizes.page_size + 1)
    return results * per_result + (tiles + pages + 4 * (sizes.step_len + rows)) * 4
