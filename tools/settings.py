"""docs/settings.md from the declarations of the settings: `python -m tools.settings > docs/settings.md`."""

from pathlib import Path

from deltaserve.settings.flags.flag_help import describe
from deltaserve.settings.flags.foreign import FOREIGN, Alias
from deltaserve.settings.flags.options import Option, read_options

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
_HEAD = """# Settings

Every setting: a flag, a key of the file of `--config` (`page-size: 64`) and a variable
(`DELTASERVE_PAGE_SIZE=64`). A flag wins over a variable, a variable over the file, the file over the default.
`--help` lists the common ones, `--help-all` also those that are *rare*. Names are those of SGLang where the meaning
is equal.

Flags of the launch lines of SGLang, its router, vLLM, Dynamo and llama.cpp are understood by every command, as keys
and as variables too (`settings/flags/foreign.py`). What means the same is another word for a flag here: see the last
table. What changes nothing is accepted, with a line that says why. What asks for something that is not there is refused
with the reason and what to write instead; all that is wrong with a line
itself is told in one message, then what does not fit the model or the machine. `--disaggregation-mode prefill`
or `decode` makes a line of `serve` one of `deltaserve prefill` or `decode`.

This page is made: `python -m tools.settings > docs/settings.md`.
"""
_TABLE = "| flag | of | what it does |\n|---|---|---|"


def settings_page() -> str:
    """The page's text: a table for each group."""
    groups: dict[str, list[str]] = {}
    for option in read_options():
        groups.setdefault(option.group, []).append(_row(option))
    tables = [f"\n## {group.capitalize()}\n\n{_TABLE}\n" + "\n".join(rows) + "\n" for group, rows in groups.items()]
    return _HEAD + "".join(tables) + _other_words()


def _other_words() -> str:
    """The flags of other servers that are ours by another name."""
    words: dict[str, list[str]] = {}
    for row in FOREIGN.values():
        if isinstance(row.meaning, Alias):
            words.setdefault(row.meaning.key, []).append(f"`-{'' if len(row.name) == 1 else '-'}{row.name}`")
    rows = [f"| `--{key}` | {', '.join(names)} |" for key, names in words.items()]
    return "\n## Other words for them\n\n| flag | elsewhere |\n|---|---|\n" + "\n".join(rows) + "\n"


def _row(option: Option) -> str:
    words = f": {', '.join(option.choices)}" if option.choices else ""
    commands = ", ".join(option.commands) or "all"
    rare = " *Rare.*" if option.use == "rare" else ""
    return f"| `{option.flag}`{words} | {commands} | {describe(option).replace('|', chr(92) + '|')}.{rare} |"


if __name__ == "__main__":
    print(settings_page(), end="")
