"""The kernel that copies pieces of memory by their addresses."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_pieces"])
def copy_pieces(table, num_pieces, IS_WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """table [3, num_pieces] int64: of each piece the addresses that it goes to and comes from, and its bytes.

    Program p copies the pieces p, p + P, ... of P programs. IS_WIDE: all numbers are multiples of 16, and 16 bytes are
    moved at once.
    """
    for piece in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        target, source = tl.load(table + piece), tl.load(table + num_pieces + piece)
        num_bytes = tl.load(table + 2 * num_pieces + piece)
        if IS_WIDE:
            to = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
            come = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
            units = tl.multiple_of(num_bytes // 8, 2)
        else:
            to, come = target.to(tl.pointer_type(tl.int8)), source.to(tl.pointer_type(tl.int8))
            units = num_bytes
        for start in range(0, units, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(to + at, tl.load(come + at, mask=at < units), mask=at < units)
