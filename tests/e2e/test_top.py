"""`deltaserve top` on a server that is being used."""

import json
from pathlib import Path

import pytest

from deltaserve.cli.main import main
from tests.e2e.reference import random_prompt
from tests.e2e.server import Server
from tests.ports import free_port


def test_it_tells_what_the_server_does(shared_pair: Server, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = random_prompt(100, seed=77)
    for _ in range(2):
        shared_pair.complete(prompt, 4)
    shared_pair.wait_quiet()
    argv = ["top", shared_pair.base_url, "--once", "--interval", "0.2"]
    assert main([*argv, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["model"], told["running"]) == (shared_pair.model, 0)
    workers = {worker["name"]: worker for worker in told["workers"]}
    for name, worker in shared_pair.workers().items():
        pool = workers[name]["pools"][0]
        assert pool["used"] + pool["cached"] + pool["free"] == worker["status"]["num_pages"][0]
        assert pool["cached"] >= 6, "the prompt's pages"
    assert told["found_tokens"] >= 96
    assert told["moved_bytes"] > 0
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "decode-0" in out
    assert "prompt tokens were on decode already" in out


def test_without_a_server_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["top", "--base-url", f"http://127.0.0.1:{free_port()}", "--once"]) == 1
    assert "no server is there" in capsys.readouterr().err
    assert main(["top", "http://127.0.0.1:1", "--base-url", "http://127.0.0.1:2"]) == 2
    assert main(["top", "--interval", "nan"]) == 2
    assert "--interval nan: from 0.2 s on" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "localhost:30000", "http://", "ftp://here"])
def test_what_is_no_url_is_told_at_once(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert main(["top", url]) == 2
    assert "no URL of a server; one is http://127.0.0.1:30000" in capsys.readouterr().err


def test_the_page_for_browsers_names_the_server_as_well(shared_pair: Server) -> None:
    assert main(["top", f"{shared_pair.base_url}/view", "--once", "--interval", "0.2"]) == 0


def test_tls_where_there_is_none_is_told(shared_pair: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", shared_pair.base_url.replace("http:", "https:"), "--once"]) == 1
    assert "does not speak TLS" in capsys.readouterr().err
