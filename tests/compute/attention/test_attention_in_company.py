"""What attention computes of a query has equal bits alone and beside others, by torch and by the native library."""

from dataclasses import replace

import pytest
import torch

from deltaserve.compute.attention.attention import Batch
from deltaserve.core.layout.dtype import DType
from tests.compute.attention.attention_world import Shape, World
from tests.compute.native.native_build import compiled_library

LENS = (330, 331, 12, 75, 255, 256, 700, 410, 271, 290, 1, 64)
Q_LENS = (1, 3, 1, 5, 1, 1, 1, 16, 4, 40, 1, 1)
SHAPES = {
    "plain": Shape(16, 256),
    "narrow heads": Shape(16, 64, kv_heads=1, group_size=3, head_dim=10),
    "wide heads": Shape(16, 256, kv_heads=2, group_size=4, head_dim=128, num_layers=1),
    "pages of one": Shape(1, 32),
    "window": Shape(16, 32, window_len=40),
    "latents": Shape(16, 64, kv_heads=1, group_size=8, head_dim=40, latent_dim=32),
    "bfloat16": Shape(16, 256, dtype=DType.BFLOAT16, kv_dtype=DType.BFLOAT16, head_dim=64),
}
BACKENDS = ("torch", "native", "native, 3 threads")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SHAPES)
@torch.inference_mode()
def test_company_changes_no_bit(name: str, backend: str) -> None:
    torch.set_num_threads(1)
    shape = SHAPES[name]
    if backend != "torch":
        isa = compiled_library().instruction_sets[-1].name
        shape = replace(shape, isa=isa, num_threads=3 if "3" in backend else 1)
    world = World(shape, LENS)
    world.fill(Q_LENS)
    queries = world.queries(Q_LENS)
    q = world.random_q(sum(Q_LENS))
    parts = torch.split(q, list(Q_LENS))
    want = [world.run(Batch((query,), shape.split_tokens), 0, part) for query, part in zip(queries, parts, strict=True)]
    for order in (range(len(queries)), range(len(queries) - 1, -1, -1), (0, 4, 10), (3, 8, 1, 6)):
        batch = Batch(tuple(queries[index] for index in order), shape.split_tokens)
        got = world.run(batch, 0, torch.cat([parts[index] for index in order]))
        for index, found in zip(order, torch.split(got, [Q_LENS[index] for index in order]), strict=True):
            assert torch.equal(found, want[index]), f"query {index} of {tuple(order)}"
