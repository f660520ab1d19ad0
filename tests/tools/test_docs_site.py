"""The documentation as a site: every page is on it, no link leads nowhere, and Sphinx builds it without a network."""

import subprocess
import sys
from pathlib import Path

from tools.docs_site import ROOT, SOURCE, address, rewritten, site_pages, summary, write_sources

LINK_BLOCKED = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
"""Whoever fetches something fails at once."""


def test_every_document_and_every_folder_of_the_source_is_a_page() -> None:
    pages = site_pages()
    documents = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    folders = {path.parent for path in SOURCE.rglob("__init__.py")} - {SOURCE}
    assert documents | {address(folder / "README.md") for folder in folders} == set(pages)


def test_a_page_of_code_lists_its_modules() -> None:
    text = site_pages()["code/control/sched.md"]
    assert f"| `policy.py` | {summary(SOURCE / 'control/sched/policy.py')} |" in text


def test_links_lead_to_pages_of_the_site_or_become_text() -> None:
    known = frozenset({"architecture.md", "code/control.md", "code/control/cache.md", "safety.md"})
    to_code = rewritten("[c](../src/deltaserve/control/cache/README.md)", "architecture.md", known)
    assert to_code == "[c](code/control/cache.md)"
    assert rewritten("[s](safety.md#a)", "architecture.md", known) == "[s](safety.md#a)"
    from_code = rewritten("[cache](cache/README.md)", "code/control.md", known)
    assert from_code == "[cache](control/cache.md)"
    assert rewritten("[file](../pyproject.toml)", "architecture.md", known) == "file (`pyproject.toml`)"
    assert rewritten("[gone](gone.md)", "architecture.md", known) == "[gone](gone.md)", "Sphinx refuses it"
    assert rewritten("[web](https://x.example/y.md)", "architecture.md", known) == "[web](https://x.example/y.md)"


def test_it_builds_without_a_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.docs_site", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env=LINK_BLOCKED, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    html = (tmp_path / "site" / "code" / "control" / "sched.html").read_text()
    assert "POLICIES" in html
    assert '<script src="http' not in html and 'href="http' not in html.partition("<body")[0]


def test_a_link_that_leads_nowhere_ends_the_build(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    write_sources(sources)
    for page in sources.rglob("*.md"):
        page.unlink()
    (sources / "index.md").write_text("# A page\n\n[nowhere](no-such-page.md)\n")
    options = ("-q", "-W", "--keep-going", "-b", "dummy")  # pages are read, links resolved, nothing written
    command = [sys.executable, "-m", "sphinx", *options, str(sources), str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "no-such-page" in done.stderr
