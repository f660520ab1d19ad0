"""The JSON of a body: what is read, and what is refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.server.api_errors import ApiError
from deltaserve.server.read import MAX_CONTAINERS, parse_object

numbers = st.integers(-(10**18), 10**18) | st.floats(allow_nan=False, allow_infinity=False)
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


def test_a_body_has_so_many_arrays_and_no_more() -> None:
    body = b'{"a": [' + b"[]," * (MAX_CONTAINERS - 3) + b"[]]}"
    assert len(parse_object(body)["a"]) == MAX_CONTAINERS - 2  # type: ignore[arg-type]
    with pytest.raises(ApiError, match="more than 200000 arrays"):
        parse_object(body.replace(b"[]]}", b"[],[]]}"))


def test_a_surrogate_pair_is_one_character() -> None:
    assert parse_object(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (b"\\ud83d", (b"\\ud83d", 7)),
        (b"\\ude00 x", (b"\\ude00", 7)),
        (b"\\ud83d\\ud83d\\ude00", (b"\\ud83d", 7)),
        (b"\\ud83d \\ude00", (b"\\ud83d", 7)),
        (b"\\ud83d\\ude00\\uDC00", (b"\\uDC00", 19)),
        (b"\\\\\\ud83d", (b"\\ud83d", 9)),
    ],
)
def test_half_a_surrogate_pair_is_named(text: bytes, where: tuple[bytes, int]) -> None:
    escape, at = where
    with pytest.raises(ApiError) as caught:
        parse_object(b'{"a": "' + text + b'"}')
    expected = f"the body holds {escape.decode()} at byte {at}, half a surrogate pair: that is no character"
    assert (caught.value.code, caught.value.message) == ("invalid_json", expected)


def test_a_body_that_is_cut_off_is_called_truncated() -> None:
    with pytest.raises(ApiError, match="truncated"):
        parse_object(b'{"a": "\\\\ud83d \\ud83d\\ude00')
