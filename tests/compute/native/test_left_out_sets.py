"""An instruction set that brings nothing for a kernel computes with that of a former one: to the bit."""

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from deltaserve.compute.attention.attention import Batch
from deltaserve.compute.layers.native_ops import NativeOps
from deltaserve.compute.layers.step_ops import HeadNorm
from deltaserve.compute.native.compile_library import KERNEL_FLAGS, LEFT_OUT
from deltaserve.compute.weights.packing import pack
from deltaserve.core.layout.dtype import DType
from deltaserve.model.formats.block_forms import TYPE_FORMS
from deltaserve.model.layers.layer_spec import Activation
from tests.compute.attention.attention_world import Shape, World
from tests.compute.native.block_matrices import random_matrix
from tests.compute.native.native_build import native_context
from tests.compute.native.test_native_delta_rule import runs_of, states_of, tokens_of

SETS = tuple(KERNEL_FLAGS["x86_64"])
DTYPES = (torch.float32, torch.bfloat16)


def draw(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def attention(isa: str) -> Sequence[Tensor]:
    lens, q_lens, found = (200, 77), (40, 1), []
    for dtype in (DType.FLOAT32, DType.BFLOAT16):
        world = World(Shape(num_layers=1, head_dim=64, dtype=dtype, kv_dtype=dtype, isa=isa), lens)
        world.fill(q_lens)
        batch = Batch(world.queries(q_lens), world.shape.split_tokens)
        found.append(world.run(batch, 0, world.random_q(batch.num_tokens)))
    return found


def blocks(isa: str) -> Sequence[Tensor]:
    ops = NativeOps(native_context(isa))
    matrices = [random_matrix(form, 70, 544, rounds) for form in TYPE_FORMS.values() for rounds in (False, True)]
    return [ops.product(draw(torch.float32, 20, 544), matrix) for matrix in matrices]


def delta_rule(isa: str) -> Sequence[Tensor]:
    tokens, states = tokens_of(64, 64, 64), states_of(2, 64, 64)
    return NativeOps(native_context(isa)).recurred(tokens, states, runs_of((0, 0, 60), (1, 60, 64))), states


def product(isa: str) -> Sequence[Tensor]:
    ops = NativeOps(native_context(isa))
    return [ops.product(draw(dtype, 20, 1100), pack(draw(dtype, 330, 1100))) for dtype in DTYPES]


def step_ops(isa: str) -> Sequence[Tensor]:
    ops, found = NativeOps(native_context(isa)), []
    for dtype in DTYPES:
        x, weight, heads = draw(dtype, 9, 515), draw(dtype, 515), draw(dtype, 9, 3, 44)
        rope = draw(dtype, 9, 1, 36).cos(), draw(dtype, 9, 1, 36).sin()
        found += [ops.norm(x, weight, 1e-6), *ops.add_norm(x, x, weight, weight, 1e-6)]
        found += [ops.turned(heads, HeadNorm(draw(dtype, 3, 44), 1e-6), rope)]
        found += [ops.gated(x[:, :-1], activation) for activation in Activation]
    return found


KERNELS: Mapping[str, Callable[[str], Sequence[Tensor]]] = {
    f"{compute.__name__}_kernel": compute for compute in (attention, blocks, delta_rule, product, step_ops)
}
"""File of a kernel |-> what it computes by an instruction set."""


@pytest.mark.parametrize(("kernel", "isa"), [(kernel, isa) for kernel, sets in LEFT_OUT.items() for isa in sets])
@torch.inference_mode()
def test_a_set_that_is_left_out_has_the_bits_of_a_former_one(kernel: str, isa: str) -> None:
    former = [name for name in SETS[: SETS.index(isa)] if name not in LEFT_OUT[kernel]][-1]
    found, want = (KERNELS[kernel](name) for name in (isa, former))
    assert all(torch.equal(one, other) for one, other in zip(found, want, strict=True))
