"""A message as it is printed at last."""

import pytest

from deltaserve.core.errors import ConfigError, one_line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("plain", "plain"),
        ("two\nlines\tof  words", "two lines of words"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\0b\x07", "a\\x00b\\x07"),
        ("\u202edne", "\\u202edne"),
        ("\udcff", "\\udcff"),
        ("\u00fcber \u4f60", "\u00fcber \u4f60"),
    ],
)
def test_nothing_in_it_moves_the_cursor(text: str, line: str) -> None:
    assert one_line(ConfigError(text)) == line


def test_of_a_long_one_the_middle_is_left_out() -> None:
    line = one_line("--flag " + "\x1b" * 100_000 + ": unknown flag")
    assert len(line) < 400
    assert line.startswith("--flag \\x1b") and line.endswith(": unknown flag")
