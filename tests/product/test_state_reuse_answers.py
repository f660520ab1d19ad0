"""Recurrent models through prefill and decode with reuse: hits at every kind of checkpoint, answers of transformers."""

from pathlib import Path

import pytest

from tests.product.in_process import DECODE, PREFILL, Product
from tests.runner.world import random_tokens

FAMILIES = (
    "qwen3_5",
    pytest.param("qwen3_next", marks=pytest.mark.slow),
    pytest.param("qwen3_5_moe", marks=pytest.mark.slow),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_hits_at_every_kind_of_checkpoint(tiny_models: Path, family: str) -> None:
    product = Product(tiny_models / family, 1, 1)
    prefill, decode = (product.worker(name).instance.parts.cache for name in (PREFILL, DECODE))
    system = random_tokens(70, 1)
    (cold,) = product.serve([*system, *random_tokens(53, 2)], max_tokens=20)
    equal, fork = product.serve([*system, *random_tokens(53, 2)], [*system, *random_tokens(9, 3)], max_tokens=20)
    assert equal.tokens == cold.tokens
    assert (equal.decode_cached_len, fork.decode_cached_len) == (112, 64)
    product.serve([*system, *random_tokens(17, 4)], [*system, *random_tokens(18, 5)], [*random_tokens(33, 6)])
    product.serve([*system, *random_tokens(53, 2), *cold.tokens, *random_tokens(5, 7)])
    for evicted in ((0, 1000), (3, 0), (5, 2)):
        for cache in (prefill, decode):
            cache.evict(evicted)
        (again,) = product.serve([*system, *random_tokens(53, 2)], max_tokens=20)
        assert again.tokens == cold.tokens
    product.close()
