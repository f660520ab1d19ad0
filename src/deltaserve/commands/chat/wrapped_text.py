"""Text that arrives in pieces, broken at words to the width of a terminal."""

from collections.abc import Callable

from rich.cells import cell_len

_ZWJ = "\u200d"
_SKIN_TONES = range(0x1F3FB, 0x1F400)
_FLAG_LETTERS = range(0x1F1E6, 0x1F200)
_NO_BREAK = "\u00a0\u202f\u2060\ufeff"
_NEVER_FIRST = (
    ")]}!%,.:;?\u2019\u201d\u2026\u3001\u3002\u3005\u3009\u300b\u300d\u300f\u3011\u3015\u30fc"
    "\uff01\uff09\uff0c\uff0e\uff1a\uff1b\uff1f"
)
"""Closing and pausing signs, and signs that lengthen or repeat what stands before them."""
_NEVER_LAST = "([{\u2018\u201c\u3008\u300a\u300c\u300e\u3010\u3014\uff08"
_FENCE = "```"
_TAB_CELLS = 8


class WrappedText:
    """Says what to write of the text so far: a word when the next one begins, so that it is never torn.

    Spaces at which a line is broken are left out, line breaks of the text are kept. Words without spaces between them
    (Chinese, Japanese, emoji) are broken between characters. Lines of code between fences (```) stay whole, and so
    does a word that is longer than a line: the terminal breaks these, and they can be copied from it.
    """

    def __init__(self, width: Callable[[], int], indent: str = "") -> None:
        """`width`: cells of a line, asked for each word, since a window may change. Lines after the first begin with
        `indent`; so much is there already of the first."""
        self._width = width
        self._indent = indent
        self._column = cell_len(indent)
        self._line = ""
        """The text's own line so far, which may be several on the screen."""
        self._spaces = ""
        self._word = ""
        self._is_long = False
        """The word's beginning filled a line, and is written already."""
        self._in_fence = False

    def add(self, text: str) -> str:
        """What is certain now, to be written at once."""
        return "".join(map(self._take, text))

    def end(self) -> str:
        """The rest: nothing comes behind it."""
        return self._put_word() + self._put_spaces()

    def _take(self, char: str) -> str:
        if char == "\n":
            return self._end_line()
        if char.isspace() and char not in _NO_BREAK:
            out = self._put_word()
            self._is_long = False
            self._spaces += char
            return out
        out = self._put_word() if self._word and _may_break(self._word[-1], char) else ""
        self._word += char
        if self._is_long or cell_len(self._word) > self._width():
            out += self._put_word()
            self._is_long = True
        return out

    def _end_line(self) -> str:
        out = self._put_word()
        if self._line.lstrip().startswith(_FENCE):
            self._in_fence = not self._in_fence
        self._line = self._spaces = ""
        self._is_long = False
        self._column = cell_len(self._indent)
        return f"{out}\n{self._indent}"

    def _put_word(self) -> str:
        word, self._word = self._word, ""
        if not word:
            return ""
        out = "" if self._is_long else self._put_break(word) or self._put_spaces()
        self._line += word
        for char in word if cell_len(word) > self._width() else [word]:  # what is too long the terminal breaks
            self._advance(cell_len(char))
        return out + word

    def _put_break(self, word: str) -> str:
        """The line break that this word needs before it, or nothing."""
        is_code = self._in_fence or self._line.lstrip().startswith(_FENCE)
        if is_code or not self._line or self._column + self._space_cells() + cell_len(word) <= self._width():
            return ""
        self._line += self._spaces
        self._spaces = ""
        self._column = cell_len(self._indent)
        return f"\n{self._indent}"

    def _put_spaces(self) -> str:
        spaces, num_cells = self._spaces, self._space_cells()
        self._spaces = ""
        self._line += spaces
        self._advance(num_cells)
        return spaces

    def _space_cells(self) -> int:
        column = self._column
        for char in self._spaces:
            column += _TAB_CELLS - column % _TAB_CELLS if char == "\t" else cell_len(char)
        return column - self._column

    def _advance(self, num_cells: int) -> None:
        """Move on as the terminal's cursor does: what does not fit begins its next line."""
        self._column += num_cells
        if self._column > self._width():
            self._column = num_cells % max(1, self._width())


def _may_break(before: str, after: str) -> bool:
    """Whether a line may break between two characters without a space between them."""
    if _continues(before, after) or before in _NO_BREAK or after in _NO_BREAK:
        return False
    if after in _NEVER_FIRST or before in _NEVER_LAST:
        return False
    return _is_wide(before) or _is_wide(after)


def _continues(before: str, after: str) -> bool:
    """Both are, or may be, part of one character on the screen."""
    if _ZWJ in (before, after) or cell_len(after) == 0 or ord(after) in _SKIN_TONES:
        return True
    return ord(before) in _FLAG_LETTERS and ord(after) in _FLAG_LETTERS


def _is_wide(char: str) -> bool:
    return cell_len(char) > 1
