"""`deltaserve dynamo`: what is refused before Dynamo is asked, and where its options come from."""

import argparse
from importlib.util import find_spec
from pathlib import Path

import pytest

from deltaserve.cli.main import main
from deltaserve.commands.dynamo.command import add_arguments, options_of
from deltaserve.commands.dynamo.translation import ServerFacts
from deltaserve.commands.dynamo.worker_options import WorkerOptions, model_folder
from deltaserve.core.errors import ConfigError

MISSING = find_spec("dynamo") is None


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder of which Dynamo can make text."""
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def options(model: Path, *argv: str) -> WorkerOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return options_of(parser.parse_args(argv), ServerFacts("m", str(model), context_len=100))


@pytest.mark.skipif(not MISSING, reason="Dynamo is installed here")
def test_a_missing_library_is_named_with_what_installs_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["dynamo"]) == 2
    told = capfd.readouterr().err.strip()
    assert told == (
        "deltaserve: dynamo: NVIDIA's Dynamo is not installed: pip install 'deltaserve[dynamo]', "
        "in an environment of its own"
    )


def test_what_is_not_given_is_as_dynamo_s_variables_say(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NAMESPACE", "DISCOVERY_BACKEND", "REQUEST_PLANE", "EVENT_PLANE"):
        monkeypatch.delenv(f"DYN_{name}", raising=False)
    found = options(model)
    assert (found.namespace, found.discovery_backend, found.request_plane) == ("dynamo", "etcd", "tcp")
    monkeypatch.setenv("DYN_NAMESPACE", "blue")
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")
    assert (options(model).namespace, options(model).discovery_backend) == ("blue", "file")
    assert options(model, "--namespace", "green", "--discovery-backend", "kubernetes").namespace == "green"


def test_the_server_s_own_folder_is_registered_unless_another_is_given(model: Path, tmp_path: Path) -> None:
    assert options(model).model_path == model
    assert model_folder(model, "/nowhere") == model


def test_a_file_of_weights_is_no_folder_that_dynamo_reads(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"m\.gguf, which the server names: .*config\.json and tokenizer\.json"):
        model_folder(None, str(tmp_path / "m.gguf"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"; tokenizer\.json is not there$"):
        model_folder(tmp_path, "/nowhere")
