"""The command lines of docs/deploy.md: what is checked is what users are told to type. The standard library alone."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

_Found = TypeVar("_Found")

PAGE: Path = Path(__file__).resolve().parents[2] / "docs" / "deploy.md"
_HEADING = re.compile(r"^##+ (.+)$", re.MULTILINE)
_BLOCK = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)


def block_with(heading: str, text: str) -> str:
    """The one block of a section, without its subsections, that has this text. Raises ValueError where there is not
    one."""
    return _the_one(text, heading, [block for block in _blocks(heading) if text in block])


def lines_with(heading: str, text: str) -> list[list[str]]:
    """The words of each line of that block."""
    return _lines_of(block_with(heading, text))


def line_with(heading: str, *words: str) -> list[str]:
    """The one line of a section, without its subsections, that has these words. Raises ValueError where there is not
    one."""
    lines = [line for block in _blocks(heading) for line in _lines_of(block)]
    return _the_one(" ".join(words), heading, [line for line in lines if set(words) <= set(line)])


def _blocks(heading: str) -> list[str]:
    _, *parts = _HEADING.split(PAGE.read_text())
    found: list[str] = _BLOCK.findall(dict(zip(parts[::2], parts[1::2], strict=True)).get(heading, ""))
    return found


def _lines_of(block: str) -> list[list[str]]:
    """Their words: comments are left out, and lines joined that end with a backslash."""
    return [shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines()]


def here(line: Sequence[str], substitutions: Mapping[str, object]) -> list[str]:
    """The line with what is another thing here than on the page, such as paths and ports. Raises ValueError for a thing
    that the line has not."""
    if not substitutions:
        return list(line)
    missing = [old for old in substitutions if not any(old in word for word in line)]
    if missing:
        raise ValueError(f"{PAGE.name}: {' '.join(line)!r} does not have {', '.join(missing)}")
    pattern = re.compile("|".join(map(re.escape, sorted(substitutions, key=len, reverse=True))))
    return [pattern.sub(lambda match: str(substitutions[match[0]]), word) for word in line]


def _the_one(what: str, heading: str, found: Sequence[_Found]) -> _Found:
    if len(found) != 1:
        raise ValueError(f"{PAGE.name}: {len(found)} of {what!r} below {heading!r}")
    return found[0]
