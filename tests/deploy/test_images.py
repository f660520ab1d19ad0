"""The Dockerfiles: what they copy is in the repository, what they install is an extra, what they start is a command."""

import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from deltaserve.cli.main import main
from deltaserve.settings.config import Settings

ROOT = Path(__file__).resolve().parents[2]
FILES = ("Dockerfile.cpu", "Dockerfile.cuda")
BUILT = "dist/"
"""The folder of the wheel, which the first line of each file makes."""


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction."""

    word: str
    text: str


def steps(name: str) -> list[Step]:
    text = (ROOT / "deploy" / "images" / name).read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    return [Step(*line.split(" ", 1)) for line in whole.splitlines()]


def last(name: str, word: str) -> str:
    """The instruction that counts: the last of its kind, in the last stage."""
    return [step.text for step in steps(name) if step.word == word][-1]


@pytest.mark.parametrize("name", FILES)
def test_what_is_copied_is_in_the_repository(name: str) -> None:
    for step in steps(name):
        if step.word == "COPY" and "--from" not in step.text:
            source = step.text.split()[0]
            assert source == BUILT or (ROOT / source).is_file(), source


def extras_of(name: str) -> set[str]:
    """Extras with which the wheel is installed."""
    (install,) = (step.text for step in steps(name) if "pip install" in step.text)
    asked = re.search(r"\[([\w,]+)\]", install)
    assert asked is not None
    return set(asked[1].split(","))


@pytest.mark.parametrize("name", FILES)
def test_what_is_installed_is_the_wheel_with_extras_that_there_are(name: str) -> None:
    (install,) = (step.text for step in steps(name) if "pip install" in step.text)
    assert "/dist/deltaserve-*.whl" in install and "-c /constraints.txt" in install
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    asked = extras_of(name)
    assert asked <= extras
    assert {"nixl", "cuda12", "cuda13"} & asked, "workers in several containers need NIXL"


@pytest.mark.parametrize("name", FILES)
def test_it_is_not_root_and_says_whether_it_lives(name: str) -> None:
    user, _, group = last(name, "USER").partition(":")
    assert int(user) > 0 and int(group) > 0, "numbers, which runAsNonRoot can check"
    check = json.loads(last(name, "HEALTHCHECK").partition("CMD ")[2])
    copied = [step.text.split()[-1] for step in steps(name) if step.word == "COPY"]
    assert check[0] == "python3" and check[1] in copied


@pytest.mark.parametrize("name", FILES)
def test_what_it_starts_is_deltaserve(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, *words = json.loads(last(name, "ENTRYPOINT")) + json.loads(last(name, "CMD"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert program in project["scripts"]
    assert main(words) == 0
    assert "serve" in capsys.readouterr().out
    settings = Settings()
    ports = [settings.network.port, settings.disaggregation.disaggregation_bootstrap_port]
    assert last(name, "EXPOSE") == " ".join(map(str, ports))


@pytest.mark.parametrize("name", FILES)
def test_its_first_lines_say_how_to_build_it(name: str) -> None:
    head = (ROOT / "deploy" / "images" / name).read_text().partition("ARG")[0]
    assert f"-f deploy/images/{name} " in head and "make wheel && " in head
