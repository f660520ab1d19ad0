"""Weight matrices laid out once for the CPU's matrix library, which otherwise does it in every product."""

import logging

import torch
import torch.nn.functional as functional
from torch import Tensor

from deltaserve.compute.weights.block_matrix import BlockMatrix, Matrix, Stacked, round_matrix
from deltaserve.model.code_plan import CODE_RULES, CodeRules
from deltaserve.model.formats.block_forms import WHOLE_LEN

_log = logging.getLogger(__name__)
_PAYS = {torch.bfloat16: frozenset({"AVX512"}), torch.float32: frozenset({"AVX2", "AVX512"})}
"""Type |-> instruction sets with which packed products are faster (measured)."""

_LAID_OUT_FOR = {torch.bfloat16: 1, torch.float32: None}
"""Type |-> rows that oneDNN lays a matrix out for. For one row of bfloat16 in panels of 64 columns, which the native
library reads; for more, where there are tile registers, in panels of 32."""


def packing_pays(dtype: torch.dtype, capability: str) -> bool:
    """`capability`: as torch names the instruction set."""
    return capability in _PAYS.get(dtype, ())


def pack(weight: Matrix, rules: CodeRules = CODE_RULES["none"]) -> Matrix:
    """[out, in] -> the same for `product`: codes where they are rounded to, else opaque where packing pays."""
    if isinstance(weight, Stacked):
        packed = tuple(pack(part, rules) for part in weight.parts)
        return Stacked(tuple(part for part in packed if not isinstance(part, Stacked)))
    if isinstance(weight, BlockMatrix) or weight.device.type != "cpu":
        return weight
    if rules.rounds_weights and weight.shape[1] % WHOLE_LEN == 0:
        try:
            return round_matrix(weight, rules.rounds_inputs)
        except ValueError as error:
            _log.warning("weights: a matrix of %d x %d is not rounded: %s", *weight.shape, error)
    return pack_values(weight)


def pack_values(weight: Tensor) -> Tensor:
    """[out, in] -> the same for `product`: opaque where packing pays, else `weight`."""
    if weight.device.type != "cpu" or not packing_pays(weight.dtype, torch.backends.cpu.get_cpu_capability()):
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _LAID_OUT_FOR[weight.dtype])
    return packed


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in] times weight [out, in], plain or packed -> [T, out], all rows at once: a row's bits may follow from how
    many they are (exact_rows.py)."""
    if not weight.is_mkldnn:
        return functional.linear(x, weight, bias)
    num_rows = x.shape[0]
    num_more = packed_rows(num_rows) - num_rows
    if num_more:  # padding by nothing copies
        x = functional.pad(x, (0, 0, 0, num_more))  # [T', in]
    packed: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return packed[:num_rows]


def packed_rows(num_rows: int) -> int:
    """Rows of a packed product: few different ones, for oneDNN keeps generated code for each, half a MiB a matrix shape
    (684 MiB after 256 lengths of 5 shapes, 1,024 pieces being the most it keeps). Rows that fill up cost what others
    cost, so they are less than a quarter of what was asked for."""
    if num_rows <= 8:
        return num_rows
    step = min(64, 1 << (num_rows - 1).bit_length() - 3)
    return -(-num_rows // step) * step
