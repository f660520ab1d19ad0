"""Draws of decoding rows by Triton's kernels: the logits are read once for all rows, and once more for those that draw
by chance, in the type in which they were multiplied. Needs triton when it is imported.

A row draws what `resident_draws.py` draws for it, but for a number next to the border between two tokens: sums are
added up in another order. Limits are found without an order of the vocabulary: the k-th largest logit, and the least
weight of the nucleus, by halving the range of their bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaserve.compute.executor.resident_rows import ResidentRows
from deltaserve.compute.executor.row_rules import NUM_RULES, DrawKind, WayToDraw
from deltaserve.compute.executor.triton_adjustments import TritonAdjusting

_CHUNK = 4096
_NUM_RULES = tl.constexpr(NUM_RULES)
_WHOLE = 2.0**50
"""Unit in which a probability is counted as a whole number, so that sums do not depend on their order."""


class TritonDraws:
    """Draws for steps of so many rows. Its memory belongs to one recorded step, but for what `rows` lends."""

    def __init__(self, rows: ResidentRows, num_rows: int, num_logits: int, kind: DrawKind) -> None:
        device, self._num_chunks = rows.positions.device, -(-num_logits // _CHUNK)
        self._rows, self._num_rows, self._num_logits, self._way = rows, num_rows, num_logits, kind.way
        self._tops = torch.empty((num_rows, self._num_chunks), dtype=torch.float32, device=device)
        self._sums = torch.empty_like(self._tops)
        self._places = torch.empty_like(self._tops, dtype=torch.int32)  # of the first largest; negative: not finite
        self._scaled = rows.float_logits(num_logits if kind.way is WayToDraw.LIMITED else 0)
        self._adjusting = TritonAdjusting(rows, num_rows, num_logits) if kind.is_adjusted else None

    def draw(self, logits: Tensor, lines: Tensor, draws: Tensor) -> None:
        """logits [B, num_logits or more], lines [B] -> draws [2, B] int64: tokens, and 1 where logits are finite. The
        rows of these lines have moved on."""
        rows, count = self._rows, self._num_logits
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        if self._adjusting is not None:
            logits = self._adjusting.adjusted(logits, lines)  # where they are scaled, too: each over itself
        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]  # does nothing on the CPU
            look_at_chunks[self._num_rows, self._num_chunks](
                logits, logits.stride(0), lines, rows.rules, self._tops, self._sums, self._places, count, CHUNK=_CHUNK
            )
            choose[self._num_rows,](
                logits,
                logits.stride(0),
                lines,
                rows.rules,
                rows.positions,
                rows.last_drawn,
                self._tops,
                self._sums,
                self._places,
                draws,
                count,
                CHUNKS=self._num_chunks,
                MOST=triton.next_power_of_2(self._num_chunks),
                CHUNK=_CHUNK,
                num_warps=8,
            )
            if self._way is WayToDraw.LIMITED:
                choose_limited[self._num_rows,](
                    logits,
                    logits.stride(0),
                    lines,
                    rows.rules,
                    rows.positions,
                    rows.last_drawn,
                    self._tops,
                    self._scaled,
                    draws,
                    count,
                    _WHOLE,
                    CHUNKS=self._num_chunks,
                    MOST=triton.next_power_of_2(self._num_chunks),
                    CHUNK=_CHUNK,
                    num_warps=16,
                )


@triton.jit
def _number(rules, position):
    """`randomness.uniform` of a row: the finaliser of SplitMix64, in 64 bits with a sign that wrap around."""
    x = tl.load(rules) + (position - tl.load(rules + 1) + 1) * -7046029254386353131
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return ((x >> 32) & 0xFFFFFFFF).to(tl.float64) * 2.3283064365386963e-10


@triton.jit
def _temperature(rules):
    return tl.load(rules + 5).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def look_at_chunks(
    logits,  # [B, V] by stride
    stride,
    lines,  # [B] int64
    rules,  # [lines, NUM_RULES] int64, see row_rules.py
    tops,  # [B, C] float32, out: the largest of a chunk
    sums,  # [B, C] float32, out: of exp((x - largest) / temperature)
    places,  # [B, C] int32, out: the first of the largest; -1 where a logit is not finite
    num_logits,
    CHUNK: tl.constexpr,
):
    """Grid [B, C]."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    is_held = index < num_logits
    x = tl.load(logits + row.to(tl.int64) * stride + index, mask=is_held, other=-float("inf")).to(tl.float32)
    is_bad = is_held & ((x != x) | (tl.abs(x) == float("inf")))
    num_bad = tl.sum(is_bad.to(tl.int32), 0)
    x = tl.where(is_bad, -float("inf"), x)
    top = tl.max(x, 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    weights = tl.exp((x - base) / _temperature(rules + tl.load(lines + row) * _NUM_RULES))
    at = row * tl.num_programs(1) + chunk
    tl.store(tops + at, top)
    tl.store(sums + at, tl.sum(weights, 0))
    tl.store(places + at, tl.where(num_bad > 0, -1, chunk * CHUNK + tl.argmax(x, 0)))


@triton.jit
def choose(
    logits,
    stride,
    lines,
    rules,
    positions,  # [lines] int64, in and out
    last_drawn,  # [lines] int64, out
    tops,
    sums,
    places,
    draws,  # [2, B] int64, out
    num_logits,
    CHUNKS: tl.constexpr,
    MOST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid [B]: the largest, or one from the whole vocabulary by chance."""
    row = tl.program_id(0)
    line = tl.load(lines + row)
    own = rules + line * _NUM_RULES
    chunk = tl.arange(0, MOST)
    is_chunk = chunk < CHUNKS
    at = row * CHUNKS + chunk
    top = tl.load(tops + at, mask=is_chunk, other=-float("inf"))
    place = tl.load(places + at, mask=is_chunk, other=0)
    is_finite = tl.min(place, 0) >= 0
    largest = tl.max(top, 0)
    token = tl.sum(tl.where(chunk == tl.argmax(top, 0), place, 0), 0)
    position = tl.load(positions + line) + 1
    if tl.load(own + 3) == 1:
        temperature = _temperature(own)
        base = tl.where(largest == -float("inf"), 0.0, largest)
        weight = tl.load(sums + at, mask=is_chunk, other=0.0) * tl.exp((top - base) / temperature)
        cumulative = tl.cumsum(weight.to(tl.float64), 0)
        goal = _number(own, position) * tl.sum(weight.to(tl.float64), 0)
        last = tl.max(tl.where(weight > 0, chunk, 0), 0)
        found = tl.minimum(tl.sum((is_chunk & (cumulative <= goal)).to(tl.int32), 0), last)
        before = tl.sum(tl.where(chunk < found, weight, 0.0).to(tl.float64), 0)
        offset = tl.arange(0, CHUNK)
        index = found * CHUNK + offset
        x = tl.load(logits + row.to(tl.int64) * stride + index, mask=index < num_logits, other=-float("inf"))
        weights = tl.exp((x.to(tl.float32) - base) / temperature)
        weights = tl.where(index < num_logits, weights, 0.0)
        passed = before + tl.cumsum(weights.to(tl.float64), 0) <= goal
        last_of_chunk = tl.max(tl.where(weights > 0, offset, 0), 0)
        token = found * CHUNK + tl.minimum(tl.sum(passed.to(tl.int32), 0), last_of_chunk)
    token = tl.minimum(tl.maximum(token, 0), num_logits - 1).to(tl.int64)
    tl.store(draws + row, token)
    tl.store(draws + tl.num_programs(0) + row, is_finite.to(tl.int64))
    tl.store(last_drawn + line, token)
    tl.store(positions + line, position)


@triton.jit
def _weights(kept, index, num_logits, limit):
    """exp(-scaled) of tokens, 0 where the bits of `scaled` are above the limit."""
    values = tl.load(kept + index, mask=index < num_logits, other=float("inf"))
    return tl.where(values.to(tl.int32, bitcast=True) <= limit, tl.exp(-values), 0.0)


@triton.jit
def _total(kept, num_logits, limit, least, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """Sum of the weights that are `least` at least."""
    total = tl.full([], 0.0, tl.float64)
    for chunk in range(CHUNKS):
        weights = _weights(kept, chunk * CHUNK + tl.arange(0, CHUNK), num_logits, limit)
        total += tl.sum(tl.where(weights >= least, weights, 0.0).to(tl.float64), 0)
    return total


@triton.jit
def _limit_of_count(kept, num_logits, limit, count, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """The least bits that so many values at least do not exceed."""
    low = tl.full([], 0, tl.int32)
    while low < limit:
        middle = low + (limit - low) // 2
        found = tl.full([], 0, tl.int64)
        for chunk in range(CHUNKS):
            index = chunk * CHUNK + tl.arange(0, CHUNK)
            values = tl.load(kept + index, mask=index < num_logits, other=float("inf"))
            is_in = (index < num_logits) & (values.to(tl.int32, bitcast=True) <= middle)
            found += tl.sum(is_in.to(tl.int64), 0)
        is_enough = found >= count
        limit = tl.where(is_enough, middle, limit)
        low = tl.where(is_enough, low, middle + 1)
    return limit


@triton.jit
def _limit_of_mass(kept, num_logits, limit, goal, unit, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """The least bits whose values weigh so much at least; `unit`: what a weight is multiplied by to be counted."""
    low = tl.full([], 0, tl.int32)
    while low < limit:
        middle = low + (limit - low) // 2
        mass = tl.full([], 0, tl.int64)
        for chunk in range(CHUNKS):
            weights = _weights(kept, chunk * CHUNK + tl.arange(0, CHUNK), num_logits, middle)
            mass += tl.sum((weights.to(tl.float64) * unit + 0.5).to(tl.int64), 0)
        is_enough = mass >= goal
        limit = tl.where(is_enough, middle, limit)
        low = tl.where(is_enough, low, middle + 1)
    return limit


@triton.jit
def choose_limited(
    logits,
    stride,
    lines,
    rules,
    positions,  # moved on already
    last_drawn,
    tops,
    scaled,  # [B or more, V] float32, scratch: (largest - x) / temperature
    draws,
    num_logits,
    whole,
    CHUNKS: tl.constexpr,
    MOST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid [B]: by chance within top-k, top-p and min-p. Smaller `scaled` are more likely; as bits they have the order
    of whole numbers, since none is negative."""
    row = tl.program_id(0)
    line = tl.load(lines + row)
    own = rules + line * _NUM_RULES
    if tl.load(own + 3) != 2:
        return
    many, offset = tl.arange(0, MOST), tl.arange(0, CHUNK)
    largest = tl.max(tl.load(tops + row * CHUNKS + many, mask=many < CHUNKS, other=-float("inf")), 0)
    largest = tl.where(largest == -float("inf"), 0.0, largest)
    temperature = _temperature(own)
    source, kept = logits + row.to(tl.int64) * stride, scaled + row.to(tl.int64) * num_logits
    for chunk in range(CHUNKS):
        index = chunk * CHUNK + offset
        x = tl.load(source + index, mask=index < num_logits, other=-float("inf")).to(tl.float32)
        x = tl.where(x == x, x, -float("inf"))
        tl.store(kept + index, tl.maximum((largest - x) / temperature, 0.0), mask=index < num_logits)
    tl.debug_barrier()

    limit = tl.full([], 0x7F800000, tl.int32)
    top_k = tl.load(own + 2)
    if top_k < num_logits:
        limit = _limit_of_count(kept, num_logits, limit, top_k, CHUNKS, CHUNK)
    top_p = tl.load(own + 6).to(tl.float64, bitcast=True)
    if top_p < 1.0:
        unit = whole / _total(kept, num_logits, limit, 0.0, CHUNKS, CHUNK)
        limit = _limit_of_mass(kept, num_logits, limit, (top_p * whole).to(tl.int64), unit, CHUNKS, CHUNK)
    least = tl.load(own + 7).to(tl.float64, bitcast=True).to(tl.float32)

    goal = _number(own, tl.load(positions + line)) * _total(kept, num_logits, limit, least, CHUNKS, CHUNK)
    before, token, last = tl.full([], 0.0, tl.float64), tl.full([], -1, tl.int32), tl.full([], 0, tl.int32)
    for chunk in range(CHUNKS):
        index = chunk * CHUNK + offset
        weights = _weights(kept, index, num_logits, limit)
        weights = tl.where(weights >= least, weights, 0.0).to(tl.float64)
        cumulative = before + tl.cumsum(weights, 0)
        last = tl.maximum(last, tl.max(tl.where(weights > 0, index, 0), 0))
        first = tl.min(tl.where((weights > 0) & (cumulative > goal), index, 0x7FFFFFFF), 0)
        token = tl.where((token < 0) & (first < 0x7FFFFFFF), first, token)
        before += tl.sum(weights, 0)
    token = tl.where(token < 0, last, token).to(tl.int64)
    tl.store(draws + row, token)
    tl.store(last_drawn + line, token)
