"""docs/settings.md from the declarations of the settings: `python -m tools.settings > docs/settings.md`."""

from pathlib import Path

from deltaserve.cli.options import Option, read_options
from deltaserve.cli.settings_merge import describe

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
_HEAD = """# Settings

Every setting: a flag, a key of the file of `--config` (`page-size: 64`) and a variable
(`DELTASERVE_PAGE_SIZE=64`). A flag wins over a variable, a variable over the file, the file over the default.
`--help` lists the common ones, `--help-all` also those that are *rare*. Names are those of SGLang where the meaning
is equal. The other flags of their and vLLM's launch lines are accepted where they change nothing, with a line that
says so, else refused with the reason and what to use instead (`cli/foreign.py`).

This page is made: `python -m tools.settings > docs/settings.md`.
"""
_TABLE = "| flag | of | what it does |\n|---|---|---|"


def settings_page() -> str:
    """The page's text: a table for each group."""
    groups: dict[str, list[str]] = {}
    for option in read_options():
        groups.setdefault(option.group, []).append(_row(option))
    tables = [f"\n## {group.capitalize()}\n\n{_TABLE}\n" + "\n".join(rows) + "\n" for group, rows in groups.items()]
    return _HEAD + "".join(tables)


def _row(option: Option) -> str:
    words = f": {', '.join(option.choices)}" if option.choices else ""
    commands = ", ".join(option.commands) or "all"
    rare = " *Rare.*" if option.use == "rare" else ""
    return f"| `{option.flag}`{words} | {commands} | {describe(option).replace('|', chr(92) + '|')}.{rare} |"


if __name__ == "__main__":
    print(settings_page(), end="")
