"""benchmarks/foresight.py against the tree, and against what knowing the future must be worth."""

import random

import pytest

from benchmarks.bench_evictions import AtEnd, Prompt, Told, hit_share, tenant_hits, tenants_row
from benchmarks.foresight import Future, Knowledge, known_share
from deltaserve.control.cache.eviction import KvEviction


def conversations(seed: int) -> list[Prompt]:
    """Eight of five turns behind two system prompts, and as many prompts that never come again."""
    draw, blocks = random.Random(seed), iter(range(1 << 20))
    prompts = [tuple(next(blocks) for _ in range(4)) for _ in range(2)] * 4
    trace: list[Prompt] = []
    for turn in draw.sample([*range(8)] * 5, 40):
        prompts[turn] += tuple(next(blocks) for _ in range(draw.randint(1, 4)))
        trace += [prompts[turn], tuple(next(blocks) for _ in range(draw.randint(2, 12)))]
    return trace


@pytest.mark.parametrize("seed", range(20))
def test_blocks_that_know_nothing_hit_as_the_tree_does(seed: int) -> None:
    trace = conversations(seed)
    for num_pages in (40, 80, 160):
        tree = hit_share(trace, num_pages, KvEviction.LRU)
        assert known_share(trace, num_pages, Knowledge.LRU) == pytest.approx(tree, abs=0.02)


@pytest.mark.parametrize("seed", range(20))
def test_no_hint_hits_more_than_the_whole_future(seed: int) -> None:
    trace = conversations(seed)
    for num_pages in (40, 80, 160):
        best = known_share(trace, num_pages, Knowledge.BEST)
        for knowledge in (Knowledge.LRU, Knowledge.AGENTS, Knowledge.ALL):
            assert known_share(trace, num_pages, knowledge) <= best


def test_turns_are_told_by_what_a_prompt_begins_with() -> None:
    future = Future([(1, 2), (9,), (1, 2, 3), (1, 4), (1, 2, 3, 5)])
    assert future.talks == [0, 1, 0, 3, 0]
    assert future.has_turns == {0}
    assert future.next_turn[0] == 2
    assert future.next_turn[2] == 4


def test_who_says_done_says_it_last() -> None:
    future = Future([(1, 2), (9,), (1, 2, 3), (1, 4), (1, 2, 3, 5)])
    assert [told.last_ones(future) for told in Told] == [set(), {4}, {1, 3, 4}]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("policy", KvEviction)
def test_saying_done_makes_hits_of_the_real_tree(seed: int, policy: KvEviction) -> None:
    """Never more than the whole future would, and over all sizes more than nothing said."""
    trace = conversations(seed)
    sums = dict.fromkeys(Told, 0.0)
    for num_pages in (40, 80, 160):
        best = known_share(trace, num_pages, Knowledge.BEST)
        for told in Told:
            hits = hit_share(trace, num_pages, policy, told.last_ones(Future(trace)))
            assert hits <= best
            sums[told] += hits
    assert sums[Told.NOBODY] <= sums[Told.AGENTS] <= sums[Told.ALL]


@pytest.mark.parametrize("seed", range(20))
def test_no_tenant_falls_below_its_share(seed: int) -> None:
    """Beside one that keeps all it may it has what three quarters of the pool give it, under lru; nearly, as a node
    that is used in part counts as used. Each has hits of its own tokens only, though both ask for the same."""
    trace, other = conversations(seed), conversations(seed + 100)
    for num_pages in (40, 80, 160):
        row = tenants_row(trace, other, num_pages, KvEviction.LRU)
        assert row["other keeps"] >= row["its share"] - 0.01
    same = tenant_hits(trace, trace, 1000, KvEviction.LRU, AtEnd.KEEP)
    assert same.plain == same.keeping == hit_share(trace, 1000, KvEviction.LRU)
