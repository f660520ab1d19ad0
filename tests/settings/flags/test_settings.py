"""Settings as a whole: each is read by somebody, help lists the common ones, and docs/settings.md lists all."""

import ast
from functools import cache
from pathlib import Path

import pytest

from deltaserve.settings.flags.merge import load
from deltaserve.settings.flags.options import Option, read_options
from tools.settings import PAGE, settings_page

SOURCE = Path(__file__).parents[3] / "src" / "deltaserve"
COMMANDS = ("serve", "prefill", "decode", "router")
MAX_IN_HELP = 40
OF_EVERY_COMMAND = {"--config", "--dump-config", "--help-all"}
OPTIONS = read_options()


def flags_in(capsys: pytest.CaptureFixture[str], command: str, flag: str) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        load(command, "what it does", ["models/tiny", flag], {})
    assert ended.value.code == 0
    return [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  --")]


def own_flags(command: str, *uses: str) -> set[str]:
    return {o.flag for o in OPTIONS if (not o.commands or command in o.commands) and o.use in uses}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_what_is_common_and_help_all_everything(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = flags_in(capsys, command, "--help")
    assert len(common) == len(set(common)) <= MAX_IN_HELP
    assert set(common) - OF_EVERY_COMMAND == own_flags(command, "common")
    every = flags_in(capsys, command, "--help-all")
    assert len(every) == len(set(every))
    assert set(every) - OF_EVERY_COMMAND == own_flags(command, "common", "rare")


def test_help_says_how_many_flags_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load("serve", "", ["--help"], {})
    left_out = len(own_flags("serve", "rare"))
    assert f"as --help, with {left_out} flags more" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_defaults_and_variables(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(command, "", ["--help"], {})
    text = capsys.readouterr().out
    assert "DELTASERVE_PAGE_SIZE" in text
    assert ("default 30000" in text) == (command in ("serve", "router"))


def test_a_rare_flag_is_known_all_the_same() -> None:
    line = load("serve", "", ["models/tiny", "--attention-split-tokens", "128"], {})
    assert line.settings.scheduling.attention_split_tokens == 128


@cache
def attributes_read() -> frozenset[str]:
    """Names of attributes in the files that have to do with settings, but for the one that declares them."""
    files = [path for path in SOURCE.rglob("*.py") if path.name != "config.py" and "Settings" in path.read_text()]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    return frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute))


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.key)
def test_a_setting_is_read_by_somebody(option: Option) -> None:
    assert option.field in attributes_read() or len(option.choices) == 1, (
        "one word needs no reader: the check is enough"
    )


def test_the_page_of_all_settings_is_up_to_date() -> None:
    assert PAGE.read_text() == settings_page(), "python -m tools.settings > docs/settings.md"
