"""Clients that need no environment of their own, unmodified: the checks of `make clients` for OpenAI's library, and for
a page in Chromium where that is installed. One server of the language model for all."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.e2e.server import ROOT, serving
from tests.fixtures.language_model import language_model
from tests.patience import PATIENCE_S
from tests.ports import free_ports
from tools.clients import harness, with_openai
from tools.clients.catalogue import Served
from tools.clients.serving import Place, flags_of
from tools.clients.with_chromium import find_chromium, told_by_page

_NUM_CHECKS_OF_PAGE = 9


@pytest.fixture(scope="module")
def asked() -> Iterator[harness.Server]:
    """What clients are told of the server."""
    model, place = language_model(), Place(*free_ports(2))
    flags = (*flags_of(Served.LANGUAGE, place), "--num-pages", "256")
    with (
        TemporaryDirectory(prefix="e2e-", ignore_cleanup_errors=True) as folder,
        serving(Path(folder), model, *flags) as server,
    ):
        yield harness.Server(server.base_url, Served.LANGUAGE.value, str(model), place.page)


@pytest.fixture(scope="module")
def told_by_openai(asked: harness.Server) -> Mapping[str, str | None]:
    """Check |-> what went wrong, of all that were run."""
    argv = [sys.executable, "-m", "tools.clients.with_openai", asked.url, asked.model, asked.path, asked.page]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return {each["check"]: each["told"] for each in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("check", [harness.name_of(check) for check in with_openai.CHECKS])
def test_openai(told_by_openai: Mapping[str, str | None], check: str) -> None:
    assert told_by_openai[check] is None


def test_a_page_in_chromium(asked: harness.Server) -> None:
    """It is at another origin than the server, and at one that is not allowed."""
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("Chromium is not installed: apt-get install chromium-headless-shell")
    told = list(told_by_page(asked, chromium))
    assert len(told) == _NUM_CHECKS_OF_PAGE
    assert not [each for each in told if each["told"] is not None]
