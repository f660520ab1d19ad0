"""StepOps by the native library: one call for each, where torch takes several passes over its rows, and products: of
few rows at the rate at which their matrix can be read, of many where it has an arithmetic of its own for them."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from deltaserve.compute.layers.delta_rule import DeltaRuns, DeltaTokens
from deltaserve.compute.layers.exact_rows import ExactRows
from deltaserve.compute.layers.grouped_experts import GroupedExperts
from deltaserve.compute.layers.step_ops import HeadNorm, Peaks, StepOps
from deltaserve.compute.native.native_library import NativeContext
from deltaserve.compute.weights.block_matrix import BlockMatrix, Matrix, Stacked
from deltaserve.compute.weights.packing import product
from deltaserve.core.errors import ConfigError
from deltaserve.core.layout.dtype import DType
from deltaserve.core.layout.spec import CacheSpec, StateGroup
from deltaserve.core.quantization import Quantization
from deltaserve.model.layers.layer_spec import Activation

TYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Types of rows that the library knows |-> its number for them."""
_ACTIVATIONS = {Activation.SILU: 0, Activation.GELU_TANH: 1}
_SCALE_TYPES = {2: 2, 4: 0}
"""Bytes of a scale |-> float16 or float32, of DsElement."""
_PANEL = 64
"""Columns of a product that lie together."""
_TESTED_ROWS = 18
"""Rows of a tested product that must have oneDNN's bits: more than a tile register holds."""

_Shape = tuple[torch.dtype, int, int]


class _AddNorm(ctypes.Structure):
    """DsAddNorm of native.h."""

    _fields_ = (
        ("type", ctypes.c_int32),
        ("weight_type", ctypes.c_int32),
        ("num_rows", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("added", ctypes.c_void_p),
        ("after", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("normed", ctypes.c_void_p),
        ("eps", ctypes.c_float),
    )


class _Turn(ctypes.Structure):
    """DsTurn of native.h."""

    _fields_ = (
        ("type", ctypes.c_int32),
        ("weight_type", ctypes.c_int32),
        ("num_tokens", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("turning_dim", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("eps", ctypes.c_float),
    )


class _Gate(ctypes.Structure):
    """DsGate of native.h."""

    _fields_ = (
        ("type", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("num_rows", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("gate_up", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    )


class _Peaks(ctypes.Structure):
    """DsPeaks of native.h."""

    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("indexes", ctypes.c_void_p),
        ("finite", ctypes.c_void_p),
    )


class _PackedProduct(ctypes.Structure):
    """DsProduct of native.h."""

    _fields_ = (
        ("type", ctypes.c_int32),
        ("num_rows", ctypes.c_int64),
        ("num_columns", ctypes.c_int64),
        ("depth", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("panels", ctypes.c_void_p),
        ("panel_depth", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    )


class _Blocks(ctypes.Structure):
    """DsBlocks of native.h."""

    _fields_ = (
        ("bits", ctypes.c_int32),
        ("run_len", ctypes.c_int32),
        ("scale_type", ctypes.c_int32),
        ("zero", ctypes.c_int32),
        ("has_offsets", ctypes.c_int32),
        ("num_columns", ctypes.c_int64),
        ("depth", ctypes.c_int64),
        ("panels", ctypes.c_void_p),
    )


class _BlockProduct(ctypes.Structure):
    """DsBlockProduct of native.h."""

    _fields_ = (
        ("type", ctypes.c_int32),
        ("rounds", ctypes.c_int32),
        ("num_rows", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("blocks", _Blocks),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
    )


class _DeltaRule(ctypes.Structure):
    """DsDeltaRule of native.h."""

    _fields_ = (
        ("num_tokens", ctypes.c_int64),
        ("num_states", ctypes.c_int64),
        ("num_key_heads", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("key_dim", ctypes.c_int64),
        ("value_dim", ctypes.c_int64),
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("decay", ctypes.c_void_p),
        ("beta", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("states", ctypes.c_void_p),
        ("spans", ctypes.c_void_p),
        ("num_spans", ctypes.c_int64),
    )


class _Function(Protocol):
    """One of native.h that takes a context, an instruction set and a structure."""

    def __call__(self, context: int, isa: int, call: object, /) -> bool: ...


class NativeOps:
    """StepOps for tensors on the CPU in float32 or bfloat16. For one thread at a time.

    Guarantee: for one instruction set a token's result has equal bits whatever else is in its batch, on any number of
    threads. oneDNN multiplies many rows where it has these bits, too (exact_rows.py); where the library does not know
    how a matrix is packed torch multiplies, with that promise for one number of threads.
    """

    def __init__(self, context: NativeContext) -> None:
        self._add_norm = _function(context, "ds_add_norm", _AddNorm)
        self._turn = _function(context, "ds_turn", _Turn)
        self._gate = _function(context, "ds_gate", _Gate)
        self._peaks = _function(context, "ds_peaks", _Peaks)
        self._product = _function(context, "ds_product", _PackedProduct)
        self._delta_rule = _function(context, "ds_delta_rule", _DeltaRule)
        self._block_product = _function(context, "ds_block_product", _BlockProduct)
        context.functions.ds_product_rows.restype = ctypes.c_int64
        self.grouped: GroupedExperts | None = None
        self._panels: dict[_Shape, int | None] = {}
        """Shape of a packed matrix met so far |-> depth of its panels; None: torch multiplies."""
        self._isa = context.instruction_set.number
        self._exact = ExactRows()
        self._context = context

    def product(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        """Codes natively; others in the memory that oneDNN packed: many rows by oneDNN where it has the same bits and
        is faster."""
        if isinstance(weight, BlockMatrix):
            out = x.new_empty(x.shape[0], weight.shape[0])
            self._multiply_blocks(x, weight, bias, out)
            return out
        if isinstance(weight, Stacked):
            out = x.new_empty(x.shape[0], weight.shape[0])
            for part, rows in weight.slices():
                own_bias = None if bias is None else bias[rows]
                if isinstance(part, BlockMatrix):
                    self._multiply_blocks(x, part, own_bias, out[:, rows])
                else:
                    out[:, rows] = self.product(x, part, own_bias)
            return out
        panel_depth = self._packed_depth(weight)
        if panel_depth is None:
            return self._exact.product(x, weight, bias)
        if x.shape[0] > self._few_rows(x.dtype):
            with self._torch_threads():
                if self._exact.may_multiply(x.shape[0], weight, bias, partial(self._multiplied, panel_depth)):
                    return product(x, weight, bias)
        return self._multiplied(panel_depth, x, weight, bias)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        return self._normed(x, None, None, weight, eps, None)

    def add_norm(
        self, x: Tensor, added: Tensor, after: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        x, added = x.contiguous(), added.contiguous()
        total = torch.empty_like(x)
        return total, self._normed(x, added, after, weight, eps, total)

    def turned(self, x: Tensor, norm: HeadNorm | None, rope: tuple[Tensor, Tensor]) -> Tensor:
        x = x if x.stride(2) == 1 else x.contiguous()
        cos, sin = rope
        out = x.new_empty(x.shape)
        weight = x if norm is None else norm.weight
        call = _Turn(
            TYPES[x.dtype],
            TYPES[weight.dtype],
            *x.shape,
            cos.shape[-1],
            x.data_ptr(),
            x.stride(0),
            x.stride(1),
            None if norm is None else weight.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            out.data_ptr(),
            0.0 if norm is None else norm.eps,
        )
        self._do(self._turn, call)
        return out

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate_up = gate_up.contiguous()
        num_rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(num_rows, dim)
        of_type, kind = TYPES[gate_up.dtype], _ACTIVATIONS[activation]
        self._do(self._gate, _Gate(of_type, kind, num_rows, dim, gate_up.data_ptr(), out.data_ptr()))
        return out

    def recurred(self, tokens: DeltaTokens, states: Tensor, runs: DeltaRuns) -> Tensor:
        """One token after the other, whatever they are: prompts have the bits of single tokens."""
        fields = tokens.q, tokens.k, tokens.v, tokens.log_decay.exp(), tokens.beta
        arrays = [field.contiguous() for field in fields]
        (num_tokens, key_heads, group, value_dim), out = tokens.v.shape, torch.empty_like(arrays[2])
        call = _DeltaRule(
            num_tokens,
            len(states),
            key_heads,
            key_heads * group,
            tokens.k.shape[2],
            value_dim,
            *(array.data_ptr() for array in arrays),
            out.data_ptr(),
            states.data_ptr(),
            runs.table.data_ptr(),
            len(runs.table),
        )
        self._do(self._delta_rule, call)
        return out

    def peaks(self, logits: Tensor) -> Peaks:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        num_rows, dim = logits.shape
        indexes, finite = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.bool)
        pointers = logits.data_ptr(), logits.stride(0), indexes.data_ptr(), finite.data_ptr()
        self._do(self._peaks, _Peaks(num_rows, dim, *pointers))
        return Peaks(finite.tolist(), indexes.tolist())

    def _normed(
        self, x: Tensor, added: Tensor | None, after: Tensor | None, weight: Tensor, eps: float, total: Tensor | None
    ) -> Tensor:
        normed = x.new_empty(x.shape)
        call = _AddNorm(
            TYPES[x.dtype],
            TYPES[weight.dtype],
            *x.shape,
            x.data_ptr(),
            x.stride(0),
            None if added is None else added.data_ptr(),
            None if after is None else after.data_ptr(),
            weight.data_ptr(),
            None if total is None else total.data_ptr(),
            normed.data_ptr(),
            eps,
        )
        self._do(self._add_norm, call)
        return normed

    def _few_rows(self, dtype: torch.dtype) -> int:
        """Most rows of a product that is native whoever else has the same bits. 0: no product of this type is
        native."""
        return int(self._context.functions.ds_product_rows(self._isa, TYPES[dtype]))

    def _packed_depth(self, weight: Tensor) -> int | None:
        """Depth of a packed matrix's panels; None: torch multiplies with it."""
        if not weight.is_mkldnn:
            return None
        num_columns, depth = weight.shape
        shape = (weight.dtype, num_columns, depth)
        if shape not in self._panels:
            self._panels[shape] = self._panel_depth(weight)
        return self._panels[shape]

    def _panel_depth(self, weight: Tensor) -> int | None:
        """oneDNN does not say how it packs, but it packs matrices of one shape alike: a product tells."""
        if not all(hasattr(torch.ops.mkldnn, name) for name in ("_nbytes", "data_ptr")):  # of torch's own use
            return None
        num_columns, depth = weight.shape
        padded = -(-num_columns // _PANEL) * _PANEL
        num_bytes = int(torch.ops.mkldnn._nbytes(weight))
        panel_depth, rest = divmod(num_bytes, padded * weight.dtype.itemsize)
        is_whole = weight.dtype == torch.float32 or depth % 2 == 0
        if rest or panel_depth < depth or not is_whole or not self._few_rows(weight.dtype):
            return None
        x = torch.randn(_TESTED_ROWS, depth, generator=torch.Generator().manual_seed(0)).to(weight.dtype)
        want, got = product(x, weight).float(), self._multiplied(panel_depth, x, weight, None).float()
        size = float(want.abs().mean())
        # Sums in another order differ by the last bits of their parts; another layout gives unrelated numbers.
        is_same = size > 0.0 and torch.allclose(want, got, rtol=2.0**-6, atol=size * 2.0**-6)
        return panel_depth if is_same else None

    def _multiplied(self, panel_depth: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        num_rows, (num_columns, depth) = x.shape[0], weight.shape
        out = x.new_empty(num_rows, num_columns)
        call = _PackedProduct(
            TYPES[x.dtype],
            num_rows,
            num_columns,
            depth,
            x.data_ptr(),
            x.stride(0),
            torch.ops.mkldnn.data_ptr(weight),
            panel_depth,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
        )
        self._do(self._product, call)
        return out

    @contextmanager
    def _torch_threads(self) -> Iterator[None]:
        """Within, torch computes on its own threads and on cores that nobody else computes on, as everything here."""
        if self._context.own_threads == self._context.num_threads:
            yield
            return
        with self._context.borrowed_threads() as num_threads:
            torch.set_num_threads(num_threads)
            try:
                yield
            finally:
                torch.set_num_threads(self._context.own_threads)

    def _multiply_blocks(self, x: Tensor, weight: BlockMatrix, bias: Tensor | None, out: Tensor) -> None:
        x = x if x.stride(1) == 1 else x.contiguous()
        form, (num_columns, depth) = weight.form, weight.shape
        blocks = _Blocks(
            form.bits,
            form.run_len,
            _SCALE_TYPES[form.scale_bytes],
            form.zero,
            form.has_offsets,
            num_columns,
            depth,
            weight.panels.data_ptr(),
        )
        call = _BlockProduct(
            TYPES[x.dtype],
            weight.rounds_inputs,
            x.shape[0],
            x.data_ptr(),
            x.stride(0),
            blocks,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            out.stride(0),
        )
        self._do(self._block_product, call)

    def _do(self, function: _Function, call: ctypes.Structure) -> None:
        if not function(self._context.address, self._isa, ctypes.byref(call)):
            raise ValueError(f"{type(call).__name__[1:]}: types that the native library does not compute with")


def _function(context: NativeContext, name: str, call: type[ctypes.Structure]) -> _Function:
    found = getattr(context.functions, name)
    found.restype = ctypes.c_bool
    found.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(call))
    made: _Function = found
    return made


def usable_quantization(asked: Quantization, ops: StepOps) -> Quantization:
    """Codes are computed natively, or not at all. Raises ConfigError where they cannot be had and values do not do."""
    if asked == "none" or isinstance(ops, NativeOps):
        return asked
    if asked != "auto":
        raise ConfigError(f"--quantization {asked}: computed by the native library, which does not serve here")
    return "none"


def check_deterministic(cache: CacheSpec, dtype: DType, ops: StepOps) -> None:
    """Raises ConfigError where something is rounded by what a step computes. `dtype`: of the model."""
    problem = None
    kept = {group.name: group.dtype for group in cache.groups if isinstance(group, StateGroup)}
    exact = {"conv": (DType.FLOAT32, dtype), "ssm": (DType.FLOAT32,)}
    if not isinstance(ops, NativeOps):
        problem = "only the native library rounds so, in float32 and bfloat16, and it does not compute here"
    elif any(kept_as not in exact[name] for name, kept_as in kept.items()):
        problem = (
            "a step's end rounds the states of this model: keep them in float32 (--mamba-ssm-dtype), and KV in no type "
            "narrower than the model's (--kv-cache-dtype)"
        )
    if problem is not None:
        raise ConfigError(f"--enable-deterministic-inference: {problem}")
