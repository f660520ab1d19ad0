"""--dump-config: what auto came to stands behind the value, the file loads again unchanged, errors are the run's."""

import re
from pathlib import Path

import pytest

from deltaserve.cli.main import main
from deltaserve.settings.flags.merge import load

ROLES = ("serve", "prefill", "decode", "router")


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "cluster"
    path.touch(mode=0o600)
    path.write_text("x" * 40)
    return str(path)


def argv_of(command: str, model: Path, key_file: str) -> list[str]:
    workers = ["--workers", "prefill@localhost:1,decode@localhost:2"] if command == "router" else []
    return [str(model), "--cluster-key-file", key_file, *workers]


@pytest.mark.parametrize("command", ROLES)
def test_what_is_printed_loads_again(
    command: str, tiny_models: Path, key_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = argv_of(command, tiny_models / "llama", key_file)
    assert main([command, *argv, "--dump-config"]) == 0
    printed = capsys.readouterr().out
    page_size = "what each worker has" if command == "router" else "16"
    assert f"page-size: auto  # {page_size}\n" in printed
    assert re.search(r"^kv-cache-dtype: auto  # float32$", printed, re.MULTILINE)
    path = tmp_path / "config.yaml"
    path.write_text(printed)
    assert load(command, "", ["--config", str(path)], {}) == load(command, "", argv, {})


def test_every_auto_that_a_worker_reads_says_what_it_came_to(
    tiny_models: Path, key_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, mode in (("serve", "prefill and decode apart"), ("prefill", "prefill"), ("decode", "decode")):
        assert main([command, *argv_of(command, tiny_models / "llama", key_file), "--dump-config"]) == 0
        out = capsys.readouterr().out
        assert not [line for line in out.splitlines() if line.endswith(": auto")]
        assert f"disaggregation-mode: auto  # {mode}\n" in out


def test_what_is_given_needs_no_comment(tiny_models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [str(tiny_models / "llama"), "--num-pages", "9", "--page-size", "16", "--disaggregation-mode", "null"]
    assert main(["serve", *argv, "--dump-config"]) == 0
    out = capsys.readouterr().out
    assert "num-pages: 9\n" in out
    assert "page-size: 16\n" in out
    assert "mem-fraction-static: auto  # not read: num-pages is given\n" in out
    assert "disaggregation-mode: 'null'\n" in out


@pytest.mark.parametrize(
    ("command", "flags", "part"),
    [
        ("serve", ["--num-pages", "1000000000"], "--num-pages 1000000000"),
        ("serve", ["--context-length", "1000000000"], "--context-length 1000000000"),
        ("serve", ["--api-key-file", "no-such-file"], "no-such-file"),
        ("serve", ["--cluster-key-file", "no-such-file"], "no-such-file"),
        ("prefill", [], "--cluster-key-file"),
        ("router", ["--workers", "decode@localhost:1"], "--cluster-key-file"),
    ],
)
def test_what_the_command_would_refuse_is_refused_with_the_same_line(
    command: str, flags: list[str], part: str, tiny_models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [command, str(tiny_models / "llama"), *flags]
    assert main([*argv, "--dump-config"]) == 2
    refused = capsys.readouterr()
    assert refused.out == ""
    assert part in refused.err
    assert main(argv) == 2
    assert capsys.readouterr() == refused
