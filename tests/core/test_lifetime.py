"""Retention: what must be kept to continue at a position."""

import pytest

from deltaserve.core.lifetime import KEEP_ALL, Lifetime, Retention

STATE = Retention(Lifetime.STATE)


@pytest.mark.parametrize("num_tokens", [0, 1, 63, 64, 1000])
def test_full_pages_are_needed_from_the_start(num_tokens: int) -> None:
    assert KEEP_ALL.first_needed(num_tokens, 16) == 0


@pytest.mark.parametrize(
    ("window_len", "num_tokens", "first"),
    [
        (1, 0, 0),
        (1, 32, 2),
        (2, 32, 1),
        (17, 32, 1),
        (18, 32, 0),
        (17, 40, 1),
        (18, 40, 0),
        (18, 48, 1),
        (16, 31, 0),
        (99, 40, 0),
    ],
)
def test_a_window_is_needed_from_the_page_of_its_oldest_token(window_len: int, num_tokens: int, first: int) -> None:
    """The token at `num_tokens` sees `window_len` tokens, itself included, and so does the first one of its page."""
    assert Retention(Lifetime.WINDOW, window_len).first_needed(num_tokens, 16) == first


@pytest.mark.parametrize("window_len", [1, 5, 16, 17, 40])
def test_no_page_is_given_up_while_a_later_token_sees_it(window_len: int) -> None:
    window = Retention(Lifetime.WINDOW, window_len)
    for num_tokens in range(100):
        oldest = max(0, num_tokens - window_len + 1)
        assert window.first_seen(num_tokens, 16) == oldest // 16
        assert oldest // 16 - 1 <= window.first_needed(num_tokens, 16) <= oldest // 16
        assert window.first_needed(num_tokens, 16) <= window.first_needed(num_tokens + 1, 16)


@pytest.mark.parametrize("window_len", [1, 5, 16, 17, 40])
def test_whoever_ends_inside_a_page_leaves_a_prefix_to_go_on_from(window_len: int) -> None:
    """Otherwise the next turn of a conversation finds the pages of the answer, and no window to use them with."""
    window = Retention(Lifetime.WINDOW, window_len)
    for num_tokens in range(100):
        boundary = num_tokens // 16 * 16
        assert window.first_needed(num_tokens, 16) == max(0, boundary - window_len + 1) // 16


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("window_len", [1, 2, 5, 16, 17, 40])
def test_no_more_pages_are_held_at_once_than_is_said(page_size: int, window_len: int) -> None:
    """Some sequence holds as many, unless it is shorter."""
    window = Retention(Lifetime.WINDOW, window_len)
    for ahead_len in range(1, 3 * page_size):
        held = [-(-(end + ahead_len) // page_size) - window.first_needed(end, page_size) for end in range(200)]
        assert max(held) == window.most_pages(1000, ahead_len, page_size)


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
