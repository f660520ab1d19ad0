"""The page of /view in a browser, while the server is used; and what it asks, on a server without a browser."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from deltaserve.control.front.known_worker import STATE_WORDS
from deltaserve.control.peer.table import PeerState
from tests.e2e.reference import random_prompt
from tests.e2e.server import PLAIN_HTTP, Server, wait_until
from tests.patience import PATIENCE_S
from tools.browser import BrowserPage, browser
from tools.clients.with_chromium import find_chromium

PROMPT = random_prompt(100, seed=41)


def told(server: Server, path: str) -> dict[str, Any]:
    reply = httpx.get(f"{server.base_url}{path}", timeout=PATIENCE_S, verify=PLAIN_HTTP)
    found: dict[str, Any] = reply.raise_for_status().json()
    return found


def test_a_prefix_is_named_alike_wherever_it_lies(shared_pair: Server) -> None:
    """Prefill and decode hold the prompt's pages by the same names, and nobody leases them when all is quiet."""
    shared_pair.complete(PROMPT, 4)
    shared_pair.complete([*PROMPT[:64], *random_prompt(40, seed=42)], 4)
    shared_pair.wait_quiet()

    def agree() -> bool:
        """Whether the trees hold the pages that the workers' last reports count: an answer may return meanwhile."""
        told_pages = {
            tree["name"]: sum(node["pages_below"] for node in tree["nodes"] or () if node["parent"] is None)
            for tree in told(shared_pair, "/admin/trees")["workers"]
        }
        reports = shared_pair.workers().items()
        return told_pages == {name: worker["status"]["evictable_pages"][0] for name, worker in reports}

    wait_until(agree, "trees and reports agree")
    trees = told(shared_pair, "/admin/trees")["workers"]
    prefill, decode = ({node["label"] for node in tree["nodes"] if node["parent"] is not None} for tree in trees)
    assert prefill & decode
    assert not any(node["leases"] for tree in trees for node in tree["nodes"])


@pytest.fixture(scope="module")
def page() -> Iterator[BrowserPage]:
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("Chromium is not installed: apt-get install chromium-headless-shell")
    with browser(chromium) as found:
        yield found


def text_of(page: BrowserPage, id: str) -> str:
    return str(page.value(f"document.getElementById('{id}').innerText"))


def test_the_page_shows_what_happens(shared_pair: Server, page: BrowserPage) -> None:
    shared_pair.complete(PROMPT, 4)
    page.open(f"{shared_pair.base_url}/view")
    page.wait_for("document.querySelectorAll('#trees rect').length > 1 && last !== null")
    assert text_of(page, "problem") == ""
    assert page.value("document.getElementById('ask').hidden")
    for name in shared_pair.workers():
        assert name in text_of(page, "workers")
        assert name in text_of(page, "trees")
    assert shared_pair.model in text_of(page, "model")
    page.wait_for("flow.length > 1")
    shared_pair.complete(PROMPT, 4)  # decode has its pages now
    page.wait_for("flow.some(([decode]) => decode >= 96)")
    page.wait_for("document.querySelectorAll('#flow rect.cached').length > 0")
    assert "ok" in text_of(page, "requests")
    assert page.value("document.querySelectorAll('#requests rect.decoded').length") > 0
    assert len(page.picture(900, 700)) > 10_000


def test_a_prefix_that_is_pointed_at_is_marked_on_every_worker(shared_pair: Server, page: BrowserPage) -> None:
    shared_pair.complete(PROMPT, 4)
    page.open(f"{shared_pair.base_url}/view")
    page.wait_for("document.querySelectorAll('#trees svg').length > 1")
    page.value(
        """(() => {
            const bars = [...document.querySelectorAll("#trees rect[data-label]")];
            const alike = (bar) => bars.filter((other) => other.dataset.label === bar.dataset.label);
            bars.find((bar) => alike(bar).length > 1).dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
        })()"""
    )
    page.wait_for("document.querySelectorAll('#trees rect.same').length > 1")


def test_the_page_says_when_the_server_is_gone(shared_pair: Server, page: BrowserPage) -> None:
    page.open(f"{shared_pair.base_url}/view")
    page.wait_for("last !== null")
    page.value("window.fetch = async () => { throw new Error('nobody is there'); }")
    told = r"/^nobody is there \(what is below is \d+ s old\)$/.test(document.getElementById('problem').textContent)"
    page.wait_for(told)
    assert page.value("document.body.classList.contains('stale')")
    assert page.value("document.querySelectorAll('#trees rect').length") > 0  # what was known stays


def test_states_of_links_have_the_words_that_top_has(shared_pair: Server, page: BrowserPage) -> None:
    page.open(f"{shared_pair.base_url}/view")
    for state, words in STATE_WORDS.items():
        assert page.value(f"STATES['{state.value}'] || '{state.value}'") == words


def test_a_worker_without_a_tree_is_named_with_its_state(shared_pair: Server, page: BrowserPage) -> None:
    page.open(f"{shared_pair.base_url}/view")
    page.wait_for("last !== null")
    told = page.value(
        """(() => {
            const [first, ...others] = last.workers;
            const now = { ...last, workers: [{ ...first, state: "greeting" }, ...others], trees: last.trees.slice(1) };
            showTrees(now);
            return document.getElementById("trees").innerText;
        })()"""
    )
    name = next(iter(shared_pair.workers()))
    assert f"{name} (prefill): nothing is known while it is {STATE_WORDS[PeerState.GREETING]}" in told


def test_a_narrow_window_scrolls_tables_alone(shared_pair: Server, page: BrowserPage) -> None:
    """Letters in pictures keep their size, and nothing is cut off at the side."""
    shared_pair.complete(PROMPT, 4)
    page.open(f"{shared_pair.base_url}/view")
    page.picture(400, 800)
    page.wait_for("document.querySelectorAll('#trees rect').length > 1")
    is_narrow = "document.querySelector('#trees svg').viewBox.baseVal.width < 400"
    page.wait_for(f"innerWidth === 400 && {is_narrow}")
    assert page.value("document.documentElement.scrollWidth") <= 400
