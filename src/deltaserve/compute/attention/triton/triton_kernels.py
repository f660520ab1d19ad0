"""Triton kernels: tokens into pages, partial results of attention over pages, and their merge. Needs triton when it is
imported.

With TRITON_INTERPRET=1 in the environment before that, they run in numpy, on tensors of the CPU.

A partial result of one row (a token and a head) over some of its keys is the output over these alone, in float32, and
the log2 of the sum of exp2(score * log2(e)). A row's arithmetic is that of its own keys in blocks of KEYS: what else
is in its tile adds masked keys only, which change no bit.
"""

import triton
import triton.language as tl


@triton.jit
def _numbers(stored, FP8: tl.constexpr, COMPUTE: tl.constexpr):
    """Elements of pages as COMPUTE. e4m3 by arithmetic, as devices before Ada have no such type: its bits are those
    of a float16 that is 256 times smaller, subnormals too; of not a number it has one pair of codes."""
    if FP8:
        code = stored.to(tl.uint16)
        size = code & 0x7F
        bits = ((code & 0x80) << 8) | (size << 7)
        numbers = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where(size == 0x7F, float("nan"), numbers).to(COMPUTE)
    else:
        return stored.to(COMPUTE)


@triton.jit
def store_tokens(
    values,  # [T, H, D] by strides, channels adjacent, as pages hold them
    plane,  # element 0: page 0, head 0, position 0 of the layer's keys or values
    num_tokens,  # [1] int32; the others store nothing
    positions,  # [T] int32
    write_pages,  # [T] int32
    token_stride,
    value_head_stride,
    page_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,  # D or more, a power of two
    ROWS: tl.constexpr,
):
    """Grid [ceil(T * H / ROWS)]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = row // NUM_HEADS, row % NUM_HEADS
    is_row = token < tl.load(num_tokens)
    page = tl.load(write_pages + token, mask=is_row, other=0).to(tl.int64)
    offset = tl.load(positions + token, mask=is_row, other=0) % PAGE_SIZE
    source = values + token.to(tl.int64) * token_stride + head * value_head_stride
    target = plane + page * page_stride + head.to(tl.int64) * head_stride + offset * D
    d = tl.arange(0, W)
    is_held = is_row[:, None] & (d < D)[None, :]
    tl.store(target[:, None] + d[None, :], tl.load(source[:, None] + d[None, :], mask=is_held), mask=is_held)


@triton.jit
def partial_results(
    q,  # [T, Hq, D] by strides, channels adjacent
    keys,  # element 0: page 0, head 0, position 0 of the layer's keys; codes where FP8
    values,  # the same of its values; `keys` where channels of the keys are the values
    num_tiles,  # [1] int32; programs of others end at once, so that a grid may be larger than a step's work
    tiles,  # [N, 8] int32, see plan.py
    tokens,  # [M] int32
    positions,  # [T] int32
    first_parts,  # [T] int32
    pages,  # [lines * pages of a line] int32
    outs,  # [R, Hq, DV] float32
    sums,  # [R, Hq] float32
    q_token_stride,
    q_head_stride,
    page_stride,
    head_stride,
    scale,  # of scores, times log2(e)
    NUM_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: sees everything
    D: tl.constexpr,
    DV: tl.constexpr,
    D1: tl.constexpr,  # D as the sum of two powers of two, the second may be 0: fewer channels in vain than by one
    D2: tl.constexpr,
    V1: tl.constexpr,
    V2: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    FP8: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Grid [N, Hkv]: rows of one tile over keys [start, end) of one KV head."""
    if tl.program_id(0) >= tl.load(num_tiles):
        return
    tile, head = tiles + tl.program_id(0) * 8, tl.program_id(1)
    first_token, first_row, num_rows = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    start, low, end = tl.load(tile + 3), tl.load(tile + 4), tl.load(tile + 5)
    line, part = tl.load(tile + 6), tl.load(tile + 7)

    row = first_row + tl.arange(0, ROWS)
    is_row = row < num_rows
    token = tl.load(tokens + first_token + row // GROUP_SIZE, mask=is_row, other=0)
    q_head = head * GROUP_SIZE + row % GROUP_SIZE
    position = tl.load(positions + token, mask=is_row, other=-1)
    q_row = q + token.to(tl.int64) * q_token_stride + q_head * q_head_stride
    d1, v1 = tl.arange(0, D1), tl.arange(0, V1)
    q1 = tl.load(q_row[:, None] + d1[None, :], mask=is_row[:, None] & (d1 < D)[None, :], other=0.0).to(COMPUTE)
    acc1 = tl.zeros([ROWS, V1], tl.float32)
    if D2 > 0:
        d2 = D1 + tl.arange(0, D2)
        q2 = tl.load(q_row[:, None] + d2[None, :], mask=is_row[:, None] & (d2 < D)[None, :], other=0.0).to(COMPUTE)
    if V2 > 0:
        v2 = V1 + tl.arange(0, V2)
        acc2 = tl.zeros([ROWS, V2], tl.float32)
    top, total = tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    head_offset = head.to(tl.int64) * head_stride

    for first in range(start, end, KEYS):
        key = first + tl.arange(0, KEYS)
        is_held = (key >= low) & (key < end)
        page = tl.load(pages + line + key // PAGE_SIZE, mask=is_held, other=0)
        at = page.to(tl.int64) * page_stride + head_offset + (key % PAGE_SIZE) * D
        k1 = tl.load(keys + at[None, :] + d1[:, None], mask=is_held[None, :] & (d1 < D)[:, None], other=0)
        scores = tl.dot(q1, _numbers(k1, FP8, COMPUTE), input_precision="ieee")
        if D2 > 0:
            k2 = tl.load(keys + at[None, :] + d2[:, None], mask=is_held[None, :] & (d2 < D)[:, None], other=0)
            scores = tl.dot(q2, _numbers(k2, FP8, COMPUTE), scores, input_precision="ieee")
        is_seen = is_held[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            is_seen = is_seen & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(is_seen, scores * scale, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        shrink = tl.exp2(top - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, 1)
        top = new_top
        weights = weights.to(COMPUTE)
        x1 = tl.load(values + at[:, None] + v1[None, :], mask=is_held[:, None] & (v1 < DV)[None, :], other=0)
        acc1 = tl.dot(weights, _numbers(x1, FP8, COMPUTE), acc1 * shrink[:, None], input_precision="ieee")
        if V2 > 0:
            x2 = tl.load(values + at[:, None] + v2[None, :], mask=is_held[:, None] & (v2 < DV)[None, :], other=0)
            acc2 = tl.dot(weights, _numbers(x2, FP8, COMPUTE), acc2 * shrink[:, None], input_precision="ieee")

    divisor = tl.where(total == 0, 1.0, total)
    place = (tl.load(first_parts + token, mask=is_row, other=0) + part).to(tl.int64) * NUM_HEADS + q_head
    tl.store(sums + place, tl.where(total == 0, -float("inf"), top + tl.log2(divisor)), mask=is_row)
    out_row = outs + place * DV
    tl.store(out_row[:, None] + v1[None, :], acc1 / divisor[:, None], mask=is_row[:, None] & (v1 < DV)[None, :])
    if V2 > 0:
        tl.store(out_row[:, None] + v2[None, :], acc2 / divisor[:, None], mask=is_row[:, None] & (v2 < DV)[None, :])
