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
def _numbers(stored, FP8: tl.constexpr, HAS_E4M3: tl.constexpr, COMPUTE: tl.constexpr):
    """Elements of pages as COMPUTE. e4m3 by the device where it knows the type. Else by arithmetic: its bits are those
    of a float16 that is 256 times smaller, subnormals too; of not a number it has one pair of codes."""
    if FP8 and HAS_E4M3:
        return stored.to(tl.float8e4nv, bitcast=True).to(COMPUTE)
    elif FP8:
        code = stored.to(tl.uint16)
        size = code & 0x7F
        bits = ((code & 0x80) << 8) | (size << 7)
        numbers = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where(size == 0x7F, float("nan"), numbers).to(COMPUTE)
    else:
        return stored.to(COMPUTE)


@triton.jit
def _units(q1, q2):
    """The power of two that each row of queries is at most twice as large as: what is left has its size in float16,
    which holds e4m3 exactly. 1 for a row of zeros, infinity for one that is not finite."""
    size = tl.maximum(tl.max(tl.abs(q1.to(tl.float32)), 1), tl.max(tl.abs(q2.to(tl.float32)), 1))
    unit = (size.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(unit == 0.0, 1.0, unit)


@triton.jit
def store_tokens(
    first,  # [T, H, D] of the first plane by strides, channels adjacent
    second,  # the same of the second; anything where the grid has one
    plane,  # element 0: page 0, head 0, position 0 of the layer's first plane; the second lies behind it
    num_tokens,  # [1] int32; the others store nothing
    positions,  # [T] int32
    write_pages,  # [T] int32
    FIRST_TOKEN_STRIDE: tl.constexpr,
    FIRST_HEAD_STRIDE: tl.constexpr,
    SECOND_TOKEN_STRIDE: tl.constexpr,
    SECOND_HEAD_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,  # D or more, a power of two
    ROWS: tl.constexpr,
    TO_E4M3: tl.constexpr,  # values of any type become codes; else they are as pages hold them
):
    """Grid [ceil(T * H / ROWS), planes]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = row // NUM_HEADS, row % NUM_HEADS
    is_row = token < tl.load(num_tokens)
    page = tl.load(write_pages + token, mask=is_row, other=0).to(tl.int64)
    offset = tl.load(positions + token, mask=is_row, other=0) % PAGE_SIZE
    d = tl.arange(0, W)
    is_held = is_row[:, None] & (d < D)[None, :]
    target = plane + page * PAGE_STRIDE + head.to(tl.int64) * HEAD_STRIDE + offset * D
    if tl.program_id(1) == 0:
        source = first + token.to(tl.int64) * FIRST_TOKEN_STRIDE + head * FIRST_HEAD_STRIDE
        values = tl.load(source[:, None] + d[None, :], mask=is_held)
    else:
        source = second + token.to(tl.int64) * SECOND_TOKEN_STRIDE + head * SECOND_HEAD_STRIDE
        values = tl.load(source[:, None] + d[None, :], mask=is_held)
        target += PAGE_SIZE * D
    if TO_E4M3:
        wide = values.to(tl.float32)
        wide = tl.where(wide > 448.0, 448.0, tl.where(wide < -448.0, -448.0, wide))  # not a number stays that
        tl.store(target[:, None] + d[None, :], wide.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=is_held)
    else:
        tl.store(target[:, None] + d[None, :], values, mask=is_held)


@triton.jit
def _offsets(
    pages, first, key, is_held, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr
):
    """Offsets of keys in a head, where their pages stand in a line."""
    if PAGE_SIZE % KEYS == 0:  # a block of keys lies in one page
        page = tl.load(pages + first // PAGE_SIZE).to(tl.int64)
    else:
        page = tl.load(pages + key // PAGE_SIZE, mask=is_held, other=0).to(tl.int64)
    return page * PAGE_STRIDE + (key % PAGE_SIZE) * D


@triton.jit
def _rows(tile, tokens, positions, GROUP_SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Rows of a tile: their heads within a group, whether the item has them, their tokens, the positions of those."""
    row = tl.load(tile + 1) + tl.arange(0, ROWS)
    is_row = row < tl.load(tile + 2)
    token = tl.load(tokens + tl.load(tile) + row // GROUP_SIZE, mask=is_row, other=0)
    return row % GROUP_SIZE, is_row, token, tl.load(positions + token, mask=is_row, other=-1)


@triton.jit
def _products(
    q1,  # [ROWS, D1]
    q2,  # [ROWS, D2]; anything where D2 is 0
    keys,  # [KEYS] where they begin
    is_held,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    FP8: tl.constexpr,
    HAS_E4M3: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """[ROWS, KEYS]"""
    d1 = tl.arange(0, D1)
    k1 = tl.load(keys[None, :] + d1[:, None], mask=is_held[None, :] & (d1 < D)[:, None], other=0)
    products = tl.dot(q1, _numbers(k1, FP8, HAS_E4M3, COMPUTE), input_precision="ieee")
    if D2 > 0:
        d2 = D1 + tl.arange(0, D2)
        k2 = tl.load(keys[None, :] + d2[:, None], mask=is_held[None, :] & (d2 < D)[:, None], other=0)
        products = tl.dot(q2, _numbers(k2, FP8, HAS_E4M3, COMPUTE), products, input_precision="ieee")
    return products


@triton.jit
def _is_seen(key, position, is_held, WINDOW: tl.constexpr):
    """[ROWS, KEYS] whether the row's position sees the key."""
    is_seen = is_held[None, :] & (key[None, :] <= position[:, None])
    if WINDOW > 0:
        is_seen = is_seen & (key[None, :] > position[:, None] - WINDOW)
    return is_seen


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
    scale,  # of scores, times log2(e)
    Q_TOKEN_STRIDE: tl.constexpr,
    Q_HEAD_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
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
    HAS_E4M3: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Grid [N, Hkv]: rows of one tile over keys [start, end) of one KV head."""
    if tl.program_id(0) >= tl.load(num_tiles):
        return
    tile, head = tiles + tl.program_id(0) * 8, tl.program_id(1)
    start, low, end = tl.load(tile + 3), tl.load(tile + 4), tl.load(tile + 5)
    line, part = tl.load(tile + 6), tl.load(tile + 7)
    in_group, is_row, token, position = _rows(tile, tokens, positions, GROUP_SIZE, ROWS)
    q_head = head * GROUP_SIZE + in_group
    q_row = q + token.to(tl.int64) * Q_TOKEN_STRIDE + q_head * Q_HEAD_STRIDE
    d1, v1 = tl.arange(0, D1), tl.arange(0, V1)
    q1 = tl.load(q_row[:, None] + d1[None, :], mask=is_row[:, None] & (d1 < D)[None, :], other=0.0)
    acc1 = tl.zeros([ROWS, V1], tl.float32)
    q2 = q1
    if D2 > 0:
        d2 = D1 + tl.arange(0, D2)
        q2 = tl.load(q_row[:, None] + d2[None, :], mask=is_row[:, None] & (d2 < D)[None, :], other=0.0)
    if V2 > 0:
        v2 = V1 + tl.arange(0, V2)
        acc2 = tl.zeros([ROWS, V2], tl.float32)
    scales = tl.full([ROWS], 1.0, tl.float32) * scale
    if FP8 and tl.float16 == COMPUTE:
        unit = _units(q1, q2)
        scales = scales * unit
        q1, q2 = q1.to(tl.float32) / unit[:, None], q2.to(tl.float32) / unit[:, None]
    q1, q2 = q1.to(COMPUTE), q2.to(COMPUTE)
    top, total = tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS], tl.float32)

    for first in range(start, end, KEYS):
        key = first + tl.arange(0, KEYS)
        is_held = (key >= low) & (key < end)
        at = head.to(tl.int64) * HEAD_STRIDE + _offsets(
            pages + line, first, key, is_held, PAGE_SIZE, PAGE_STRIDE, D, KEYS
        )
        scores = _products(q1, q2, keys + at, is_held, D, D1, D2, FP8, HAS_E4M3, COMPUTE)
        scores = tl.where(_is_seen(key, position, is_held, WINDOW), scores * scales[:, None], -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        shrink, weights = tl.exp2(top - base), tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, 1)
        top = new_top
        x1 = tl.load(values + at[:, None] + v1[None, :], mask=is_held[:, None] & (v1 < DV)[None, :], other=0)
        acc1 = tl.dot(
            weights.to(COMPUTE), _numbers(x1, FP8, HAS_E4M3, COMPUTE), acc1 * shrink[:, None], input_precision="ieee"
        )
        if V2 > 0:
            x2 = tl.load(values + at[:, None] + v2[None, :], mask=is_held[:, None] & (v2 < DV)[None, :], other=0)
            acc2 = tl.dot(
                weights.to(COMPUTE),
                _numbers(x2, FP8, HAS_E4M3, COMPUTE),
                acc2 * shrink[:, None],
                input_precision="ieee",
            )

    divisor = tl.where(total == 0, 1.0, total)
    place = (tl.load(first_parts + token, mask=is_row, other=0) + part).to(tl.int64) * NUM_HEADS + q_head
    tl.store(sums + place, tl.where(total == 0, -float("inf"), top + tl.log2(divisor)), mask=is_row)
    out_row = outs + place * DV
    tl.store(out_row[:, None] + v1[None, :], acc1 / divisor[:, None], mask=is_row[:, None] & (v1 < DV)[None, :])
    if V2 > 0:
        tl.store(out_row[:, None] + v2[None, :], acc2 / divisor[:, None], mask=is_row[:, None] & (v2 < DV)[None, :])
