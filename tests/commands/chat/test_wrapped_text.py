"""Streamed text in lines of whole words, whatever the pieces it comes in."""

import pytest
from rich.cells import cell_len

from deltaserve.commands.chat.wrapped_text import WrappedText

WIDTH = 20
FAMILY, THUMB, FLAG = "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f44d\U0001f3fd", "\U0001f1eb\U0001f1f7"
CODE = "```\nfor word in a_long_line_of_code(x, y):\n```\n"
URL = "https://example.org/a/long/path"


def wrapped(text: str, size: int, width: int = WIDTH, indent: str = "") -> str:
    lines = WrappedText(lambda: width, indent)
    pieces = [lines.add(text[start : start + size]) for start in range(0, len(text), size)]
    return "".join(pieces) + lines.end()


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("one two", "one two"),
        (" one two ", " one two "),
        ("exactly twenty cells", "exactly twenty cells"),
        ("exactly twenty cells and more", "exactly twenty cells\nand more"),
        ("a word that is broken off here", "a word that is\nbroken off here"),
        ("two  spaces  are  kept  within", "two  spaces  are\nkept  within"),
        ("first line\n\n  - a list with an indent", "first line\n\n  - a list with an\nindent"),
        ("a\tb\tc\td", "a\tb\tc\nd"),
        (f"see {URL} there", f"see\n{URL} there"),
        ("no\u00a0break at\u00a0these\u00a0two", "no\u00a0break\nat\u00a0these\u00a0two"),
        ("你好世界你好世界你好世界", "你好世界你好世界你好\n世界"),
        ("你好世界你好世界你好。世界", "你好世界你好世界你\n好。世界"),
        ("你好世界你好世界你「好世界", "你好世界你好世界你\n「好世界"),
        ("a 你好世界你好世界你好", "a 你好世界你好世界你\n好"),
        ("ends with GPU是好的你好世界", "ends with GPU是好的\n你好世界"),
        ("한국어 문장도 여기서 끊긴다", "한국어 문장도 여기서\n끊긴다"),
        ("e\u0301" * 20 + " e\u0301", "e\u0301" * 20 + "\ne\u0301"),
        (f"{CODE}words that are wrapped", f"{CODE}words that are\nwrapped"),
        ("  ```python  and words behind that are long\ncode", "  ```python  and words behind that are long\ncode"),
    ],
)
def test_lines_are_broken_at_words(text: str, shown: str, size: int) -> None:
    assert wrapped(text, size) == shown


@pytest.mark.parametrize("char", [FAMILY, THUMB, FLAG, "\u2764\ufe0f", "\U0001f600", "界", "é", "e\u0301"])
@pytest.mark.parametrize("size", [1, 2, 7])
def test_no_character_is_torn_and_no_line_too_long(char: str, size: int) -> None:
    lines = wrapped(f"{char} " * 30 + f"{char}界" * 20, size).split("\n")
    assert len(lines) > 3
    assert all(cell_len(line.rstrip()) <= WIDTH for line in lines)
    assert not any(line.startswith(("\u200d", "\ufe0f", "\u0301", "\U0001f3fd")) for line in lines)
    assert all(line.count("\U0001f1eb") == line.count("\U0001f1f7") for line in lines)
    assert "".join(lines).replace(" ", "").replace("界", "").count(char) == (50 if char != "界" else 0)


@pytest.mark.parametrize("size", [1, 3, 50, 1000])
def test_lines_after_the_first_are_indented(size: int) -> None:
    text = "The lighthouse of Port Ellis has 144 steps, and from its top one sees the harbour. Come early! " * 3
    indent = " " * 14
    lines = (indent + wrapped(text, size, 96, indent)).split("\n")
    assert max(len(line.rstrip()) for line in lines) <= 96
    assert len(lines) == 4
    assert all(line.startswith(indent) and line[14] != " " for line in lines)
    assert " ".join(line[14:].strip() for line in lines) == text.strip()


def test_a_word_is_shown_when_the_next_begins_and_a_long_one_before() -> None:
    lines = WrappedText(lambda: WIDTH)
    assert [lines.add(piece) for piece in ("Par", "is", ".", " It")] == ["", "", "", "Paris."]
    assert lines.end() == " It"
    assert WrappedText(lambda: WIDTH).add("ha" * 40) == "ha" * 40


def test_a_window_that_changes_is_followed() -> None:
    width = 10
    lines = WrappedText(lambda: width)
    shown = lines.add("aaaa bbbb cccc ")
    width = 5
    assert shown + lines.add("dddd eeee") + lines.end() == "aaaa bbbb\ncccc\ndddd\neeee"


def test_a_width_of_nothing_loses_nothing() -> None:
    assert wrapped("ab c", 1, 0).replace("\n", "") in ("ab c", "abc")
