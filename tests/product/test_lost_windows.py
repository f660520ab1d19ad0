"""What a window showed is evicted, or the full pages under it, on either side: answers stay those of transformers."""

from itertools import product
from pathlib import Path

import pytest

from tests.cells import cells
from tests.compute.executor.world import random_tokens
from tests.e2e.reference import MAX_PAYLOAD_BYTES, moved_bytes
from tests.product.in_process import DECODE, PREFILL, Product

ALL = 1000
LOST = {"windows": (0, ALL), "full pages": (ALL, 0), "both": (ALL, ALL)}


@pytest.mark.parametrize(
    ("family", "lost"),
    cells(product(("gemma3_text", "gpt_oss"), LOST), lambda family, lost: family == "gpt_oss" and lost != "both"),
)
def test_answers_after_eviction_on_either_side(tiny_models: Path, family: str, lost: str) -> None:
    folder = tiny_models / family
    product = Product(folder, 1, 1)
    prompt = random_tokens(170, 1)
    (cold,) = product.serve(prompt)
    assert 0 < cold.transferred_bytes - moved_bytes(folder, 16, 170, 0) < MAX_PAYLOAD_BYTES
    product.worker(DECODE).instance.parts.cache.evict(LOST[lost])
    (again,) = product.serve(prompt)
    hit = 160 if lost == "windows" else 0
    assert again.decode_cached_len == hit
    assert 0 < again.transferred_bytes - moved_bytes(folder, 16, 170, hit, 0) < MAX_PAYLOAD_BYTES
    product.worker(PREFILL).instance.parts.cache.evict(LOST[lost])
    (third,) = product.serve([*prompt, *again.tokens, 1, 2, 3])
    assert third.decode_cached_len == 160
    product.close()
