"""Triton kernels of a layer's experts: rows to their experts, products by blocks of rows, and the weighted sum. Needs
triton when it is imported.

A *pair* is a row and one of the k experts chosen for it, numbered row by row. Pairs of one expert stand together in an
order, cut into blocks of ROWS, for each of which the programs of one expert's matrix compute. How many blocks there may
be follows from the number of pairs; those that are nobody's end at once. (The idea is that of vLLM's
`moe_align_block_size`, vllm-project/vllm#2453 and #12222. Here the blocks are listed and the order has no gaps.)

Results stand at their pairs' own numbers, so that no bit of them follows from the order, and nothing is added up by
atomics. Arithmetic is float32, and rounds to the type of the rows where torch's operators, called one after the other,
do (moe.py).
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_pairs"])
def count_pairs(
    chosen,  # [P] int64
    counts,  # [E] int32, out
    num_pairs,  # P
    FIRST: tl.constexpr,  # id of the first expert held
    CHUNK: tl.constexpr,
):
    """Grid [E]."""
    expert = tl.program_id(0)
    found = tl.zeros([CHUNK], tl.int32)
    for first in range(0, num_pairs, CHUNK):
        pair = first + tl.arange(0, CHUNK)
        found += (tl.load(chosen + pair, mask=pair < num_pairs, other=-1) == FIRST + expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def place_pairs(
    chosen,  # [P] int64
    counts,  # [E] int32: pairs of each expert
    order,  # [P] int32, out: pairs of one expert together, in their order; those of experts held elsewhere are left out
    blocks,  # [N, 3] int32, out: expert, places in `order` from and to; expert -1: nobody's
    num_pairs,  # P
    num_blocks,  # N
    FIRST: tl.constexpr,
    HELD: tl.constexpr,  # E
    EXPERTS: tl.constexpr,  # E or more, a power of two
    ROWS: tl.constexpr,  # of a block
    CHUNK: tl.constexpr,
):
    """Grid [E + 1]: an expert's pairs and blocks; the last program names the blocks that are nobody's."""
    expert = tl.program_id(0)
    number = tl.arange(0, EXPERTS)
    before = tl.load(counts + number, mask=(number < expert) & (number < HELD), other=0)
    start, first_block = tl.sum(before, 0), tl.sum((before + ROWS - 1) // ROWS, 0)
    count = tl.load(counts + expert, mask=expert < HELD, other=0)
    own_blocks = tl.where(expert < HELD, (count + ROWS - 1) // ROWS, num_blocks - first_block)
    name = tl.where(expert < HELD, expert, -1)
    for first in range(0, own_blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)
        line, is_own = blocks + (first_block + block) * 3, block < own_blocks
        row = start + block * ROWS
        tl.store(line, tl.zeros([CHUNK], tl.int32) + name, mask=is_own)
        tl.store(line + 1, row, mask=is_own)
        tl.store(line + 2, tl.minimum(row + ROWS, start + count), mask=is_own)
    if expert < HELD:
        place = start
        for first in range(0, num_pairs, CHUNK):
            pair = first + tl.arange(0, CHUNK)
            is_own = tl.load(chosen + pair, mask=pair < num_pairs, other=-1) == FIRST + expert
            one = is_own.to(tl.int32)
            tl.store(order + place + tl.cumsum(one, 0) - one, pair, mask=is_own)
            place += tl.sum(one, 0)


@triton.jit
def _pairs_of(line, order, ROWS: tl.constexpr):
    """Pairs [ROWS] int64 of the block that `line` describes, and [ROWS, 1] which of them there are."""
    place = tl.load(line + 1) + tl.arange(0, ROWS)
    is_row = place < tl.load(line + 2)
    return tl.load(order + place, mask=is_row, other=0).to(tl.int64), is_row[:, None]


@triton.jit
def _rounded(numbers, like):
    """Rounded to the type of what the pointer `like` points to."""
    return numbers.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _clamped(gate, up, alpha, limit, like):
    """ClampedGlu, rounded as torch does. What is not a number stays that."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    slope = _rounded(gate * alpha, like)
    opened = _rounded(1.0 / (1.0 + tl.exp(tl.minimum(-slope, 88.0))), like)
    return _rounded(gate * opened, like) * _rounded(up + 1.0, like)


@triton.jit
def gate_blocks(
    x,  # [T, H]
    order,  # [P] int32
    blocks,  # [N, 3] int32
    weights,  # [E, 2 * I, H]
    biases,  # [E, 2 * I]; anything unless HAS_BIAS
    out,  # [P, I], out
    alpha,
    limit,
    K: tl.constexpr,  # experts of a row
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    IS_CLAMPED: tl.constexpr,  # gate and up of a channel stand side by side; else all of gate, then all of up
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    COMPUTE: tl.constexpr,  # type that is multiplied
):
    """Grid [N, ceil(I / COLUMNS)]: channels of a block's rows, gated."""
    line = blocks + tl.program_id(0) * 3
    expert = tl.load(line).to(tl.int64)
    if expert < 0:
        return
    pair, is_row = _pairs_of(line, order, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = (column < I)[None, :]
    of_gate, of_up = column, I + column
    if IS_CLAMPED:
        of_gate, of_up = 2 * column, 2 * column + 1
    matrix, rows = weights + expert * (2 * I * H), x + (pair // K)[:, None] * H
    gate, up = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, H, DEPTH):
        d = first + tl.arange(0, DEPTH)
        some = tl.load(rows + d[None, :], mask=is_row & (d < H)[None, :], other=0.0)
        is_read = (d < H)[:, None] & is_column
        w = tl.load(matrix + of_gate[None, :] * H + d[:, None], mask=is_read, other=0.0)
        gate = tl.dot(some.to(COMPUTE), w.to(COMPUTE), gate, input_precision="ieee")
        w = tl.load(matrix + of_up[None, :] * H + d[:, None], mask=is_read, other=0.0)
        up = tl.dot(some.to(COMPUTE), w.to(COMPUTE), up, input_precision="ieee")
    if HAS_BIAS:
        bias = biases + expert * (2 * I)
        gate += tl.load(bias + of_gate, mask=column < I, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + of_up, mask=column < I, other=0.0).to(tl.float32)[None, :]
    gate, up = _rounded(gate, out), _rounded(up, out)
    if IS_CLAMPED:
        gated = _clamped(gate, up, alpha, limit, out)
    else:
        gated = _rounded(gate / (1.0 + tl.exp(tl.minimum(-gate, 88.0))), out) * up
    tl.store(out + pair[:, None] * I + column[None, :], gated.to(out.dtype.element_ty), mask=is_row & is_column)


@triton.jit
def project_blocks(
    x,  # [P, I]
    order,  # [P] int32
    blocks,  # [N, 3] int32
    weights,  # [E, H, I]
    biases,  # [E, H]; anything unless HAS_BIAS
    out,  # [P, H], out
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    COMPUTE: tl.constexpr,  # type that is multiplied
):
    """Grid [N, ceil(H / COLUMNS)]: channels of a block's rows."""
    line = blocks + tl.program_id(0) * 3
    expert = tl.load(line).to(tl.int64)
    if expert < 0:
        return
    pair, is_row = _pairs_of(line, order, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = (column < H)[None, :]
    matrix, rows = weights + expert * (H * I) + column[None, :] * I, x + pair[:, None] * I
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, I, DEPTH):
        d = first + tl.arange(0, DEPTH)
        some = tl.load(rows + d[None, :], mask=is_row & (d < I)[None, :], other=0.0)
        w = tl.load(matrix + d[:, None], mask=(d < I)[:, None] & is_column, other=0.0)
        total = tl.dot(some.to(COMPUTE), w.to(COMPUTE), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(biases + expert * H + column, mask=column < H, other=0.0).to(tl.float32)[None, :]
    tl.store(out + pair[:, None] * H + column[None, :], total.to(out.dtype.element_ty), mask=is_row & is_column)


@triton.jit
def sum_chosen(
    outs,  # [P, H]; anything of experts held elsewhere
    chosen,  # [T, K] int64
    gains,  # [T, K] float32
    total,  # [T, H], out
    FIRST: tl.constexpr,
    HELD: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,  # channels of a program
):
    """Grid [T, ceil(H / W)]: one rank after the other (as one launch: vllm-project/vllm#43250)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * W + tl.arange(0, W)
    acc = tl.zeros([W], tl.float32)
    for rank in range(K):
        pair = token * K + rank
        index = tl.load(chosen + pair) - FIRST
        is_read = (column < H) & (index >= 0) & (index < HELD)
        acc += tl.load(outs + pair * H + column, mask=is_read, other=0.0).to(tl.float32) * tl.load(gains + pair)
    tl.store(total + token * H + column, acc.to(total.dtype.element_ty), mask=column < H)
