"""What bounds the scratch memory of attention and recurrent layers. No torch: the launcher counts it."""

TILE_ROWS = 8
"""The GQA heads of one decoding row in most models; smaller tiles make many readers of a split slower."""
MAX_TILED_LEN = 16
"""Positions of a query that is computed in tiles."""
MAX_TILED_PARTS = 64
"""Partial results (positions times splits) of a query of several positions that is computed in tiles."""
MAX_PIECE_RESULTS = 128
"""Partial results (positions times pieces of keys) of a query of several positions in Triton's kernels, unless it has
more positions: those are one piece then."""
FLASHINFER_BYTES = 2 * (10 << 20)
"""Bytes of FlashInfer's two wrappers of a page group: plans of 8 MiB, lengths of requests, and a workspace of 1 MiB."""
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
CHUNK_LEN = 64
"""Tokens of a recurrent layer that are computed together."""
CHUNKS_AT_ONCE = 8
"""Chunks of one request whose triangular systems are solved together. More need memory and gain nothing."""
