"""Triton kernels of a step's operators beside attention and products. Needs triton when it is imported.

A program computes one token, or some of its heads or channels, alone: no bit follows from the rest of the step.
Arithmetic is float32, and rounds to the type of the rows where torch's operators, called one after the other, do.
"""

import triton
import triton.language as tl


@triton.jit
def _norm_factor(numbers, eps, N: tl.constexpr, AXIS: tl.constexpr):
    """1 / root of the mean square along AXIS; channels beyond N are 0."""
    return tl.rsqrt(tl.sum(numbers * numbers, AXIS) / N + eps)


@triton.jit
def norm_rows(
    x,  # [T, N] by rows
    added,  # [T, N]; anything unless HAS_ADDED
    after,  # [N] weight of a norm of `added`; anything unless HAS_AFTER
    weight,  # [N]
    total,  # [T, N] x + added; anything unless HAS_ADDED
    out,  # [T, N] norm of that
    eps,
    STRIDE: tl.constexpr,  # of rows of x
    N: tl.constexpr,
    W: tl.constexpr,  # N or more, a power of two
    HAS_ADDED: tl.constexpr,
    HAS_AFTER: tl.constexpr,
):
    """Grid [T]."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, W)
    is_in = column < N
    row = token * N + column
    numbers = tl.load(x + token * STRIDE + column, mask=is_in, other=0.0).to(tl.float32)
    if HAS_ADDED:
        more = tl.load(added + row, mask=is_in, other=0.0).to(tl.float32)
        if HAS_AFTER:
            gain = tl.load(after + column, mask=is_in, other=0.0).to(tl.float32)
            more = (more * _norm_factor(more, eps, N, 0) * gain).to(x.dtype.element_ty).to(tl.float32)
        rounded = (numbers + more).to(x.dtype.element_ty)
        tl.store(total + row, rounded, mask=is_in)
        numbers = rounded.to(tl.float32)
    gain = tl.load(weight + column, mask=is_in, other=0.0).to(tl.float32)
    normed = numbers * _norm_factor(numbers, eps, N, 0) * gain
    tl.store(out + row, normed.to(out.dtype.element_ty), mask=is_in)


@triton.jit
def _normed(numbers, factor, gains, x, weight):
    """Rounded as torch does: to the type of the weights before and after they count, then to that of the rows."""
    normed = (numbers * factor[:, None]).to(weight.dtype.element_ty).to(tl.float32)
    return (normed * gains).to(weight.dtype.element_ty).to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def turn_heads(
    x,  # [T, H, D] by tokens and heads, channels adjacent
    weight,  # [H, D]; anything unless HAS_NORM
    cos,  # [T, R]
    sin,  # [T, R] with its sign
    out,  # [T, H, D]
    eps,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,  # channels that turn, i with i + R / 2
    HALF: tl.constexpr,  # R / 2 or more, a power of two
    REST: tl.constexpr,  # D - R or more, a power of two; 0: none
    HEADS: tl.constexpr,  # of a program
    HAS_NORM: tl.constexpr,
):
    """Grid [T, ceil(H / HEADS)]."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = (head < NUM_HEADS)[:, None]
    c = tl.arange(0, HALF)
    is_half = (c < R // 2)[None, :]
    source = x + token * TOKEN_STRIDE + head[:, None] * HEAD_STRIDE
    target = out + (token * NUM_HEADS + head[:, None]) * D
    first, second = c[None, :], c[None, :] + R // 2
    low = tl.load(source + first, mask=is_head & is_half, other=0.0).to(tl.float32)
    high = tl.load(source + second, mask=is_head & is_half, other=0.0).to(tl.float32)
    if REST > 0:
        rest = tl.arange(0, REST)[None, :]
        is_rest = is_head & (rest < D - R)
        still = tl.load(source + R + rest, mask=is_rest, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(low * low + high * high, 1)
        if REST > 0:
            squares += tl.sum(still * still, 1)
        factor = tl.rsqrt(squares / D + eps)
        gains = weight + head[:, None] * D
        low_gain = tl.load(gains + first, mask=is_head & is_half, other=0.0).to(tl.float32)
        high_gain = tl.load(gains + second, mask=is_head & is_half, other=0.0).to(tl.float32)
        low, high = _normed(low, factor, low_gain, x, weight), _normed(high, factor, high_gain, x, weight)
        if REST > 0:
            still_gain = tl.load(gains + R + rest, mask=is_rest, other=0.0).to(tl.float32)
            still = _normed(still, factor, still_gain, x, weight)
    turn = token * R
    low_cos = tl.load(cos + turn + first, mask=is_half, other=0.0).to(tl.float32)
    high_cos = tl.load(cos + turn + second, mask=is_half, other=0.0).to(tl.float32)
    low_sin = tl.load(sin + turn + first, mask=is_half, other=0.0).to(tl.float32)
    high_sin = tl.load(sin + turn + second, mask=is_half, other=0.0).to(tl.float32)
    kind = x.dtype.element_ty
    turned_low = (low * low_cos).to(kind).to(tl.float32) + high * low_sin
    turned_high = (high * high_cos).to(kind).to(tl.float32) + low * high_sin
    tl.store(target + first, turned_low.to(kind), mask=is_head & is_half)
    tl.store(target + second, turned_high.to(kind), mask=is_head & is_half)
    if REST > 0:
        tl.store(target + R + rest, still.to(kind), mask=is_rest)


@triton.jit
def gate_rows(
    gate_up,  # [T, 2 * N]
    out,  # [T, N]
    N: tl.constexpr,
    W: tl.constexpr,  # channels of a program
    IS_SILU: tl.constexpr,  # else gelu by tanh
):
    """Grid [T, ceil(N / W)]."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * W + tl.arange(0, W)
    is_in = column < N
    row = gate_up + token * (2 * N) + column
    gate = tl.load(row, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(row + N, mask=is_in, other=0.0).to(tl.float32)
    slope = gate
    if not IS_SILU:  # 0.5 (1 + tanh u) = 1 / (1 + e^-2u)
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    active = (gate / (1.0 + tl.exp(tl.minimum(-slope, 88.0)))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * N + column, (active * up).to(out.dtype.element_ty), mask=is_in)
