"""Stop strings: the result must not depend on how the text was cut."""

from hypothesis import example, given
from hypothesis import strategies as st

from deltaserve.server.text.stop_filter import StopFilter

letters = st.text(alphabet="ab", max_size=14)
stop_strings = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=4)


def _expected(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """By definition: the first prefix that ends with a stop string is cut before the longest such string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def _run(pieces: list[str], stops: tuple[str, ...]) -> tuple[list[str], str | None]:
    stop_filter = StopFilter(stops)
    shown = []
    for piece in pieces:
        shown.append(stop_filter.push(piece))
        if stop_filter.matched is not None:
            return shown, stop_filter.matched
    return [*shown, stop_filter.flush()], None


@given(st.lists(letters, max_size=6), stop_strings)
@example(["a", "b"], ["ab"])
@example(["aab"], ["ab", "aab"])
@example(["abab"], ["bab", "ab"])
def test_any_cut_gives_the_same_text(pieces: list[str], stops: list[str]) -> None:
    shown, matched = _run(pieces, tuple(stops))
    assert ("".join(shown), matched) == _expected("".join(pieces), tuple(stops))


@given(letters, stop_strings)
def test_nothing_shown_is_taken_back(text: str, stops: list[str]) -> None:
    expected, _ = _expected(text, tuple(stops))
    shown, _ = _run(list(text), tuple(stops))
    so_far = ""
    for piece in shown:
        so_far += piece
        assert expected.startswith(so_far)


def test_no_more_than_needed_is_held() -> None:
    stop_filter = StopFilter(("</end>",))
    assert stop_filter.push("abc<") == "abc"
    assert stop_filter.push("/x") == "</x"
    assert stop_filter.push("</end") == ""
    assert stop_filter.flush() == "</end"


def test_without_stop_strings_text_passes() -> None:
    assert StopFilter(()).push("abc") == "abc"
