"""Where weights live: fused tensors, and for every checkpoint name (canonical, see tensors.py) the part it fills."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from deltaserve.compute.layers.step_ops import StepOps
from deltaserve.compute.weights.block_matrix import BlockMatrix, Matrix, Stacked, empty_matrix
from deltaserve.compute.weights.packing import pack
from deltaserve.core.layout.shard import Shard
from deltaserve.model.code_plan import CodeRules
from deltaserve.model.formats.block_forms import BlockForm
from deltaserve.model.shard_rules import PaddedRows, Shape
from deltaserve.model.tensor_part import TensorPart


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b. Sizes here are those of one rank."""

    weight: Matrix  # [out, in]
    bias: Tensor | None  # [out]; of a map whose results are added up over ranks: on the first of them

    def product(self, x: Tensor, ops: StepOps) -> Tensor:
        """x [T, in] -> [T, out]"""
        return ops.product(x, self.weight, self.bias)

    def packed(self, rules: CodeRules) -> "Linear":
        return Linear(pack(self.weight, rules), self.bias)


class CodeRows(NamedTuple):
    """Where a file's tensor goes that is kept as codes: rows of a matrix, from one on."""

    matrix: BlockMatrix
    first: int


@dataclass(slots=True)
class CodeTable:
    """Where tensors go that are kept as codes."""

    forms: Mapping[str, BlockForm] = field(default_factory=dict)
    """Form of each tensor that is kept as codes, by canonical name."""
    rounds_inputs: bool = False
    targets: dict[str, CodeRows] = field(default_factory=dict)

    def rows(self, shapes: Mapping[str, Shape]) -> BlockMatrix:
        """A matrix for tensors of one form, one after the other."""
        first = next(iter(shapes))
        shape = (sum(shape[0] for shape in shapes.values()), shapes[first][1])
        matrix, row = empty_matrix(self.forms[first], shape, self.rounds_inputs), 0
        for name, (count, _) in shapes.items():
            self.targets[name] = CodeRows(matrix, row)
            row += count
        return matrix


@dataclass(slots=True)
class TargetTable:
    """Allocates what a rank holds of the tensors that tensors.py lists, and names their parts."""

    parts: Mapping[str, TensorPart]
    shard: Shard
    dtype: torch.dtype
    device: torch.device
    targets: dict[str, Tensor] = field(default_factory=dict)
    """A file's tensor is copied here, repeated over leading axes that only the target has."""
    codes: CodeTable = field(default_factory=CodeTable)

    @property
    def exact(self) -> "TargetTable":
        """The same, for targets in float32."""
        return replace(self, dtype=torch.float32)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _padded(self, names: Iterable[str]) -> bool:
        """Whether rows are held that no file fills: they are zeros."""
        return self.shard.size > 1 and any(isinstance(self.parts[name].rule, PaddedRows) for name in names)

    def whole(self, name: str) -> Tensor:
        """A tensor of its own."""
        part = self.parts[name]
        dtype = torch.float32 if part.added else self.dtype
        target = torch.empty(part.shape_on(self.shard), dtype=dtype, device=self.device)
        if self._padded((name,)):
            target.zero_()
        self.targets[name] = target
        return target

    def transposed(self, name: str) -> Tensor:
        """A target as of `whole`, with the last two axes of the file's tensor exchanged."""
        *count, rows, cols = self.parts[name].shape_on(self.shard)
        target = self.empty(*count, cols, rows)
        self.targets[name] = target.transpose(-1, -2)
        return target

    def fused(self, prefix: str, *names: str) -> Linear:
        """Rows of several linear maps, one after the other; all have a bias, or none."""
        weight = self.matrix(*(f"{prefix}.{name}.weight" for name in names))
        bias = self.parts.get(f"{prefix}.{names[0]}.bias")
        has_bias = bias is not None and bool(bias.pieces(self.shard))
        return Linear(weight, self._rows(f"{prefix}.{name}.bias" for name in names) if has_bias else None)

    def matrix(self, *names: str) -> Matrix:
        """Rows of several matrices, one after the other: codes where they are to be kept, those of a kind together."""
        groups = [(form, list(of_form)) for form, of_form in groupby(names, self.codes.forms.get)]
        parts = [
            self._rows(of_form) if form is None else self.codes.rows(self._shapes(of_form)) for form, of_form in groups
        ]
        return parts[0] if len(parts) == 1 else Stacked(tuple(parts))

    def _shapes(self, names: Iterable[str]) -> dict[str, Shape]:
        return {name: self.parts[name].shape_on(self.shard) for name in names}

    def _rows(self, names: Iterable[str]) -> Tensor:
        shapes = self._shapes(names)
        first = next(iter(shapes.values()))
        target = self.empty(sum(shape[0] for shape in shapes.values()), *first[1:])
        if self._padded(shapes):
            target.zero_()
        row = 0
        for name, shape in shapes.items():
            self.targets[name] = target[row : row + shape[0]]
            row += shape[0]
        return target
