"""What the pages of deploy/ and docs/deploy.md tell to type."""

import argparse
import re
import shlex
from pathlib import Path

import pytest

from deltaserve.commands.dynamo.command import add_arguments
from tests.deploy.lines import settings_of
from tests.deploy.rendered import CHART, Helm, containers

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("deploy/**/*.md"), ROOT / "docs" / "deploy.md"])
_BLOCK = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^):#]+)(?:#[^)]*)?\)")


def lines_of(page: Path) -> list[str]:
    """Lines of its blocks, those that end with a backslash joined with the next."""
    return [line for block in _BLOCK.findall(page.read_text()) for line in block.replace("\\\n", " ").splitlines()]


def lines_with(text: str) -> list[tuple[str, list[str]]]:
    """Page, and the words of a line that says so."""
    found = [(page.relative_to(ROOT).as_posix(), line) for page in PAGES for line in lines_of(page) if text in line]
    assert found
    return [(page, shlex.split(line, comments=True)) for page, line in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert not [link for link in _LINK.findall(page.read_text()) if not (page.parent / link).exists()]


def test_the_chart_takes_the_lines_that_install_it(helm: Helm) -> None:
    for page, words in lines_with("helm install"):
        assert words[:4] == ["helm", "install", "deltaserve", "deploy/helm/deltaserve"], page
        done = helm.run("template", "deltaserve", str(CHART), *words[4:])
        assert done.returncode == 0, done.stderr
        objects = helm.template(*words[4:])
        assert containers(objects)["prefill"]["image"].startswith("registry.example/deltaserve:")


def test_secrets_have_the_names_that_the_chart_looks_for(helm: Helm) -> None:
    """The page makes them by `kubectl create secret generic NAME --from-file=KEY`."""
    made = {
        words[4]: words[5].partition("=")[2] for _, words in lines_with("kubectl create secret generic deltaserve-")
    }
    page, install = next(each for each in lines_with("helm install") if each[0].startswith("deploy/"))
    rendered = helm.run("template", "deltaserve", str(CHART), *install[4:]).stdout
    wanted = dict(re.findall(r"secretName: (\S+)\n\s+defaultMode: 0400\n\s+items:\n\s+- key: (\S+)", rendered))
    assert made == wanted, page


def test_deltaserve_takes_the_line_in_a_container() -> None:
    for page, words in lines_with("docker run"):
        image = next(index for index, word in enumerate(words) if word.startswith("deltaserve:"))
        settings = settings_of(words[image + 1 :])
        assert f"127.0.0.1:{settings.network.port}:{settings.network.port}" in words, page


@pytest.mark.parametrize("command", ["serve", "prefill", "decode"])
def test_deltaserve_takes_its_own_lines(command: str) -> None:
    for _, words in lines_with(f"deltaserve {command} "):
        settings_of(words[words.index("deltaserve") + 1 :])


def test_a_worker_of_dynamo_takes_its_own_lines() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    taken = [parser.parse_args(words[words.index("dynamo") + 1 :]) for _, words in lines_with("deltaserve dynamo ")]
    assert {each.discovery_backend for each in taken} == {"file"}
    assert [each.kv_events is None for each in taken] == [each.page_size is None for each in taken]


def test_variables_of_the_compose_page_are_those_of_the_file() -> None:
    asked = set(re.findall(r"\$\{(\w+)", (ROOT / "deploy/compose/compose.yaml").read_text()))
    set_here = {name for _, words in lines_with("export ") for word in words for name in re.findall(r"^(\w+)=", word)}
    assert set_here and set_here <= asked
