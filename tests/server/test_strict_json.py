"""The parser: what it accepts is exactly what the standard library reads, minus what is ambiguous."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.server.errors import ApiError
from deltaserve.server.strict_json import MAX_DEPTH, parse_object

numbers = st.integers(-(10**19), 10**19) | st.floats(allow_nan=False, allow_infinity=False)
leaves = st.none() | st.booleans() | numbers | st.text(max_size=20)
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner))


@given(st.dictionaries(st.text(max_size=8), values, max_size=5), st.booleans())
def test_what_is_written_is_read(value: dict[str, object], ascii_only: bool) -> None:
    assert parse_object(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    try:
        parse_object(body)
    except ApiError as error:
        assert (error.status, error.code) == (400, "invalid_json")


def _nested(depth: int) -> bytes:
    return b'{"a":' * (depth - 1) + b"{}" + b"}" * (depth - 1)


def test_depth_is_counted_outside_strings_only() -> None:
    assert parse_object(_nested(MAX_DEPTH))
    with pytest.raises(ApiError):
        parse_object(_nested(MAX_DEPTH + 1))
    brackets = "[{" * 500 + '\\"'
    assert parse_object(json.dumps({"a": brackets}).encode()) == {"a": brackets}


def test_many_siblings_are_not_depth() -> None:
    body = b'{"a": [' + b"{}," * 1000 + b"{}]}"
    assert parse_object(body) == {"a": [{}] * 1001}


def test_a_surrogate_pair_is_one_character() -> None:
    assert parse_object(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}


def test_twenty_digits_are_an_integer() -> None:
    assert parse_object(b'{"a": -12345678901234567890}') == {"a": -12345678901234567890}


def test_a_long_fraction_is_a_float() -> None:
    assert parse_object(b'{"a": 0.3333333333333333333333333333333}') == {"a": 1 / 3}
