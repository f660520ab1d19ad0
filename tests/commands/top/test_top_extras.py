"""Trees and requests as lines."""

from typing import Any

import pytest

from deltaserve.commands.top.trees import tree_lines
from deltaserve.commands.top.waterfall import request_lines


def node(parent: int | None, label: str, pages: int, below: int, **changes: Any) -> dict[str, Any]:
    plain = {"leases": 0, "kept": False, "rooms": []}
    return {"parent": parent, "label": label, "pages": pages, "pages_below": below, **plain, **changes}


def worker(nodes: list[dict[str, Any]] | None, unseen: int = 0) -> dict[str, Any]:
    total = sum(each["pages_below"] for each in nodes or () if each["parent"] is None)
    about = {"name": "decode-0", "role": "decode", "page_size": 16, "nodes_seen": 5, "nodes_unseen": unseen}
    about |= {"pages": total}
    return {"workers": [{**about, "nodes": nodes}]}


def test_a_prefix_stands_below_what_it_continues() -> None:
    """The list has the largest first, whosever they are: the lines follow the tree."""
    nodes = [
        node(None, "team", 0, 100),
        node(0, "aaaa", 10, 70, leases=2),
        node(0, "bbbb", 30, 30, kept=True),
        node(1, "cccc", 60, 60, leases=1, rooms=["0123456789abcdef"]),
    ]
    first, *lines = tree_lines(worker(nodes))
    assert first == "decode-0 (decode): 100 pages of 16 tokens in 5 prefixes"
    assert [(line.index(line.strip()), line.split()[0]) for line in lines] == [
        (2, "team"),
        (4, "aaaa"),
        (6, "cccc"),
        (4, "bbbb"),
    ]
    assert [line.count("#") for line in lines] == [32, 22, 19, 10]
    assert [line.rsplit("  ", 1)[1].strip() for line in lines[1:]] == ["2 leases", "1 leases, rooms 01234567", "kept"]


def test_trees_of_whom_nothing_or_not_all_is_known() -> None:
    assert list(tree_lines(worker(None))) == ["decode-0 (decode): has not told yet"]
    assert list(tree_lines(worker([], 3))) == [
        "decode-0 (decode): 0 pages of 16 tokens in 5 prefixes, 3 more were not looked at"
    ]


def test_a_large_tree_has_few_lines() -> None:
    nodes = [node(None, "team", 0, 1000), *(node(0, f"{number:04}", 1, 1) for number in range(200))]
    assert len(list(tree_lines(worker(nodes)))) == 25


def request(e2e_s: float, **times: float) -> dict[str, Any]:
    sample = {"prompt_tokens": 3000, "output_tokens": 8, "decode_cached_tokens": 2048, "transferred_bytes": 1 << 20}
    return {"id": "cmpl-0123456789abcdef", "outcome": "ok", "e2e_s": e2e_s, "samples": [{**sample, **times}]}


def bar_of(line: str) -> str:
    return line.split("|")[1]


def test_each_part_of_a_request_has_its_share() -> None:
    times = {"queue_s": 0.5, "prefill_s": 1.0, "transfer_s": 0.25, "decode_queue_s": 0.5, "first_token_s": 2.0}
    first, line = request_lines({"running": [], "recent": [request(4.0, **times)]})
    assert first.endswith("0 to 4.00 s")
    assert bar_of(line) == "." * 6 + "P" * 9 + "m" * 3 + "." * 6 + "D" * 24
    assert line.startswith("456789abcdef ok           prompt  3000, on decode  2048, moved  1.0 MiB, answer     8")
    assert line.endswith("4.00 s")


def test_a_request_is_drawn_to_the_scale_of_the_longest() -> None:
    told = {
        "running": [],
        "recent": [request(1.0, queue_s=0.25, first_token_s=0.5), request(2.0, prefill_s=0.5, first_token_s=1.0)],
    }
    bars = [bar_of(line).rstrip() for line in list(request_lines(told))[1:]]
    assert bars == ["." * 6 + "P" * 6 + "D" * 12, "P" * 12 + "." * 12 + "D" * 24]


@pytest.mark.parametrize("samples", [[], [{"prompt_tokens": 5, "output_tokens": 0}]])
def test_a_request_of_which_nothing_is_known_yet_waits(samples: list[dict[str, Any]]) -> None:
    inside = {"id": "cmpl-1", "age_s": 1.0, "samples": samples}
    _, line = request_lines({"running": [inside], "recent": []})
    assert "running" in line
    assert bar_of(line) == "." * 48


def test_without_requests_there_is_the_legend() -> None:
    assert len(list(request_lines({"running": [], "recent": []}))) == 1
