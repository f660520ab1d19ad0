"""The dispatcher: exit codes, one line per error, and a quick start."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import deltaserve
from deltaserve.cli import dispatch
from deltaserve.cli.dispatch import Command, available
from deltaserve.cli.main import main
from deltaserve.settings.flags.line_parser import LineParser
from deltaserve.settings.flags.merge import load
from tests.forks import Forks
from tests.patience import PATIENCE_S

REAL_COMMANDS = available()
ROOT = Path(__file__).parents[2]
MODEL = str(Path(__file__).parent)
"""It is there; the probe does not look into it."""


@pytest.fixture(autouse=True)
def probes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    commands = {
        "probe": Command("tests.launch.probe", "with settings", has_settings=True),
        "count": Command("tests.launch.probe", "with arguments of its own"),
        "sized": Command("tests.launch.sized_probe", "with arguments that servers have, too"),
        "absent": Command("tests.cli.absent", "not there"),
    }
    monkeypatch.setattr(dispatch, "COMMANDS", commands)
    yield


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("argv", [(), ("--help",), ("-h",), ("help",)])
def test_usage_lists_what_is_there(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]) -> None:
    code, out, err = run(capsys, *argv)
    assert (code, err) == (0, "")
    assert "probe" in out
    assert "count" in out
    assert "absent" not in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"deltaserve {deltaserve.__version__}\n", "")


def test_a_command_gets_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "probe", MODEL, "--page-size", "16") == (16, "", "")


def test_a_command_gets_its_own_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "count") == (3, "", "")
    assert run(capsys, "count", "--count", "5") == (5, "", "")


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (("prob",), ("'prob'", "unknown command", "did you mean probe?")),
        (("absent",), ("'absent'", "unknown command")),
        (("--page-size", "16"), ("--page-size: a command comes first",)),
        (("probe", MODEL, "--page-size", "17"), ("--page-size 17", "power of two")),
        (("probe", MODEL, "--page-size", "128"), ("the model folder has no config.json",)),
        (("count", "--count", "x"), ("--count", "invalid int value")),
        (("count", "--cuont", "4"), ("--cuont: unknown flag; did you mean --count?",)),
        (("count", "--cuont=4"), ("--cuont: unknown flag; did you mean --count?",)),
        (("count", "--bogus"), ("--bogus: unknown flag\n",)),
        (("count", "4"), ("'4'", "not expected")),
        (("count", "--c\n\x1b[31m"), ("--c \\x1b[31m: unknown flag",)),
        (("count", "--" + "x" * 100_000), ("--xxx", "xxx: unknown flag")),
    ],
)
def test_errors_are_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("deltaserve: ")
    assert err.count("\n") == 1
    assert len(err) < 420
    assert all(part in err for part in parts)


def test_a_flag_that_changes_nothing_is_told_of_and_the_command_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "probe", MODEL, "--page-size", "16", "--enable-metrics")
    assert (code, out) == (16, "")
    assert err == "deltaserve: --enable-metrics changes nothing: metrics are always on, at /metrics\n"


def test_dump_config_prints_and_does_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "probe", MODEL, "--page-size", "16", "--dump-config")
    assert (code, err) == (0, "")
    assert f"model-path: {MODEL}\n" in out
    assert "page-size: 16\n" in out
    assert "num-pages: auto  # 7\n" in out


def test_dump_config_ends_as_the_command_would(capsys: pytest.CaptureFixture[str]) -> None:
    refused = run(capsys, "probe", MODEL, "--page-size", "128")
    assert run(capsys, "probe", MODEL, "--page-size", "128", "--dump-config") == refused


LIBRARIES = ("numpy", "httpx", "msgspec", "zmq.asyncio", "starlette.applications", "pydantic", "uvicorn", "yaml")
"""What commands import to explain themselves, beside sources."""


def test_commands_that_exist_can_explain_themselves() -> None:
    """Each imports all sources that it needs in a process of its own: exit code and errors as a user has them."""
    assert REAL_COMMANDS
    with closing(Forks.of(LIBRARIES)) as forks:
        for name in REAL_COMMANDS:
            ended = forks.run(ROOT, Path(dispatch.__file__).with_name("main.py"), name, "--help", limit_s=PATIENCE_S)
            explains_itself(name, ended)


@pytest.mark.parametrize("name", ["serve", "sim"])
def test_a_command_that_is_started_explains_itself(name: str) -> None:
    explains_itself(name, start(name, "--help"))


def explains_itself(name: str, ended: subprocess.CompletedProcess[str]) -> None:
    assert ended.returncode == 0, ended.stderr
    assert f"example: deltaserve {name} " in ended.stdout
    assert "exit codes: 0 " in ended.stdout


def test_a_module_runs_as_the_command_does() -> None:
    command = [sys.executable, "-m", "deltaserve", "--version"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert ended.stdout == f"deltaserve {deltaserve.__version__}\n"


def test_commands_are_listed_by_what_they_are_for() -> None:
    groups = {command.group for command in REAL_COMMANDS.values()}
    ended = start()
    assert all(f"\n{group}:\n" in ended.stdout for group in groups)
    assert all(f"\n  {name} " in ended.stdout for name in REAL_COMMANDS)
    assert len(ended.stdout.splitlines()) < 25


@pytest.mark.parametrize("name", [name for name in REAL_COMMANDS if REAL_COMMANDS[name].has_settings])
def test_an_example_is_a_line_that_could_run(name: str) -> None:
    """All of it is understood; its files need not be there."""
    load(name, "", REAL_COMMANDS[name].example.split(), {})


@pytest.mark.parametrize("name", [name for name in REAL_COMMANDS if not REAL_COMMANDS[name].has_settings])
def test_an_example_is_understood_by_the_command(name: str) -> None:
    parser = LineParser(name, "")
    importlib.import_module(REAL_COMMANDS[name].module).add_arguments(parser)
    parser.parse_all(REAL_COMMANDS[name].example.split())


def test_all_that_is_wrong_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "probe", "no/such/folder", "--page-size", "17", "--prot", "1", "--revision", "main")
    assert (code, out) == (2, "")
    head, *lines = err.splitlines()
    assert head == "deltaserve: 4 things stand in the way:"
    assert [line.split(":")[0] for line in lines] == [
        "  --page-size 17",
        "  --prot",
        "  --revision",
        "  MODEL no/such/folder",
    ]
    code, out, err = run(capsys, "count", "5", "--cuont", "4", "--api-key", "secret-of-mine")
    assert [line.split(":")[0] for line in err.splitlines()[1:]] == ["  --cuont", "  --api-key", "  '5'"]
    assert "secret-of-mine" not in err


def test_flags_of_other_servers_mean_the_same_to_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "count", "--alias-of-none", "1")[0] == 2
    code, out, err = run(capsys, "count", "--count", "7", "--trust-remote-code")
    assert (code, out) == (7, "")
    assert err == "deltaserve count: --trust-remote-code changes nothing: code from a model folder is never run\n"
    for name in ("--model", "--model-path", "-m"):
        assert run(capsys, "sized", name, "5", "--tp", "2") == (7, "", "")
    assert "--max-model-len: no flag of deltaserve count" in run(capsys, "count", "--max-model-len", "9")[2]


def test_a_line_that_names_its_role_by_a_flag_is_that_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = Command("tests.launch.probe", "with settings", has_settings=True)
    monkeypatch.setattr(dispatch, "COMMANDS", {"serve": probe, "decode": probe})
    monkeypatch.setenv("DELTASERVE_CLUSTER_KEY_FILE", "cluster.key")
    argv = ("serve", MODEL, "--disaggregation-mode=decode", "--disaggregation-bootstrap-port", "9", "--page-size", "16")
    assert run(capsys, *argv) == (16, "", "deltaserve: --disaggregation-mode decode makes this `deltaserve decode`\n")


def test_help_and_errors_load_neither_torch_nor_the_server() -> None:
    code = (
        "import sys; from deltaserve.cli.main import main; main(['--help']); main(['serve', '--nope']);"
        "print(sorted({'torch', 'transformers', 'numpy', 'starlette', 'zmq', 'nixl'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert ended.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("module", "unneeded"),
    [
        ("deltaserve.launch.serve", {"torch", "starlette", "uvicorn", "zmq"}),
        ("deltaserve.process.front.front_process", {"torch", "numpy", "deltaserve.settings.config"}),
        ("deltaserve.process.worker.worker_process", {"torch", "starlette"}),
        ("deltaserve.process.worker.rank_process", {"torch", "starlette"}),
    ],
)
def test_a_process_starts_without_what_others_need(module: str, unneeded: set[str]) -> None:
    """The supervisor without the server of its front; a worker's loop and threads without torch."""
    code = f"import sys, {module}; print(sorted({unneeded} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert ended.stdout == "[]\n"


def start(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deltaserve.cli.main", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
