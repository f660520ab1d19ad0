"""Recurrent states between their slots and a step's rows, by slots that the device works out. Needs triton when it is
imported."""

import triton
import triton.language as tl


@triton.jit
def load_states(
    slots,  # [B] int64; -1: none
    states,  # element 0: slot 0, head 0 of the layer
    out,  # [B, H, LENGTH] of the type of `states`
    SLOT_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    LENGTH: tl.constexpr,  # elements of a head, adjacent
    NUM_BLOCKS: tl.constexpr,  # of BLOCK elements, which hold LENGTH
    BLOCK: tl.constexpr,  # a power of two
):
    """Grid [B, H * NUM_BLOCKS]: of each row what its slot holds, zeros where it has none."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1) // NUM_BLOCKS
    at = tl.program_id(1) % NUM_BLOCKS * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    source = states + tl.maximum(slot, 0) * SLOT_STRIDE + head * HEAD_STRIDE + at
    values = tl.load(source, mask=(at < LENGTH) & (slot >= 0), other=0.0)
    tl.store(out + (row * NUM_HEADS + head) * LENGTH + at, values, mask=at < LENGTH)


@triton.jit
def store_states(
    slots,  # [B] int64, all different; -1: none
    values,  # [B, H, LENGTH] of the type of `states`
    states,  # element 0: slot 0, head 0 of the layer
    SLOT_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    LENGTH: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid as of `load_states`: a row without a slot stores nothing."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1) // NUM_BLOCKS
    at = tl.program_id(1) % NUM_BLOCKS * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    is_held = (at < LENGTH) & (slot >= 0)
    found = tl.load(values + (row * NUM_HEADS + head) * LENGTH + at, mask=is_held)
    tl.store(states + tl.maximum(slot, 0) * SLOT_STRIDE + head * HEAD_STRIDE + at, found, mask=is_held)
