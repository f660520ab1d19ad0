"""The entry of this backend: see `AttentionKind`; and in which pieces it computes."""

from deltaserve.compute.attention.registry import AttentionKind
from deltaserve.model.model_spec import ModelSpec
from deltaserve.settings.resolve import StepSizes

BLOCK_LEN = 128
"""Positions of one query that are computed together. Of its own keys, half their scores are computed in vain."""
TILE_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}
"""Keys, or scores, that exist at once in float32, unless one block's least tile needs more. On the CPU about the size
of a core's L2 cache."""
_LEAST_KEYS = 64
MOST_KEYS = 512
"""Most keys of a tile for several positions: more are scores without use."""
_FLOAT = 4


def tile_len(device: str, key_bytes: int, num_positions: int, num_keys: int) -> int:
    """Keys of a tile: a power of two that follows from the query alone. `key_bytes`: of a key in all heads, in float32;
    `num_keys`: how many the block sees."""
    most = MOST_KEYS if num_positions > 1 else max(_LEAST_KEYS, TILE_BYTES[device] // key_bytes)
    return max(_LEAST_KEYS, min(1 << (num_keys - 1).bit_length(), 1 << most.bit_length() - 1))


def _scratch(spec: ModelSpec, sizes: StepSizes) -> int:
    """Bytes of queries and results of all positions, and of tiles: keys, values, scores and what is made of them."""
    tokens, group = sizes.step_len + sizes.max_rows, spec.num_heads // spec.num_kv_heads
    rows = 4 * tokens * spec.num_heads * (spec.head_dim + 1) * _FLOAT
    least = max(_LEAST_KEYS, sizes.page_size) * spec.num_kv_heads * spec.head_dim * _FLOAT
    scores = MOST_KEYS * BLOCK_LEN * spec.num_kv_heads * group * _FLOAT
    return rows + 5 * max(TILE_BYTES[sizes.device], least) + 4 * max(TILE_BYTES[sizes.device], scores)


KIND = AttentionKind(
    name="torch",
    devices=("cpu", "cuda"),
    module="deltaserve.compute.attention.reference.torch_attention",
    scratch=_scratch,
)
