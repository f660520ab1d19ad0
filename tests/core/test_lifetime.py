"""Retention: what must be kept to continue at a position."""

import pytest

from deltaserve.core.lifetime import KEEP_ALL, Lifetime, Retention

STATE = Retention(Lifetime.STATE)


@pytest.mark.parametrize("num_tokens", [0, 1, 63, 64, 1000])
def test_full_pages_are_needed_from_the_start(num_tokens: int) -> None:
    assert KEEP_ALL.first_needed(num_tokens, 16) == 0


@pytest.mark.parametrize(
    ("window_len", "num_tokens", "first"),
    [(1, 0, 0), (1, 32, 2), (2, 32, 1), (17, 32, 1), (18, 32, 0), (17, 40, 1), (18, 40, 1), (16, 31, 1), (99, 40, 0)],
)
def test_a_window_is_needed_from_the_page_of_its_oldest_token(window_len: int, num_tokens: int, first: int) -> None:
    """The token at `num_tokens` sees `window_len` tokens, itself included."""
    assert Retention(Lifetime.WINDOW, window_len).first_needed(num_tokens, 16) == first


@pytest.mark.parametrize("window_len", [1, 5, 16, 17, 40])
def test_no_page_is_given_up_while_a_later_token_sees_it(window_len: int) -> None:
    window = Retention(Lifetime.WINDOW, window_len)
    for num_tokens in range(100):
        oldest = max(0, num_tokens - window_len + 1)
        assert window.first_needed(num_tokens, 16) == oldest // 16
        assert window.first_needed(num_tokens, 16) <= window.first_needed(num_tokens + 1, 16)


@pytest.mark.parametrize(("num_tokens", "first"), [(0, 0), (16, 0), (32, 1), (33, 2), (48, 2)])
def test_a_state_is_filed_under_the_last_page_index_before_it(num_tokens: int, first: int) -> None:
    assert STATE.first_needed(num_tokens, 16) == first


def test_only_a_window_has_a_length() -> None:
    for lifetime, window_len in [
        (Lifetime.WINDOW, None),
        (Lifetime.FULL, 4),
        (Lifetime.STATE, 4),
        (Lifetime.WINDOW, 0),
    ]:
        with pytest.raises(ValueError):
            Retention(lifetime, window_len)
