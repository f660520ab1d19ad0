"""Packed token ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.core.tokens import TOKEN_BYTES, pack_u32, token_len, unpack_u32

ids = st.lists(st.integers(0, 2**32 - 1), max_size=200)


@given(ids)
def test_round_trip(values: list[int]) -> None:
    packed = pack_u32(values)
    assert unpack_u32(packed) == tuple(values)
    assert token_len(packed) == len(values)


@given(ids, ids)
def test_prefix_of_ids_is_prefix_of_bytes(first: list[int], second: list[int]) -> None:
    assert pack_u32(first + second).startswith(pack_u32(first))
    assert pack_u32(first) + pack_u32(second) == pack_u32(first + second)


def test_is_little_endian_on_every_machine() -> None:
    assert pack_u32([1, 0x01020304]) == bytes([1, 0, 0, 0, 4, 3, 2, 1])


@pytest.mark.parametrize("value", [-1, 2**32])
def test_out_of_range_ids_are_refused(value: int) -> None:
    with pytest.raises(OverflowError):
        pack_u32([value])


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_torn_id_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        unpack_u32(bytes(length))


def test_length_of_a_growing_output() -> None:
    output = bytearray()
    for count in range(1, 5):
        output += pack_u32([count])
        assert token_len(output) == count
        assert len(output) == count * TOKEN_BYTES
