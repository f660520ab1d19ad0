"""Why a grammar cannot be followed, as a client is told: the keyword, and the library's reason without its places."""

import re
from collections.abc import Iterator
from typing import Any

import msgspec

_COPY = re.compile(r" 1 \| ")
"""Behind its reason the library repeats the lines of the grammar, most of which are ours."""
_PLACES = ("(in regex): ", " error: ", "failed to compile JSON schema: ")
"""What stands before a reason, behind copies and places."""
_KEYWORDS = re.compile(r"Unimplemented keys: \[(.*)\]")
_ELSEWHERE = re.compile(r"Resource '(.*)' is not present in a registry.*")
_NOWHERE = re.compile(r"Pointer '(.*)' does not exist")
_SHOWN_CHARS = 80
"""Characters of the library's reason that a client is told."""


def told(reason: str, grammar: str = "") -> str:
    """`grammar`: what the reason is about, as it was compiled; of a schema in it the keyword at fault is named."""
    whole = " ".join(reason.split())
    shown = _COPY.split(whole, 1)[0]
    for before in _PLACES:
        shown = shown.rpartition(before)[2]
    shown = shown.split(". Enable '", 1)[0]  # an option of the library
    shown = _KEYWORDS.sub(r"not supported: the keyword \1", shown)
    shown = _ELSEWHERE.sub(r"$ref to another document: \1", shown)
    shown = _NOWHERE.sub(r"$ref to what is not there: \1", shown)
    if "regex" in whole:
        named = [of for of in _patterns(grammar) if " ".join(of[1].split()) in whole]  # short ones by chance
        shown = f"{max(named, key=lambda of: len(of[1]))[0]}: {shown}" if named else shown
    return shown if len(shown) <= _SHOWN_CHARS else shown[:_SHOWN_CHARS] + " ..."


def _patterns(grammar: str) -> Iterator[tuple[str, str]]:
    """(keyword, pattern) of all schemas in a grammar that is one."""
    try:
        left: list[Any] = [msgspec.json.decode(grammar)]
    except (ValueError, RecursionError):
        return
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            if isinstance(pattern := part.get("pattern"), str):
                yield "pattern", pattern
            if isinstance(of_names := part.get("patternProperties"), dict):
                yield from (("patternProperties", pattern) for pattern in of_names)
            left += part.values()
