"""Forms in which matrices of codes are kept for the CPU's native kernels, and the bytes that they take. No torch.

A weight is scale * (code - zero) + offset: code a whole number from 0, scale and offset those of a run of a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass

PANEL = 32
"""Rows of the matrix (columns of a product) that lie together."""
WHOLE_LEN = 32
"""The length of rows is a multiple of it."""


@dataclass(frozen=True, slots=True)
class BlockForm:
    """How the weights of a matrix are kept as codes."""

    bits: int
    """Bits of a code: 4 or 8."""
    run_len: int
    """Weights of a row with one scale: 16 or 32."""
    scale_bytes: int
    """Bytes of a scale and of an offset: 2 (float16) or 4 (float32), whichever has the file's exactly."""
    zero: int
    """The code of the weight 0; 0 where there are offsets."""
    has_offsets: bool = False

    @property
    def run_bytes(self) -> int:
        """Bytes of one run of each row of a panel."""
        return PANEL * (self.scale_bytes * (1 + self.has_offsets) + self.run_len * self.bits // 8)

    def num_bytes(self, rows: int, cols: int) -> int:
        """Bytes of a matrix [rows, cols]."""
        return -(-rows // PANEL) * (cols // self.run_len) * self.run_bytes


TYPE_FORMS: Mapping[str, BlockForm] = {
    "Q8_0": BlockForm(8, 32, 2, 128),
    "Q4_0": BlockForm(4, 32, 2, 8),
    "Q4_1": BlockForm(4, 32, 2, 0, True),
    "Q5_0": BlockForm(8, 32, 2, 16),
    "Q5_1": BlockForm(8, 32, 2, 0, True),
    "Q2_K": BlockForm(4, 16, 4, 0, True),
    "Q3_K": BlockForm(4, 16, 4, 4),
    "Q4_K": BlockForm(4, 32, 4, 0, True),
    "Q5_K": BlockForm(8, 32, 4, 0, True),
    "Q6_K": BlockForm(8, 16, 4, 32),
}
"""Type of a GGUF file's tensor |-> form that has all of its values."""
FOLDER_FORMS: Mapping[str, BlockForm] = {"I8": BlockForm(8, 32, 4, 128), "I4": BlockForm(4, 32, 4, 8)}
"""Forms of whole numbers of 8 and 4 bits in a folder, whose factors stand for more weights than a run."""
STORED_FORMS = {**TYPE_FORMS, **FOLDER_FORMS}
INT8 = TYPE_FORMS["Q8_0"]
"""What matrices are rounded to that no file has in codes."""
